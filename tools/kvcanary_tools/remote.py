"""Faults in a running server, from another process: what `kvcanary inject NAME --url` does."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvcanary_tools.console import UsageFailure

TIMEOUT_SECONDS = 60


def arm(url: str, name: str, api_key: str | None) -> dict[str, Any]:
    """Arm one fault of the catalogue there; what is armed, waits and has struck. UsageFailure where that is refused."""
    address = f"{url.rstrip('/').removesuffix('/v1')}/debug/kvcanary/faults"
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = Request(address, json.dumps({"name": name}).encode(), headers)
        with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise UsageFailure(f"{address} refuses {name!r}: {_reason(error)}", _hint(error.code)) from error
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UsageFailure(f"nobody takes faults at {address}: {reason}", _hint(404)) from error


def _reason(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _hint(status: int) -> str:
    if status == 401:
        return "pass --api-key, or KVCANARY_API_KEY"
    if status == 404:
        return "start the server with kvcanary serve --allow-faults"
    return "kvcanary faults lists them all"
