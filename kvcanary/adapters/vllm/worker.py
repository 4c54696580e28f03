"""A vLLM worker gets its canary, by the runner that it has."""

from __future__ import annotations

from typing import Any

from kvcanary.adapters.hosted.turns import report_without_turn
from kvcanary.adapters.vllm.compatibility import RUNNER_V1, RUNNER_V2, check, runner_of
from kvcanary.adapters.vllm.handle import Handle
from kvcanary.adapters.vllm.runner_v1 import HandleV1
from kvcanary.adapters.vllm.runner_v2 import HandleV2
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError

HANDLES: dict[str, type[Handle]] = {RUNNER_V2: HandleV2, RUNNER_V1: HandleV1}
DEVICES = ("cuda", "cpu")  # that the canary's kernels, or their torch twins, run on


def attach(worker: Any, config: CanaryConfig | None = None) -> Handle | None:
    """A canary for a worker whose device is there; it is armed when warm-up is over.

    None where it has no turn this week (`share`): it is not touched, but reports that.
    Where the worker serves already, reset its prefix cache first: what lies there has no records.
    AdapterError, with nothing attached, where vLLM or this worker are not as known.
    """
    held = getattr(worker, "kvcanary", None)
    if held is not None:
        return held
    runner = runner_of(worker.model_runner)
    faults = _faults_of(worker.model_runner, runner)
    if runner is None or faults:
        raise AdapterError(f"{'; '.join(faults)}; unset KVCANARY_MODE to serve without a canary")
    config = CanaryConfig.from_env() if config is None else config
    report = report_without_turn(config, worker.model_runner.device, getattr(worker, "rank", 0))
    if report is not None:
        worker.kvcanary_report = lambda: report
        return None
    return HANDLES[runner](worker, config)


def _faults_of(found: Any, runner: str | None) -> list[str]:
    if runner is None:
        return [f"the runner must be that of {' or '.join(HANDLES)}, got {type(found).__module__}"]
    if found.device.type not in DEVICES:
        return [f"the device must be {' or '.join(DEVICES)}, got {found.device.type}"]
    return check(runner=runner)
