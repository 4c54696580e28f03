"""A vLLM worker gets its canary, by the runner that it has."""

from __future__ import annotations

from typing import Any

from kvcanary.adapters.vllm.compatibility import RUNNER_V1, RUNNER_V2, check
from kvcanary.adapters.vllm.handle import Handle
from kvcanary.adapters.vllm.runner_v1 import HandleV1
from kvcanary.adapters.vllm.runner_v2 import HandleV2
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError


def attach(worker: Any, config: CanaryConfig | None = None) -> Handle:
    """A canary for a worker whose device is there; it is armed when warm-up is over.

    Where the worker serves already, reset its prefix cache first: what lies there has no records.
    AdapterError, with nothing attached, where vLLM or this worker are not as known.
    """
    held = getattr(worker, "kvcanary", None)
    if held is not None:
        return held
    handles: dict[str, type[Handle]] = {RUNNER_V2: HandleV2, RUNNER_V1: HandleV1}
    module = type(worker.model_runner).__module__
    faults = [] if module in handles else [f"the runner must be that of {' or '.join(handles)}, got {module}"]
    faults = faults or check(runner=module)
    if faults:
        raise AdapterError(f"{'; '.join(faults)}; unset KVCANARY_MODE to serve without a canary")
    return handles[module](worker, CanaryConfig.from_env() if config is None else config)
