"""One vLLM worker with a canary: what is replaced on it, and when.

Everything is replaced on the instances, and comes back with `detach()`. Order of a step in runner V2: finish_requests,
add_requests, update_requests (zeroed and copied blocks), prepare_attn (block tables, slots), the forward, sample_tokens
(which lets a draft propose). The look at what will be read comes after prepare_attn, or after an external load; the
record of what was stored after the forward; the counter of findings travels with the tokens, so that none leaves before
it is read.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import structlog
import torch

from kvcanary.adapters import paged_moves
from kvcanary.adapters.paged import PagedCanary
from kvcanary.adapters.paged_report import settle
from kvcanary.adapters.paged_state import Forward
from kvcanary.adapters.vllm.drift import RUNNER, check
from kvcanary.adapters.vllm.layout import read_layers
from kvcanary.adapters.vllm.loads import Loads
from kvcanary.adapters.vllm.output import hold_back
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError

_events = structlog.get_logger("kvcanary")


def attach(worker: Any, config: CanaryConfig | None = None) -> Handle:
    """A canary for a worker whose device is there; it is armed when warm-up is over.

    Where the worker serves already, reset its prefix cache first: what lies there has no records.
    AdapterError, with nothing attached, where vLLM or this worker are not as known.
    """
    held = getattr(worker, "kvcanary", None)
    if held is not None:
        return held
    faults = check()
    runner = worker.model_runner
    if not faults and type(runner).__module__ != RUNNER:
        faults = [f"the runner must be that of {RUNNER}, got {type(runner).__module__}: it is not followed yet"]
    if faults:
        raise AdapterError(f"{'; '.join(faults)}; unset KVCANARY_MODE to serve without a canary")
    return Handle(worker, CanaryConfig.from_env() if config is None else config)


class Handle:
    """The canary of one worker, until `detach()`."""

    def __init__(self, worker: Any, config: CanaryConfig) -> None:
        self.worker, self.runner, self.config = worker, worker.model_runner, config
        self.canary: PagedCanary | None = None
        self.is_armed = False
        self._fresh: list[tuple[int, str]] = []
        self._pending: tuple[Any, Any] | None = None
        self._is_running = False  # a forward that was read is on its way
        self._count: Callable[[], int] = int
        self._undo: list[Callable[[], None]] = []
        self._loads: Loads | None = None
        self._max_len = 0
        self._seen = 0
        for owner, names in (
            (worker, ("initialize_from_config", "compile_or_warm_up_model", "sleep", "wake_up")),
            (
                self.runner,
                (
                    "finish_requests",
                    "add_requests",
                    "update_requests",
                    "prepare_attn",
                    "execute_model",
                    "sample_tokens",
                ),
            ),
        ):
            for name in names:
                self._replace(owner, name, getattr(self, f"_{name}"))
        worker.kvcanary = self
        worker.kvcanary_report = self.report
        self._undo += [functools.partial(delattr, worker, name) for name in ("kvcanary", "kvcanary_report")]
        if getattr(self.runner, "kv_caches", None):  # it serves already
            self.canary = self._bind()
            self._warm_up(self.canary)
            self._arm(self.canary)

    def report(self) -> dict[str, Any]:
        """The certificate of this worker: `llm.collective_rpc("kvcanary_report")`."""
        if self.canary is None:
            return {"armed": False}
        self._look_at(int(self.canary.total), self.canary.step)
        rank, held = getattr(self.worker, "rank", 0), self.runner.req_states.req_id_to_index.values()
        own = {"armed": self.is_armed, "rank": rank, "bytes": self.canary.num_bytes}
        own["loads_checked"] = 0 if self._loads is None else self._loads.compared  # entries whose bytes had a name
        return {**own, **self.canary.certificate(held)}

    def detach(self) -> None:
        """Undo everything. Twice is harmless."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    # the worker

    def _initialize_from_config(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.is_armed = False
        self.canary = self._bind()
        return result

    def _compile_or_warm_up_model(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if self.canary is not None:
            self._warm_up(self.canary)  # compiled before vLLM begins to watch for late compilations
        result = method(*args, **kwargs)
        if self.canary is not None:
            self._arm(self.canary)
        return result

    def _sleep(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_armed = False
        return method(*args, **kwargs)

    def _wake_up(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.canary = self._bind()
        self._arm(self.canary)
        return result

    # the runner, in the order of a step

    def _finish_requests(self, method: Any, scheduler_output: Any) -> Any:
        if self.is_armed and self.canary is not None:
            numbers = self.runner.req_states.req_id_to_index
            gone = [*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())]
            gone = [name for name in gone if name in numbers]
            if gone:
                chosen = [numbers[name] for name in gone]
                length = int(self.runner.req_states.num_computed_tokens_np[chosen].max()) + self._max_new
                self.canary.look(self._lines(), chosen, gone, min(length, self._max_len))
        return method(scheduler_output)

    def _add_requests(self, method: Any, scheduler_output: Any) -> Any:
        result = method(scheduler_output)
        if self.is_armed and self.canary is not None and scheduler_output.scheduled_new_reqs:
            numbers, new = self.runner.req_states.req_id_to_index, []
            for request in scheduler_output.scheduled_new_reqs:
                number, length = numbers[request.req_id], request.num_computed_tokens
                tokens = None if request.prompt_embeds is not None else request.prefill_token_ids
                new.append((number, request.req_id, tokens, length, _salt(request)))
                if length:
                    self._fresh.append((number, request.req_id))
            self.canary.admit(new)
            if self._loads is not None:
                self._loads.expect(new)
        return result

    def _update_requests(self, method: Any, scheduler_output: Any) -> Any:
        result = method(scheduler_output)
        canary = self.canary
        if self.is_armed and canary is not None:
            zeroed = scheduler_output.new_block_ids_to_zero
            copies = scheduler_output.kv_cache_block_copies
            for group in canary.groups if zeroed or copies else ():
                requests = self._new_blocks(scheduler_output, group.number)
                if zeroed:
                    paged_moves.zeroed(canary, group, self._blocks(group.number, list(zeroed)), requests)
                if copies:
                    src, dst = (self._blocks(group.number, [pair[side] for pair in copies]) for side in (0, 1))
                    paged_moves.copied(canary, group, src, dst, requests)
        return result

    def _prepare_attn(self, method: Any, input_batch: Any) -> Any:
        result = method(input_batch)
        if self.is_armed:
            self._pending = input_batch, result
            if self._loads is None:
                self._read()
        return result

    def _pre_forward(self, method: Any, scheduler_output: Any) -> Any:
        result = method(scheduler_output)
        if self.is_armed and self._pending is not None and self._loads is not None and self.canary is not None:
            self._loads.arrived(self._lines())
            self._read()
        return result

    def _read(self) -> None:
        """Show the canary what this forward is about to write and to read."""
        canary, pending = self.canary, self._pending
        self._pending = None
        if canary is None or pending is None:
            return
        batch, (tables, slots) = pending
        n, new = batch.num_reqs, int(batch.num_scheduled_tokens.max())
        lengths = batch.seq_lens_cpu_upper_bound.numpy()[:n]
        longest = int(lengths.max())
        kind = "decode" if new == 1 else "verify" if new <= self._max_new else "prefill"
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            canary.look(self._lines(), [number for number, _ in fresh], [name for _, name in fresh], longest)
        starts, every = batch.query_start_loc, self.runner.input_buffers.query_start_loc
        forward = Forward(
            batch.req_ids[:n], batch.idx_mapping_np[:n], (kind, 0), batch.num_tokens, longest, int(lengths.sum()),
            tables, batch.seq_lens, every if every.data_ptr() == starts.data_ptr() else starts,
            batch.input_ids, batch.positions, slots, self._known(), self._lines(),
        )  # fmt: skip
        canary.read(forward)
        self._is_running = True

    def _execute_model(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_running = False
        result = method(*args, **kwargs)
        if self.is_armed and self.canary is not None and self._is_running:
            self.canary.wrote()
            self._count = self.canary.count_to_host()
            if self._loads is not None:
                self._loads.name()
        return result

    def _sample_tokens(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result, canary = method(*args, **kwargs), self.canary
        if self.is_armed and canary is not None and self._is_running:
            self._is_running = False
            look_at = functools.partial(self._look_at, step=canary.step)
            if hasattr(result, "get_output"):
                hold_back(result, self._count, look_at)
            else:
                look_at(self._count())
        return result

    def _propose(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if self.is_armed and self.canary is not None and self._is_running:
            self.canary.took(kwargs["num_rejected"] if "num_rejected" in kwargs else args[self._rejected_at])
        return result

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
        runner = self.runner
        tables = runner.block_tables
        if tables.cp_size != 1 or getattr(runner, "pcp_manager", None) is not None:
            raise AdapterError("context parallelism is not followed: set its sizes to 1, or unset KVCANARY_MODE")
        late = _late_layers(runner)
        self._max_new = 1 + int(getattr(runner, "num_speculative_steps", 0))
        self._max_len = int(runner.max_model_len)
        num_tokens = tables.slot_mappings.shape[1]
        canary = PagedCanary(self.config, tables.max_num_reqs, self._max_new, num_tokens, runner.device)
        context = runner.compilation_config.static_forward_context
        for number, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
            size = runner.kernel_block_sizes[number]
            pools = _alike([(name, context[name]) for name in spec.layer_names], late)
            views = [
                read_layers(name, layers, *_shape_of(spec.kv_cache_spec, next(iter(layers))), size)
                for name, layers in pools.items()
            ]
            window = int(getattr(spec.kv_cache_spec, "sliding_window", None) or 0)
            group = canary.add_group(number, size, views[0].num_slots, window)
            for view, (name, layers) in zip(views, pools.items(), strict=True):
                canary.add_layers(group, view, list(layers), is_late=name.startswith("draft"))
        speculator = getattr(runner, "speculator", None)
        if late and speculator is not None and not hasattr(speculator.propose, "__wrapped__"):
            self._rejected_at = list(inspect.signature(speculator.propose).parameters).index("num_rejected")
            self._replace(speculator, "propose", self._propose)
        connector = getattr(runner, "kv_connector", None)
        if connector is not None and hasattr(connector, "kv_connector"):
            self._loads = Loads(canary)
            if not hasattr(connector.pre_forward, "__wrapped__"):
                self._replace(connector, "pre_forward", self._pre_forward)
        return canary

    def _arm(self, canary: PagedCanary) -> None:
        canary.forget()
        self.is_armed = True
        self._seen = int(canary.total)
        _events.info(
            "kvcanary.attached", host="vllm", mode=self.config.mode, content=self.config.content, pid=os.getpid(),
            rank=getattr(self.worker, "rank", 0), groups=len(canary.groups), bytes=canary.num_bytes,
        )  # fmt: skip

    def _warm_up(self, canary: PagedCanary) -> None:
        """Everything that a step launches, compiled and captured, over no rows."""
        runner, tables, none = self.runner, self.runner.block_tables, np.empty(0, dtype=np.int64)
        held = runner.input_buffers
        canary.prepare(
            Forward(
                (), none, ("decode", 0), 0, self._max_len, 0, tables.input_block_tables, held.seq_lens,
                held.query_start_loc, held.input_ids, held.positions, tables.slot_mappings.unbind(), self._known(),
                self._lines(),
            )
        )  # fmt: skip

    def _lines(self) -> Sequence[torch.Tensor]:
        return [table.gpu for table in self.runner.block_tables.block_tables]

    def _known(self) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.runner.req_states
        return states.all_token_ids.gpu, states.total_len.gpu

    def _kernel_blocks(self, group: int, blocks: Iterable[int]) -> list[int]:
        """Of the manager's blocks."""
        ratio = self.runner.block_tables.blocks_per_kv_block[group]
        return [block * ratio + part for block in blocks for part in range(ratio)]

    def _blocks(self, group: int, blocks: list[int]) -> torch.Tensor:
        return torch.tensor(self._kernel_blocks(group, blocks), device=self.runner.device)

    def _new_blocks(self, scheduler_output: Any, group: int) -> dict[int, str]:
        """By kernel block, the request that was given it for this step."""
        cached = scheduler_output.scheduled_cached_reqs
        given = [(new.req_id, new.block_ids) for new in scheduler_output.scheduled_new_reqs]
        given += [pair for pair in zip(cached.req_ids, cached.new_block_ids, strict=True) if pair[1] is not None]
        return {block: name for name, blocks in given for block in self._kernel_blocks(group, blocks[group])}

    def _look_at(self, total: int, step: int) -> None:
        """Tell of what fired up to this step; `total`: the counter behind it."""
        canary = self.canary
        if canary is None or total <= self._seen:
            return
        fired, self._seen = total - self._seen, total
        told = 0
        for known in list(canary.steps):
            if not known.is_settled and known.number <= step:
                known.is_settled = True
                told += settle(canary, known)
        if not told:
            canary.coverage.untold_incidents += fired


def _salt(request: Any) -> str:
    """What makes equal tokens mean other K and V: the adapter."""
    lora = request.lora_request
    return "" if lora is None else f"lora {getattr(lora, 'lora_int_id', lora)}"


def _late_layers(runner: Any) -> frozenset[str]:
    """Layers that a draft model stores, after the target's forward."""
    return frozenset(getattr(getattr(runner, "speculator", None), "draft_attn_layer_names", None) or ())


def _alike(layers: Sequence[tuple[str, Any]], late: frozenset[str]) -> dict[str, dict[str, Any]]:
    """By pool, layers by name whose tensors have one shape; each storage once."""
    pools: dict[tuple[Any, ...], dict[str, Any]] = {}
    seen: set[int] = set()
    for name, layer in layers:
        tensor = layer.kv_cache
        if not isinstance(tensor, torch.Tensor):
            raise AdapterError(f"layer {name} keeps a state, not K and V: it is not followed yet")
        if tensor.data_ptr() in seen:
            continue  # it shares the cache of a layer that is followed
        seen.add(tensor.data_ptr())
        key = name in late, tuple(tensor.shape), tensor.stride(), tensor.dtype
        pools.setdefault(key, {})[name] = layer
    names: dict[str, dict[str, Any]] = {}
    for (is_late, *_), chosen in pools.items():
        role = "draft" if is_late else "target"
        number = sum(name.startswith(role) for name in names)
        names[f"{role} {number}" if number else role] = chosen
    return names


def _shape_of(spec: Any, layer: str) -> tuple[int, int]:
    own = getattr(spec, "kv_cache_specs", {}).get(layer, spec)
    return own.num_kv_heads, own.head_size
