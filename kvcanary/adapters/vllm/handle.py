"""The canary of one vLLM worker: what both runners have in common.

Everything is replaced on the instances, and comes back with `detach()`. In every step the canary is shown what the
forward is about to write and to read once the block tables are there (or after an external load), and takes the bytes
after the forward; the counter of findings travels with the tokens, so that none leaves before it is read.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable
from importlib.metadata import version
from typing import Any, ClassVar

import structlog
import torch

from kvcanary.adapters.observed import moves as paged_moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.report import report_step
from kvcanary.adapters.observed.state import RING, Forward
from kvcanary.adapters.vllm.aggregate import SharedReporter
from kvcanary.adapters.vllm.connector import Loads
from kvcanary.adapters.vllm.layout import pools_of
from kvcanary.adapters.vllm.output_gate import hold_back
from kvcanary.config import CanaryConfig
from kvcanary.errors import KVCorruptionError

_events = structlog.get_logger("kvcanary")
WORKER_HOOKS = ("initialize_from_config", "compile_or_warm_up_model", "sleep", "wake_up")


class Handle(ABC):
    """The canary of one worker, until `detach()`.

    hooks: methods of the runner that are replaced; the method of this class whose name is that with one `_` before it
           is called instead, with the replaced one as its first argument
    """

    hooks: ClassVar[tuple[str, ...]]

    def __init__(self, worker: Any, config: CanaryConfig) -> None:
        self.worker, self.runner, self.config = worker, worker.model_runner, config
        self.canary: PagedCanary | None = None
        self.is_armed = False
        self._is_running = False  # a forward that was read is on its way
        self._count: Callable[[], int] = int
        self._undo: list[Callable[[], None]] = []
        self._loads: Loads | None = None
        self._seen = 0
        self._is_collected, self._uncollected = is_collected(worker), deque[int](maxlen=RING - 1)
        for owner, names in ((worker, WORKER_HOOKS), (self.runner, self.hooks)):
            for name in names:
                self._replace(owner, name, getattr(self, f"_{name.lstrip('_')}"))
        worker.kvcanary = self
        worker.kvcanary_report = self.report
        self._undo += [functools.partial(delattr, worker, name) for name in ("kvcanary", "kvcanary_report")]
        if getattr(self.runner, "kv_caches", None):  # it serves already
            self.canary = self._bind()
            self.canary.prepare(self._empty_forward())
            self._arm(self.canary)

    def report(self) -> dict[str, Any]:
        """The certificate of this worker: `llm.collective_rpc("kvcanary_report")`."""
        if self.canary is None:
            return {"armed": False}
        self._look_at(int(self.canary.memory.total), self.canary.step)
        own = {"armed": self.is_armed, "rank": getattr(self.worker, "rank", 0), "bytes": self.canary.memory.num_bytes}
        own["waits"] = self.canary.waits  # steps whose counter was not there when their tokens were
        own["loads_checked"] = 0 if self._loads is None else self._loads.compared  # entries whose bytes had a name
        own["incidents"] = [finding.to_dict() for finding in self.canary.log.findings]
        return {**own, **self.canary.certificate(self._held())}

    def detach(self) -> None:
        """Undo everything. Twice is harmless."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    # what the runners differ in

    @abstractmethod
    def _new_canary(self) -> PagedCanary:
        """Without groups."""

    @abstractmethod
    def _kernel_block_size(self, group: int) -> tuple[int, int]:
        """Entries of a block of the attention kernel, and how many of these a block of the manager has."""

    @abstractmethod
    def _late_layers(self) -> Collection[str]:
        """Layers that a draft model stores, after the target's forward."""

    @abstractmethod
    def _empty_forward(self) -> Forward:
        """No rows, over the tensors of the runner."""

    @abstractmethod
    def _held(self) -> Collection[int]:
        """Numbers of the rows that there are."""

    # the worker

    def _initialize_from_config(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.is_armed = False
        self.canary = self._bind()
        return result

    def _compile_or_warm_up_model(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if self.canary is not None:  # compiled before vLLM begins to watch for late compilations
            self.canary.prepare(self._empty_forward())
        result = method(*args, **kwargs)
        if self.canary is not None:
            self._arm(self.canary)
        return result

    def _sleep(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_armed = self._is_running = False
        return method(*args, **kwargs)

    def _wake_up(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.canary = self._bind()
        self._arm(self.canary)
        return result

    # a step

    def _moving(self, scheduler_output: Any) -> bool:
        """Whether blocks are zeroed or copied for this step; then what waits to be read is read now."""
        moves = bool(scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies)
        if moves:
            self._flush()
        return moves

    def _moved(self, scheduler_output: Any) -> None:
        """Blocks were zeroed or copied for this step."""
        zeroed, copies = scheduler_output.new_block_ids_to_zero, scheduler_output.kv_cache_block_copies
        if self.canary is None:
            return
        for group in self.canary.groups:
            requests = self._new_blocks(scheduler_output, group.number)
            if zeroed:
                paged_moves.zeroed(self.canary, group, self._blocks(group.number, zeroed), requests)
            if copies:
                src, dst = (self._blocks(group.number, [pair[side] for pair in copies]) for side in (0, 1))
                paged_moves.copied(self.canary, group, src, dst, requests)

    def _flush(self) -> None:
        if self.is_armed and self.canary is not None:
            self.canary.flush(self._empty_forward())

    def _read(self, forward: Forward) -> None:
        """Show the canary the forward that is next."""
        if self.canary is not None:
            self.canary.read(forward)
            self._is_running = True

    def _execute_model(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_running = False
        if self._uncollected:
            self._collect_late()
        if self.is_armed and self.canary is not None:
            self.canary.recent.scheduled(args[0])
        result = method(*args, **kwargs)
        if self._is_running and self.canary is not None:
            self.canary.wrote()
            self._count = self.canary.count_to_host()
            if self._loads is not None:
                self._loads.name()
        else:
            self._flush()
        return result

    def _sample_tokens(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result, canary = method(*args, **kwargs), self.canary
        if self._is_running and canary is not None:
            self._is_running = False
            look_at = functools.partial(self._look_at, step=canary.step)
            if not self._is_collected:
                self._uncollected.append(canary.step)
            elif hasattr(result, "get_output"):
                hold_back(result, self._count, look_at)
            else:
                look_at(self._count())
        return result

    def _collect_late(self) -> None:
        """Look at the steps that have arrived here, where the engine takes no output; mode raise ends this process.

        The engine would only log an exception of such a worker, while the others wait for it.
        """
        while self._uncollected and self.canary is not None:
            total = self.canary.launches.count_of(self._uncollected[0])
            if total is None:
                return
            try:
                self._look_at(total, self._uncollected.popleft())
            except KVCorruptionError as error:
                for finding in error.findings:
                    self.canary.response.report_finding(finding)
                raise SystemExit(str(error)) from error

    def _look_at(self, total: int, step: int) -> None:
        """Tell of what fired up to this step; `total`: the counter behind it."""
        canary = self.canary
        if canary is None or total <= self._seen:
            return
        fired, self._seen = total - self._seen, total
        reported = 0
        for known in list(canary.steps):
            if not known.is_reported and known.number <= step:
                known.is_reported = True
                reported += report_step(canary, known)
        if not reported:
            canary.coverage.untold_incidents += fired

    # helpers

    def _replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        own = owner.__dict__.get(name)

        @functools.wraps(method)
        def around(*args: Any, **kwargs: Any) -> Any:
            return wrapper(method, *args, **kwargs)

        setattr(owner, name, around)
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _bind(self) -> PagedCanary:
        """Read where everything lies now; the pools are new, or moved."""
        canary, late = self._new_canary(), self._late_layers()
        parallel = getattr(getattr(self.worker, "vllm_config", None), "parallel_config", None)
        is_alone = getattr(parallel, "world_size", 1) == 1
        canary.response.report_finding = SharedReporter(getattr(self.worker, "rank", 0), is_alone).report_finding
        canary.dumps.environment |= {"engine": "vllm", "version": version("vllm"), "runner": type(self).__name__[-2:]}
        canary.dumps.environment |= {} if is_alone else {"rank": getattr(self.worker, "rank", 0)}
        context = self.runner.compilation_config.static_forward_context
        for number, spec in enumerate(self.runner.kv_cache_config.kv_cache_groups):
            size, ratio = self._kernel_block_size(number)
            canary.recent.ratios.append(ratio)
            layers = [(name, context[name]) for name in spec.layer_names]
            pools = pools_of(layers, spec.kv_cache_spec, size, late)
            window = int(getattr(spec.kv_cache_spec, "sliding_window", None) or 0)
            group = canary.memory.add_group(number, size, pools[0][0].num_slots, window)
            for view, names in pools:
                canary.memory.add_layers(group, view, names, is_late=view.name.startswith("draft"))
        return canary

    def _arm(self, canary: PagedCanary) -> None:
        canary.memory.forget()
        self.is_armed = True
        self._seen = int(canary.memory.total)
        _events.info(
            "kvcanary.attached", host="vllm", mode=self.config.mode, content=self.config.content, pid=os.getpid(),
            rank=getattr(self.worker, "rank", 0), groups=len(canary.groups), bytes=canary.memory.num_bytes,
        )  # fmt: skip

    def _kernel_blocks(self, group: int, blocks: Iterable[int]) -> list[int]:
        """Of the manager's blocks."""
        _, ratio = self._kernel_block_size(group)
        return [block * ratio + part for block in blocks for part in range(ratio)]

    def _blocks(self, group: int, blocks: Iterable[int]) -> torch.Tensor:
        return torch.tensor(self._kernel_blocks(group, blocks), device=self.runner.device)

    def _new_blocks(self, scheduler_output: Any, group: int) -> dict[int, str]:
        """By kernel block, the request that was given it for this step."""
        cached = scheduler_output.scheduled_cached_reqs
        given = [(new.req_id, new.block_ids) for new in scheduler_output.scheduled_new_reqs]
        given += [pair for pair in zip(cached.req_ids, cached.new_block_ids, strict=True) if pair[1] is not None]
        return {block: name for name, blocks in given for block in self._kernel_blocks(group, blocks[group])}


def is_collected(worker: Any) -> bool:
    """Whether the engine takes this worker's outputs: of several processes, those of one alone."""
    parallel: Any = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    if getattr(parallel, "distributed_executor_backend", None) != "mp":
        return True
    ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return bool(worker.rank == parallel.world_size - ranks)


def salt_of(request: Any) -> str:
    """What makes equal tokens mean other K and V: the adapter."""
    lora = request.lora_request
    return "" if lora is None else f"lora {getattr(lora, 'lora_int_id', lora)}"
