"""The canary of one SGLang scheduler, which shares a process with its model runners.

Everything is replaced on instances after the scheduler was built, and comes back with `detach()`. Order of a step:
`run_batch` runs one or several forwards, `process_batch_result` gives out their tokens; no token leaves before the
counter of findings that came with its step was looked at.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import structlog

from kvcanary.adapters.observed.report import report_step
from kvcanary.adapters.sglang.compatibility import check
from kvcanary.adapters.sglang.runner import WatchedDraft, WatchedRunner
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.report.finding import Finding

#: Classes of draft workers whose forwards are known here.
FOLLOWED_DRAFTS = ("EAGLEWorkerV2",)
_events = structlog.get_logger("kvcanary")


def attach(scheduler: Any, config: CanaryConfig | None = None) -> Handle:
    """A canary for a scheduler that is built and serves nobody yet.

    AdapterError, with nothing attached, where SGLang or this scheduler are not as known.
    """
    held = getattr(scheduler, "kvcanary", None)
    if held is not None:
        return held
    faults = check()
    if faults:
        raise AdapterError(f"{'; '.join(faults)}; unset KVCANARY_MODE to serve without a canary")
    return Handle(scheduler, CanaryConfig.from_env() if config is None else config)


class Handle:
    """The canary of one scheduler, until `detach()`."""

    def __init__(self, scheduler: Any, config: CanaryConfig) -> None:
        self.scheduler, self.config = scheduler, config
        self._undo: list[Callable[[], None]] = []
        self._requests: dict[str, Any] = {}
        self._seen: dict[WatchedRunner, int] = {}
        self.target, self.draft = watched(scheduler, config)
        self.runners = [self.target] + ([] if self.draft is None else [self.draft])
        for own in self.runners:
            own.prepare()
        scheduler.kvcanary = self
        self._undo.append(functools.partial(delattr, scheduler, "kvcanary"))
        self._replace(scheduler, "run_batch", self._run_batch)
        self._replace(scheduler, "process_batch_result", self._process_batch_result)
        self._replace(scheduler, "flush_cache", self._flush_cache)
        for own in self.runners:
            self._replace(own.runner, "forward", functools.partial(self._forward, own))
            self._replace(own.runner.token_to_kv_pool, "move_kv_cache", own.moved)
        if self.draft is not None:
            self._replace(scheduler.draft_worker, "verify", self._verify)
        self._replace_function("sglang.srt.mem_cache.common", "release_kv_cache", self._release)
        _events.info(
            "kvcanary.attached", host="sglang", mode=config.mode, content=config.content, pid=os.getpid(),
            bytes=sum(own.canary.memory.num_bytes for own in self.runners),
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """The certificate of this scheduler, by the model whose pool it is."""
        for own in self.runners:
            self._look_at(own, int(own.canary.memory.total), own.canary.step)
        return {own.role: own.canary.certificate(own.held) for own in self.runners}

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return [finding for own in self.runners for finding in own.canary.log.findings]

    def detach(self) -> None:
        """Undo everything. Twice is harmless."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    # a step

    def _run_batch(self, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._requests = {request.rid: request for request in batch.reqs}
        result = method(batch, *args, **kwargs)
        result.kvcanary = [(own, own.canary.count_to_host(), own.canary.step) for own in self.runners]
        return result

    def _forward(self, own: WatchedRunner, method: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return own.forward(functools.partial(method, forward_batch, *args, **kwargs), forward_batch, self._requests)

    def _verify(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.target.accepted(result)
        return result

    def _process_batch_result(self, method: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        for own, count, step in getattr(result, "kvcanary", ()):
            self._look_at(own, count(), step)
        return method(batch, result, *args, **kwargs)

    def _look_at(self, own: WatchedRunner, total: int, step: int) -> None:
        """Tell of what fired up to this step; `total`: the counter behind it."""
        canary, seen = own.canary, self._seen.get(own, 0)
        if total <= seen:
            return
        self._seen[own], reported = total, 0
        for known in list(canary.steps):
            if not known.is_reported and known.number <= step:
                known.is_reported = True
                reported += report_step(canary, known)
        if not reported:
            canary.coverage.untold_incidents += total - seen

    # what happens between steps

    def _release(self, method: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.kv.holds_kv:
            for own in self.runners:
                own.leave(request)
        return method(request, *args, **kwargs)

    def _flush_cache(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        for own in self.runners:
            own.flush()
        is_done = method(*args, **kwargs)
        if is_done:
            for own in self.runners:
                own.forget()
        return is_done

    # helpers

    def _replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        own = owner.__dict__.get(name)

        @functools.wraps(method)
        def around(*args: Any, **kwargs: Any) -> Any:
            return wrapper(method, *args, **kwargs)

        setattr(owner, name, around)
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _replace_function(self, module: str, name: str, wrapper: Callable[..., Any]) -> None:
        """In every module that has it under its name."""
        function = getattr(sys.modules[module], name)

        @functools.wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            return wrapper(function, *args, **kwargs)

        for holder in list(sys.modules.values()):
            if (getattr(holder, "__dict__", None) or {}).get(name) is function:
                setattr(holder, name, around)
                self._undo.append(functools.partial(setattr, holder, name, function))


def watched(scheduler: Any, config: CanaryConfig) -> tuple[WatchedRunner, WatchedDraft | None]:
    """The target's runner and the draft's, if there is one. AdapterError where a draft is of a kind not followed."""
    args, worker = scheduler.server_args, scheduler.draft_worker
    most = max(scheduler.max_prefill_tokens, scheduler.max_req_len) + scheduler.max_running_requests
    if worker is None:
        return WatchedRunner(scheduler.tp_worker.model_runner, config, most, 1), None
    kind = type(worker).__name__
    if kind not in FOLLOWED_DRAFTS:
        raise AdapterError(
            f"drafts of {kind} are not followed yet, only those of {', '.join(FOLLOWED_DRAFTS)}; unset KVCANARY_MODE "
            "to serve without a canary"
        )
    width, topk = args.speculative_num_draft_tokens, args.speculative_eagle_topk
    most = max(most, scheduler.max_running_requests * width)
    target = WatchedRunner(scheduler.tp_worker.model_runner, config, most, width)
    return target, WatchedDraft(worker.draft_worker.draft_runner, config, most, width, topk)
