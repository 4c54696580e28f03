"""A running server from another process: faults that it takes, and the dump of what it has recorded."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kvcanary.dumps.container import MOST_FILE_BYTES
from kvcanary_tools.console import UsageFailure

TIMEOUT_SECONDS = 60
DEBUG_PREFIX = "/debug/kvcanary"
FAULTS, DEBUG = "--allow-faults", "--debug"  # what a server must have been started with


def server_at(url: str) -> str:
    """The root of a server, of its URL or of that of its API. UsageFailure for what is no URL."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii()
    except ValueError:  # brackets that do not close, a port that is no number
        is_url = False
    if not is_url:
        raise UsageFailure(
            f"a server's URL is http:// and its host, got {url!r}", "kvcanary serve says its URL when it starts"
        )
    return url.rstrip("/").removesuffix("/v1")


def arm(url: str, name: str, api_key: str | None) -> dict[str, Any]:
    """Arm one fault of the catalogue there; which of them wait for a request. UsageFailure where that is refused."""
    address = _debug_page(url, "faults")
    request = Request(address, json.dumps({"name": name}).encode(), {"Content-Type": "application/json"})
    try:
        reported = json.loads(_answer(request, api_key))
        return {"waiting": reported["waiting"]}
    except HTTPError as error:
        raise UsageFailure(f"{address} refuses {name!r}: {_reason(error)}", _hint(error.code, FAULTS)) from error
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise UsageFailure(f"nobody takes faults at {address}: {reason}", _hint(404, FAULTS)) from error


def drill(url: str, api_key: str | None) -> dict[str, Any]:
    """Let a server flip one bit in a request of its own: result and finding. UsageFailure where it refuses."""
    address = _debug_page(url, "drill")
    try:
        reported: dict[str, Any] = json.loads(_answer(Request(address, b""), api_key))
        return {"result": str(reported["result"]), "finding": reported["finding"]}
    except HTTPError as error:
        hint = "a drill needs --kv-canary log, abort or heal" if error.code == 400 else _hint(error.code, FAULTS)
        raise UsageFailure(f"{address} refuses a drill: {_reason(error)}", hint) from error
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise UsageFailure(f"nobody takes a drill at {address}: {reason}", _hint(404, FAULTS)) from error


def fetch_dump(url: str, api_key: str | None) -> bytes:
    """What a server has recorded by now, as the bytes of a dump. UsageFailure where there is none to be had."""
    address = _debug_page(url, "dump")
    try:
        return _answer(Request(address), api_key)
    except HTTPError as error:
        raise UsageFailure(f"{address} gives no dump: {_reason(error)}", _hint(error.code, DEBUG)) from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UsageFailure(f"nobody gives a dump at {address}: {reason}", _hint(404, DEBUG)) from error


def _debug_page(url: str, name: str) -> str:
    return f"{server_at(url)}{DEBUG_PREFIX}/{name}"


def _answer(request: Request, api_key: str | None) -> bytes:
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return answer.read(MOST_FILE_BYTES + 1)


def _reason(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _hint(status: int, option: str) -> str:
    if status == 401:
        return "pass --api-key, or KVCANARY_API_KEY"
    if status == 404:
        return f"start the server with kvcanary serve {option}"
    return "kvcanary faults lists them all" if option == FAULTS else "read what the server says on its terminal"
