"""A drill: one bit is flipped in a request of the server's own, and the canary must say so."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from spec_engine.engine import Engine
from spec_engine.errors import ConfigError
from spec_engine.sampling import SamplingParams
from spec_engine.server.inspection.faulting import FaultPanel
from spec_engine.server.worker import EngineWorker, Job

if TYPE_CHECKING:
    from kvcanary import Finding

FAULT = "bits.flip"
PROMPT_TOKENS, NEW_TOKENS = 24, 48
FOUND, SILENT, NOT_MADE = "found", "silent", "not made"


async def drill(worker: EngineWorker, panel: FaultPanel) -> dict[str, Any]:
    """result: `found`, `silent`, or `not made` where the request ended before it could be struck; with the finding.

    ConfigError where a finding would stop the server, or nothing is watched.
    """
    check_mode(worker.engine)
    prompt = [
        secrets.randbelow(worker.engine.model.config.vocab_size) for _ in range(PROMPT_TOKENS)
    ]  # nobody shares it
    job = await worker.submit([prompt], [SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)])
    name = await worker.call(lambda engine: _armed(worker, panel, job))
    async for _ in job:
        pass
    is_made = name is not None and await worker.call(lambda engine: panel.disarm_drill(name))
    finding = await worker.call(lambda engine: None if name is None else _finding_of(engine, name))
    result = NOT_MADE if not is_made else SILENT if finding is None else FOUND
    worker.drills[result] += 1
    return {"result": result, "finding": None if finding is None else finding.to_dict()}


def check_mode(engine: Engine) -> None:
    if engine.canary is None:
        raise ConfigError("nothing is watched here, so nobody would find a flipped bit", "serve with --kv-canary")
    if engine.config.canary.mode == "raise":
        raise ConfigError(
            "mode raise stops the server at a finding, also at that of a drill",
            "serve with --kv-canary log, abort or heal",
        )


def _armed(worker: EngineWorker, panel: FaultPanel, job: Job) -> str | None:
    """The request of the job, which is struck from now on; None where it has ended."""
    name = worker.request_of(job)
    canary = worker.engine.canary
    if name is not None and canary is not None:
        canary.drilled.add(name)
        panel.arm_drill(FAULT, name)
    return name


def _finding_of(engine: Engine, name: str) -> Finding | None:
    """The first that touches the request."""
    findings = [] if engine.canary is None else engine.canary.findings
    return next((one for one in findings if one.touches({name})), None)
