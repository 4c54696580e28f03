"""The canary of one SGLang scheduler, which shares a process with its model runners.

Everything is replaced on instances after the scheduler was built, and comes back with `detach()`. What replaces a
method has its parameters' names, for SGLang may use them. Order of a step: `run_batch` runs one or several forwards,
`process_batch_result` gives out their tokens; no token leaves before the counter of findings that came with its step
was looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvcanary.adapters.hosted.cells import Shard
from kvcanary.adapters.hosted.guard import Guard
from kvcanary.adapters.hosted.replacements import Replacements
from kvcanary.adapters.hosted.sampled import GIVEN, of_one_seed
from kvcanary.adapters.hosted.turns import report_without_turn
from kvcanary.adapters.sglang import host_tier, lifetimes, ranks, states
from kvcanary.adapters.sglang.compatibility import DRAFTS, WITHOUT_MODEL, check, unfollowed
from kvcanary.adapters.sglang.draft import WatchedByPosition, WatchedDraft
from kvcanary.adapters.sglang.runner import WatchedRunner
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError
from kvcanary.ranks.levels import Levels
from kvcanary.report.finding import Finding

#: Classes of draft workers whose forwards are known here, with what watches the draft's pool; None: there is none.
FOLLOWED_DRAFTS = {"EAGLEWorkerV2": WatchedDraft, "StandaloneWorkerV2": WatchedByPosition, "NGRAMWorker": None}
#: Others, with what stands against them.
UNFOLLOWED_DRAFTS = {
    "MultiLayerEagleWorkerV2": "each of its layers drafts in a pool of its own",
    "FrozenKVMTPWorkerV2": "its draft reads the entries of the target and has none",
}

PREFILL = "_draft_extend_for_prefill"
SPECULATION, MOVE = "sglang.srt.speculative.spec_utils", "move_accept_tokens_to_target_kvcache"


def attach(scheduler: Any, config: CanaryConfig | None = None) -> Handle | None:
    """A canary for a scheduler that is built and serves nobody yet; None where it has no turn this week (`share`).

    AdapterError, with nothing attached, where SGLang or this scheduler are not as known.
    """
    held = getattr(scheduler, "kvcanary", None)
    if held is not None:
        return held
    worker, drafts = scheduler.draft_worker, None
    if worker is not None:
        drafts = DRAFTS if FOLLOWED_DRAFTS.get(type(worker).__name__, WatchedDraft) else WITHOUT_MODEL
    faults = check(drafts=drafts)
    faults = faults or unfollowed(scheduler.server_args) or host_tier.unfollowed(scheduler)
    if faults:
        raise AdapterError(f"{'; '.join(faults)}; unset KVCANARY_MODE to serve without a canary")
    config = CanaryConfig.from_env() if config is None else config
    config.expect_names_in_memory("SGLang, whose host tier lives in its own process")
    runner = scheduler.tp_worker.model_runner
    if report_without_turn(config, torch.device(runner.device), getattr(runner, "tp_rank", 0)) is not None:
        return None
    return Handle(scheduler, config)


class Handle:
    """The canary of one scheduler, until `detach()`."""

    def __init__(self, scheduler: Any, config: CanaryConfig) -> None:
        self.scheduler, self.config = scheduler, config
        self._requests: dict[str, Any] = {}
        self._accepted: Any = None  # nodes that a worker without a draft model has accepted
        group = ranks.group_of(scheduler, config)
        self.target, self.draft = watched(scheduler, of_one_seed(config, group), ranks.shard_of(scheduler))
        self.runners = [self.target] + ([] if self.draft is None else [self.draft])
        self.guard = Guard("sglang", config.mode, parts=[own.guard for own in self.runners])
        self.replaced = Replacements(self.guard)
        allocator = self._allocator = slots_of(scheduler)
        self.target.on_their_way = self.target.nodes if scheduler.enable_overlap else 0
        self.target.compare_ranks(group)
        self._agree(0, ranks.STARTED, functools.partial(ranks.started, self.target.rows.req_to_token, allocator))
        for own in self.runners:
            own.arm()
        replace = self.replaced.replace
        self.replaced.put(scheduler, "kvcanary", self)
        for name in ("run_batch", "process_batch_result"):
            replace(scheduler, name, getattr(self, f"_{name}"))
        for own in self.runners:
            replace(own.runner, "forward", functools.partial(self._forward, own), own.guard)
            replace(own.runner.token_to_kv_pool, "move_kv_cache", own.moved, own.guard)
        replace(self.target.runner, "sample", self.target.sample, self.target.guard)
        if self.draft is not None:
            replace(scheduler.draft_worker, "verify", self._verify, self.target.guard)
            replace(scheduler.draft_worker.draft_worker, PREFILL, self.draft.prefill, self.draft.guard)
            self._follow_graphs(scheduler.draft_worker, self.draft, replace)
        elif scheduler.draft_worker is not None:
            replace(scheduler.draft_worker, "forward_batch_generation", self._generated, self.target.guard)
            self.replaced.replace_function(SPECULATION, MOVE, self._accept_tokens)
        self.replaced.replace_function("sglang.srt.mem_cache.common", "release_kv_cache", self._release)
        for name in ("alloc_for_extend", "alloc_for_decode", "alloc_for_spec_decode"):
            self.replaced.replace_function("sglang.srt.mem_cache.allocation", name, getattr(self, f"_{name}"))
        self._page = int(allocator.page_size)
        replace(allocator, *(("free", self._free) if self._page == 1 else ("_release_page_ids", self._free_pages)))
        replace(scheduler.tree_cache, "checkpoint", self._checkpoint)
        lifetimes.follow(scheduler, replace, self._tell)
        host_tier.follow(scheduler, self.target, replace)
        states.follow(scheduler, self.target, replace)
        self.guard.is_serving = True

    def _follow_graphs(self, worker: Any, draft: WatchedDraft, replace: Any) -> None:
        """SGLang's graphs of a draft bypass its runner: both are followed, of an extend and of draft steps. A server
        that adapts its steps has both for each number of them.
        """
        followed = set[int]()
        for own in (worker.draft_worker, *states_of(worker).values()):
            extends, steps = own.cuda_graph_runner_for_draft_extend, own.cuda_graph_runner
            hooks = (
                (extends, functools.partial(self._forward, draft)),
                (steps, functools.partial(draft.replayed, steps)),
            )
            for graph, hook in hooks:
                if graph is not None and id(graph) not in followed:
                    followed.add(id(graph))
                    replace(graph, "execute", hook, draft.guard)
        if states_of(worker):
            replace(worker, "apply_runtime_state", self._adapted, self.target.guard)

    def _adapted(self, method: Any, state: Any) -> Any:
        """Between two rounds."""
        result = method(state)
        self._tell("adapted", state.speculative_num_draft_tokens, state.speculative_num_steps)
        return result

    def report(self) -> dict[str, Any]:
        """The certificate of this scheduler, by the model whose pool it is."""
        return {own.role: own.report() for own in self.runners}

    @property
    def findings(self) -> list[Finding]:
        """The first finding of every incident."""
        return [finding for own in self.runners for finding in own.canary.log.findings]

    def detach(self) -> None:
        """Undo everything. Twice is harmless."""
        for own in self.runners:
            own.detach()
        self.replaced.undo()

    def _tell(self, what: str, *args: Any) -> None:
        """Let the canary of each pool hear of something, by its method of this name; one that fails stops alone."""
        for own in self.runners:
            own.guard.run(getattr(own, what), *args)

    # a step

    def _run_batch(self, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._requests = {request.rid: request for request in batch.reqs}
        self._tell("begin", batch.reqs)
        planned = functools.partial(ranks.planned, batch, self._allocator)
        self._agree(self.target.canary.step + 1, ranks.PLANNED, planned)
        result = method(batch, *args, **kwargs)
        looks = [own.guard.run(own.sent) for own in self.runners]
        looks = [(own.guard, look) for own, look in zip(self.runners, looks, strict=True) if look is not None]
        result.kvcanary = self.target.canary.step, looks
        return result

    def _agree(self, step: int, phase: int, levels: Callable[[], Levels]) -> None:
        """Is this what all ranks of the server have?"""
        if self.target.sampled is not None:
            self.target.guard.run(lambda own: own.agree(step, levels(), phase), self.target.sampled)

    def _forward(self, own: WatchedRunner, method: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return own.forward(functools.partial(method, forward_batch, *args, **kwargs), forward_batch, self._requests)

    def _verify(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.target.accepted(result.accept_lens, result.accept_index, result.next_token_ids)
        return result

    def _generated(self, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a worker that drafts without a model: a forward, and what was accepted, where it was a verify."""
        result = method(batch, *args, **kwargs)
        if self._accepted is not None:
            self.target.accepted(result.accept_lens, self._accepted, result.next_token_ids)
        self._accepted = None
        return result

    def _accept_tokens(self, method: Any, batch: Any, accept_index: Any, *args: Any, **kwargs: Any) -> Any:
        self._accepted = accept_index
        return method(batch, accept_index, *args, **kwargs)

    def _process_batch_result(self, method: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        step, looks = getattr(result, "kvcanary", (0, ()))
        self._agree(step, GIVEN, functools.partial(ranks.given, batch, result))
        for guard, look in looks:
            guard.run(look)
        return method(batch, result, *args, **kwargs)

    # what happens between steps

    def _alloc_for_extend(self, method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(batch, *args, **kwargs)
        begins = batch.prefix_lens
        ends = [begin + new for begin, new in zip(begins, batch.extend_lens, strict=True)]
        self._tell("admit", batch.reqs, begins)
        self._tell("granted", batch.reqs, begins, ends)
        return result

    def _alloc_for_decode(self, method: Any, batch: Any, token_per_req: int, *args: Any, **kwargs: Any) -> Any:
        result = method(batch, token_per_req, *args, **kwargs)
        ends = [request.kv.kv_allocated_len for request in batch.reqs]
        self._tell("granted", batch.reqs, [end - token_per_req for end in ends], ends)
        return result

    def _alloc_for_spec_decode(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        begins, ends = (kwargs[name].tolist() for name in ("cur_kv_lens_cpu", "nxt_kv_lens_cpu"))
        self._tell("granted", kwargs["reqs"], begins, ends)
        return result

    def _free(self, method: Any, free_index: Any) -> Any:
        if self._allocator.free_group is None:  # else it comes again when the group ends
            self._tell("freed", free_index.to(torch.int64))
        return method(free_index)

    def _free_pages(self, method: Any, *page_ids: Any) -> Any:
        for page in page_ids:
            slots = page.to(torch.int64)[:, None] * self._page + torch.arange(self._page, device=page.device)
            self._tell("freed", slots.flatten())
        return method(*page_ids)

    def _checkpoint(self, method: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(req, *args, **kwargs)
        if req.kv.holds_kv:
            self._tell("shared", req)
        return result

    def _release(self, method: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        number = req.kv.req_pool_idx
        if req.kv.holds_kv:
            self._tell("leave", req)
        result = method(req, *args, **kwargs)
        self._tell("left", number)
        return result


def slots_of(scheduler: Any) -> Any:
    """What gives out the slots that rows name; where some layers have a window, others are given out beside them."""
    allocator = scheduler.token_to_kv_pool_allocator
    return getattr(allocator, "full_attn_allocator", allocator)


def watched(
    scheduler: Any, config: CanaryConfig, shard: Shard | None = None
) -> tuple[WatchedRunner, WatchedDraft | None]:
    """The target's runner and the draft's, if there is one. AdapterError where a draft is of a kind not followed.

    shard: what this rank has of each layer of the target; None: all
    """
    worker = scheduler.draft_worker
    most = max(scheduler.max_prefill_tokens, scheduler.max_req_len) + scheduler.max_running_requests
    if worker is None:
        return WatchedRunner(scheduler.tp_worker.model_runner, config, most, 1, shard), None
    kind = type(worker).__name__
    if kind not in FOLLOWED_DRAFTS:
        why = UNFOLLOWED_DRAFTS.get(kind, "what it stores is not known here")
        raise AdapterError(
            f"speculative_algorithm {scheduler.server_args.speculative_algorithm!r} drafts by {kind}, which is not "
            f"followed: {why}; only {', '.join(FOLLOWED_DRAFTS)} are; unset KVCANARY_MODE to serve without a canary"
        )
    now, watch = worker.speculative_num_draft_tokens, watch_of(kind, scheduler.tree_cache)
    width = max([now, *(state.speculative_num_draft_tokens for state in states_of(worker).values())])
    most = max(most, scheduler.max_running_requests * width)
    target, drafts = WatchedRunner(scheduler.tp_worker.model_runner, config, most, width, shard), worker.draft_worker
    if watch is None:
        return target, None
    steps = drafts.speculative_num_steps
    draft = watch(drafts.draft_runner, config, most, width, drafts.topk, steps, target=target)
    for own in target, draft:
        own.adapted(now, steps)
    return target, draft


def watch_of(kind: str, cache: Any) -> type[WatchedDraft] | None:
    """What watches the pool of a draft worker of this class, whose prefix cache this is; None: it has no pool.

    SGLang's cache has pairs of tokens as keys for EAGLE, but not beside recurrent states.
    """
    watch = FOLLOWED_DRAFTS[kind]
    by_pairs = getattr(getattr(cache, "tree_core", cache), "is_eagle", True)
    return watch if watch is None or by_pairs else WatchedByPosition


def states_of(worker: Any) -> Mapping[int, Any]:
    """By number of draft steps, what a worker that adapts it runs them by; empty: it has one number."""
    controller = getattr(worker, "adaptive_controller", None)
    return {} if controller is None else controller._states
