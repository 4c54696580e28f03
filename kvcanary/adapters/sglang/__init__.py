"""SGLang: the canary by plug-in, with no change of code: `KVCANARY_MODE=raise python -m sglang.launch_server ...`.

`register` is the entry point (`sglang.srt.plugins`), which SGLang calls in each of its processes. Nothing is imported
where KVCANARY_MODE says off, or says nothing. A canary that cannot attach ends the start: SGLang logs an exception of a
plug-in and serves on without it, so what is raised here is SystemExit. docs/sglang.md says what is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kvcanary.environment import is_asked_for
from kvcanary.errors import KVCanaryError

SCHEDULER = "sglang.srt.managers.scheduler"
HOOKS = "sglang.srt.plugins.hook_registry"
REMEDY = "unset KVCANARY_MODE to serve without a canary"


def register() -> None:
    """Let the scheduler of this process have a canary once it is built. Twice is harmless.

    SystemExit, with one sentence, where a setting is wrong or this SGLang is not as known.
    """
    try:
        if not is_asked_for():
            return
        from kvcanary.adapters.observed.capabilities import expect_watching
        from kvcanary.config import CanaryConfig

        expect_watching(CanaryConfig.from_env(), "one request from outside")
    except KVCanaryError as error:
        raise SystemExit(f"kvcanary: {error}") from error
    if not _is_there(SCHEDULER):
        raise SystemExit(f"kvcanary: {SCHEDULER} is gone, nothing would be watched; {REMEDY}")
    if SCHEDULER in sys.modules:  # a process without a scheduler would take ten seconds to import one
        _hook()


def _hook() -> None:
    """SGLang only logs where a hook cannot be applied, so its target is looked for here."""
    try:
        hooks, scheduler = import_module(HOOKS), import_module(SCHEDULER).Scheduler
        registry, around = hooks.HookRegistry, hooks.HookType.AROUND
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"kvcanary: nothing can be hooked into SGLang: {error}; {REMEDY}") from error
    if not hasattr(scheduler.__init__, "kvcanary_hooked"):
        scheduler.__init__.kvcanary_hooked = True
        registry.register(f"{SCHEDULER}.Scheduler.__init__", _build, around)


def _is_there(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return module in sys.modules or find_spec(module) is not None
    except ModuleNotFoundError:  # one that it lies in
        return False


def _build(build: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """args: of the scheduler, the server's settings first."""
    from kvcanary.adapters.sglang.scheduler import attach
    from kvcanary.adapters.sglang.step_trace import traced_graphs

    with traced_graphs(args[0] if args else kwargs["server_args"]):
        build(scheduler, *args, **kwargs)
    try:
        attach(scheduler)
    except KVCanaryError as error:
        raise SystemExit(f"kvcanary: {error}") from error
