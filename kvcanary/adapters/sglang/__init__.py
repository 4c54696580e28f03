"""SGLang: the canary by plug-in, with no change of code: `KVCANARY_MODE=raise python -m sglang.launch_server ...`.

`register` is the entry point (`sglang.srt.plugins`), which SGLang calls in each of its processes. Nothing is imported
where KVCANARY_MODE says off, or says nothing. A canary that cannot attach ends the start: SGLang logs an exception of a
plug-in and serves on without it, so what is raised here is SystemExit. docs/adapters.md says what is checked.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler"


def register() -> None:
    """Let the scheduler of this process have a canary once it is built. Twice is harmless.

    SystemExit, with one sentence, where a setting is wrong or this SGLang is not as known.
    """
    if os.environ.get("KVCANARY_MODE", "off").strip().lower() in ("", "off"):
        return
    from kvcanary.adapters.observed.capabilities import expect_watching
    from kvcanary.config import CanaryConfig
    from kvcanary.errors import KVCanaryError

    try:
        expect_watching(CanaryConfig.from_env(), "one request from outside")
    except KVCanaryError as error:
        raise SystemExit(f"kvcanary: {error}") from error
    if SCHEDULER not in sys.modules:  # a process that has no scheduler; importing it would take it ten seconds
        return
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(f"{SCHEDULER}.Scheduler.__init__", _built, hooks.HookType.AFTER)


def _built(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    from kvcanary.adapters.sglang.scheduler import attach
    from kvcanary.errors import KVCanaryError

    try:
        attach(scheduler)
    except KVCanaryError as error:
        raise SystemExit(f"kvcanary: {error}") from error
    return result
