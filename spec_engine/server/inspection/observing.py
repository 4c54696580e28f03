"""What the debug pages show of an engine, read between two steps; plain JSON, without a token or a text."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spec_engine.engine import Engine
from spec_engine.html.sentences import sentences
from spec_engine.request import Request

CACHED_NAME = "(shared)"
REPORTED = (
    "incident", "code", "name", "pool", "page", "slot", "offset", "position", "layer", "step", "last_good_step",
    "owner", "action",
)  # fmt: skip


def state_of(engine: Engine) -> dict[str, Any]:
    """Everything that the live page draws."""
    certificate = certificate_of(engine)
    return {
        "step": engine.metrics.num_steps,
        "mode": engine.config.canary.mode,
        "accepted_length": engine.metrics.accepted_length,
        "tokens": engine.metrics.tokens_emitted,
        "certificate": certificate,
        "sentences": [] if engine.canary is None or certificate is None else _sentences(engine, certificate),
        "findings": timeline_of(engine),
        "pages": pages_of(engine),
        "requests": requests_of(engine),
    }


def certificate_of(engine: Engine) -> dict[str, Any] | None:
    """The canary's certificate without its findings; None where it is off, mode off where it has no turn this week."""
    if engine.canary is None:
        config = engine.config.canary
        if not config.enabled:
            return None
        from kvcanary import hardware_of, turn_of

        return {"mode": "off", "turn": turn_of(config.share), "hardware": hardware_of(engine.device)}
    return {name: value for name, value in engine.canary.certificate().items() if name != "findings"}


def _sentences(engine: Engine, certificate: dict[str, Any]) -> list[tuple[str, str]]:
    return [(tone, text) for tone, text in sentences(certificate, sum(one["count"] for one in findings_of(engine)))]


def findings_of(engine: Engine) -> list[dict[str, Any]]:
    """The first finding of each code and site, whole, with how many there were."""
    return [] if engine.canary is None else engine.canary.certificate()["findings"]


def reported_of(engine: Engine) -> list[dict[str, Any]]:
    """The first finding of every incident, whole, in the order of `timeline_of` and of a dump."""
    return [] if engine.canary is None else [finding.to_dict() for finding in engine.canary.findings]


def incidents_of(engine: Engine) -> list[dict[str, Any]]:
    """The first finding of every incident that is no drill's, whole: what a fleet joins."""
    canary = engine.canary
    return [] if canary is None else [one.to_dict() for one in canary.findings if not one.touches(canary.drilled)]


def timeline_of(engine: Engine) -> list[dict[str, Any]]:
    """The first finding of every incident, in the order in which they were found: what, where, when, whose."""
    if engine.canary is None:
        return []
    return [
        {name: getattr(finding, name) for name in REPORTED}
        | {"site": list(finding.site), "readers": list(finding.readers)}
        for finding in engine.canary.findings
    ]


def dump_of(engine: Engine) -> bytes | None:
    """What the flight recorder has by now, as the bytes of a dump; None where nobody records."""
    if engine.canary is None or not engine.config.canary.ring:
        return None
    with TemporaryDirectory() as folder:
        return engine.canary.dump(Path(folder) / "running.kvdump").read_bytes()


def requests_of(engine: Engine) -> list[dict[str, Any]]:
    """Running requests first, then those that wait."""
    running = [_request(request, "running") for request in engine.running]
    return running + [_request(request, "waiting") for request in engine.scheduler.waiting]


def pages_of(engine: Engine) -> dict[str, Any]:
    """The canary's page map; without a canary what the allocator knows, in the same columns."""
    if engine.canary is not None:
        return engine.canary.page_map()
    references, num_pages = engine.allocator.references, engine.sizes.num_pages + 1
    owner, count = [-1] * num_pages, [0] * num_pages
    for page, holders in references.items():
        owner[page], count[page] = 0, holders
    for number, request in enumerate(engine.running, 1):
        for page in request.pages[request.num_shared :]:
            owner[page] = number
    return {
        "step": engine.metrics.num_steps,
        "page_size": engine.sizes.page_size,
        "null_pages": 1,
        "states": ["FREE", "HELD"],
        "state": [int(held > 0) for held in count],
        "owners": [CACHED_NAME, *(request.request_id for request in engine.running)],
        "owner": owner,
        "references": count,
        "generation": [0] * num_pages,
        "checked": [-1] * num_pages,
    }


def _request(request: Request, state: str) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "state": state,
        "prompt_len": request.prompt_len,
        "output_len": request.output_len,
        "max_new_tokens": request.params.max_new_tokens,
        "committed_len": request.committed_len,
        "cached_len": request.cached_len,
        "pages": list(request.pages),
        "num_shared": request.num_shared,
    }
