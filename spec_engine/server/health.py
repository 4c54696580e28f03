"""``/health``: is the engine alive, does it take requests, and what does the canary say."""

from __future__ import annotations

from typing import Any

from spec_engine.engine import Engine
from spec_engine.server.worker import EngineWorker, ServerStoppedError


async def health(worker: EngineWorker) -> tuple[int, dict[str, Any]]:
    """The status code, 200 where requests are taken, and the body.

    canary.status: "off", "clean", or "findings" with their number and codes; where and whose is for the debug pages.
    One incident may be found at several places of reading: `findings` counts these, `incidents` those described.
    """
    is_live = worker.failure is None
    try:
        canary = await worker.call(_canary)
    except ServerStoppedError:
        canary = {"status": "stopped"}
    body = {
        "status": "ok" if worker.is_ready else "draining" if is_live else "stopped",
        "live": is_live,
        "ready": worker.is_ready,
        "sequences": worker.num_live,
        "canary": canary,
    }
    return 200 if worker.is_ready else 503, body


def _canary(engine: Engine) -> dict[str, Any]:
    if engine.canary is None:
        return {"status": "off", "mode": "off"}
    certificate = engine.canary.certificate()
    counts = dict.fromkeys(sorted(certificate["fired"]), 0)
    for finding in certificate["findings"]:
        counts[finding["code"]] = counts.get(finding["code"], 0) + finding["count"]
    return {
        "status": "findings" if certificate["findings"] else "clean",
        "mode": certificate["mode"],
        "content": certificate["content"],
        "findings": sum(counts.values()),
        "incidents": len({finding.incident for finding in engine.canary.findings}),
        "codes": sorted(code for code, count in counts.items() if count),
    }
