"""vLLM: the canary by plug-in, with no change of code: `KVCANARY_MODE=raise vllm serve MODEL`.

`register` is the entry point (`vllm.general_plugins`), which vLLM calls in each of its processes, also in those that
have no model. So no worker is touched before it has its device, and nothing is imported where KVCANARY_MODE says off,
or says nothing. In the process of the scheduler its block pool is heard. docs/vllm.md says what is checked and what
is not.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from kvcanary.environment import is_asked_for

ANCHOR = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"


def register() -> None:
    """Let every worker of this process have a canary once its device is there. Twice is harmless.

    CanaryConfigError or AdapterError where a setting is wrong: at once, before a model is loaded.
    """
    if not is_asked_for():
        return
    from kvcanary.adapters.observed.capabilities import expect_watching
    from kvcanary.config import CanaryConfig

    expect_watching(CanaryConfig.from_env(), "one request from outside", can_heal=True)
    module, _, path = ANCHOR.partition(":")
    owner, name = path.split(".")
    wrapper = getattr(import_module(module), owner)
    method = getattr(wrapper, name)
    if hasattr(method, "kvcanary_undo"):
        return

    @functools.wraps(method)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        from kvcanary.adapters.vllm.worker import attach

        attach(self.worker)
        return result

    from kvcanary.adapters.vllm.block_pool import follow

    untold = follow()

    def undo() -> None:
        setattr(wrapper, name, method)
        untold()

    init_device.kvcanary_undo = undo  # type: ignore[attr-defined]
    setattr(wrapper, name, init_device)


def unregister() -> None:
    """Undo `register` in this process; workers that have a canary keep it until their own `detach`."""
    module, _, path = ANCHOR.partition(":")
    owner, name = path.split(".")
    undo = getattr(getattr(getattr(import_module(module), owner), name), "kvcanary_undo", None)
    if undo is not None:
        undo()
