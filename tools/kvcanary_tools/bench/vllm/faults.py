"""Faults inside a running vLLM, one at a time, each under a canary that logs; for both of its model runners."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvcanary.adapters.vllm.states import is_state
from kvcanary_tools.bench.vllm.model import make_prompts

if TYPE_CHECKING:
    from kvcanary_tools.bench.vllm.engine import Bench

HARMS = ("flip", "swap", "shift", "hand_out", "copy_left_out", "not_zeroed")
STEP, POSITION = 12, 200  # of the blow at the earliest, and entries that the struck request has at least
KEPT = (
    "code",
    "reader",
    "writer",
    "position",
    "page",
    "slot",
    "layer",
    "layers",
    "part",
    "head",
    "dim",
    "bit",
    "evidence",
)


class Restored:
    """A connector that has loaded all layers before a forward begins."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Each is there."""


class Faults:
    """What is done to the engine of a Bench; each harm is called before every step until it says that it has struck."""

    least, swapped = POSITION, (2, 6)  # entries of the struck request at least; entries of its block table
    requests = 24

    def __init__(self, bench: Bench) -> None:
        self.bench, self.runner = bench, bench.runner
        self.is_v1 = not hasattr(self.runner, "req_states")
        self.module = sys.modules[type(self.runner).__module__]
        groups = self.runner.kv_cache_config.kv_cache_groups  # whoever sees everything is struck
        specs = [own.kv_cache_spec for own in groups]
        self.group = next(
            n for n, own in enumerate(specs) if getattr(own, "sliding_window", None) is None and not is_state(own)
        )
        self.size = groups[self.group].kv_cache_spec.block_size
        self.names = set(groups[self.group].layer_names)
        self.touched: str | None = None  # whose bytes or blocks a fault struck

    def each(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in HARMS:
            if self.bench.is_late:
                return
            yield name, self.attempt(lambda name=name: self.fault(getattr(self, name)))  # type: ignore[misc]
        for name, goes_wrong in () if self.is_v1 else (("load", False), ("load_elsewhere", True)):
            yield name, self.attempt(lambda wrong=goes_wrong: self.load(wrong))  # type: ignore[misc]
        yield "none", self.attempt(lambda: self.fault(lambda output, step: False))
        yield "flip_raise", self.attempt(lambda: self.fault(self.flip, mode="raise"))

    def attempt(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return run()
        except Exception as error:
            return {"raised": type(error).__name__, "message": str(error)[:1500]}

    def fault(self, harm: Callable[[Any, int], bool], mode: str = "log") -> dict[str, Any]:
        import torch

        prompts, self.touched = self.bench.prompts(self.requests, seed=5), None
        with self.bench.watched(mode=mode, content="full") as handle:
            inner, state = self.runner.execute_model, {"step": 0, "struck": None}

            def execute_model(*args: Any, **kwargs: Any) -> Any:
                state["step"] += 1
                output = args[0] if args else kwargs["scheduler_output"]
                with torch.inference_mode():
                    if state["struck"] is None and harm(output, state["step"]):
                        state["struck"] = state["step"]
                return inner(*args, **kwargs)

            self.runner.execute_model = execute_model
            try:
                self.bench.run(prompts, tokens=40)
            finally:
                self.runner.execute_model = inner
            report = handle.report()
            findings = handle.canary.log.findings
            named = {name for own in findings for name in (own.reader, own.writer, *own.readers) if name}
        found = [{name: entry[name] for name in (*KEPT, "action")} for entry in report["findings"][:3]]
        counts = {"fired": report["fired"], "untold": report["untold_incidents"]}
        is_named = bool(named) if self.touched is None else self.touched in named
        return {"struck": state["struck"], "touched": self.touched, "is_named": is_named, "found": found, **counts}

    # where things are

    def row(self, output: Any) -> tuple[str, int] | None:
        """A request of this step that had more than `least` entries before it, and its row."""
        if self.is_v1:
            batch = self.runner.input_batch
            rows, lengths = batch.req_id_to_index, batch.num_computed_tokens_cpu
        else:
            states = self.runner.req_states
            rows, lengths = states.req_id_to_index, states.num_computed_tokens_np
        for name, number in rows.items():
            if name in output.num_scheduled_tokens and int(lengths[number]) > self.least:
                return name, number
        return None

    def table(self) -> Any:
        """Block tables by row: on the device, of runner V1 on the host, from where each step copies them."""
        if self.is_v1:
            return self.runner.input_batch.block_table[self.group].block_table.np
        return self.runner.block_tables.block_tables[self.group].gpu

    def new_block(self, output: Any) -> tuple[str, int] | None:
        """A running request that is given a block in this step, and that block."""
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks and blocks[self.group]:
                return name, blocks[self.group][-1]
        return None

    def caches(self) -> list[Any]:
        layers = self.runner.compilation_config.static_forward_context
        return [layer.kv_cache for name, layer in layers.items() if name in self.names and layer.kv_cache.numel()]

    def unused(self, count: int) -> list[int]:
        """Blocks that the scheduler would hand out last."""
        queue = self.bench.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()[-count:]]

    # harms

    def flip(self, output: Any, step: int) -> bool:
        """One bit of V, of head 3 and dim 9 at position 87, in the layer in the middle; of a latent cell's dim 9."""
        import torch

        chosen = self.row(output)
        if step < STEP or chosen is None:
            return False
        block, caches = int(self.table()[chosen[1], 5]), self.caches()
        cache = caches[len(caches) // 2].view(torch.int16)
        cell = cache[block, 7] if cache.dim() == 3 else cache[block, 3, 7, cache.shape[3] // 2 :]
        cell[9] ^= 1 << 6
        self.touched = chosen[0]
        return True

    def swap(self, output: Any, step: int) -> bool:
        chosen = self.row(output)
        if step < STEP or chosen is None:
            return False
        line, (first, second) = self.table()[chosen[1]], self.swapped
        line[[first, second]] = line[[second, first]]
        self.touched = chosen[0]
        return True

    def shift(self, output: Any, step: int) -> bool:
        if step < STEP:
            return False
        owner, name = (
            (self.runner.input_batch.block_table, "compute_slot_mapping")
            if self.is_v1
            else (self.runner.block_tables, "compute_slot_mappings")
        )
        right = getattr(owner, name)

        def shifted(*args: Any, **kwargs: Any) -> Any:
            delattr(owner, name)
            slots = right(*args, **kwargs)
            own = owner[0].slot_mapping.gpu if self.is_v1 else slots
            own[own >= 0] += 1
            return slots

        setattr(owner, name, shifted)
        return True

    def hand_out(self, output: Any, step: int) -> bool:
        chosen = self.row(output)
        new = [
            data
            for data in output.scheduled_new_reqs
            if data.num_computed_tokens < self.size * (len(data.block_ids[self.group]) - 1)
        ]
        if chosen is None or not new:
            return False
        data = new[0]
        data.block_ids[self.group][data.num_computed_tokens // self.size] = int(self.table()[chosen[1], 4])
        self.touched = chosen[0]
        return True

    def copy_left_out(self, output: Any, step: int) -> bool:
        chosen, target = self.row(output), self.new_block(output)
        if step < STEP or chosen is None or target is None:
            return False
        right = self.module.copy_kv_cache_blocks_inplace

        def left_out(*args: Any) -> None:
            self.module.copy_kv_cache_blocks_inplace = right  # type: ignore[attr-defined]

        self.module.copy_kv_cache_blocks_inplace = left_out  # type: ignore[attr-defined]
        self.touched, block = target
        output.kv_cache_block_copies = [(int(self.table()[chosen[1], 3]), block)]
        return True

    def not_zeroed(self, output: Any, step: int) -> bool:
        target = self.new_block(output)
        if step < STEP or target is None:
            return False
        self.touched, block = target
        for cache in self.caches():
            cache[block] = 1
        self.runner.kv_block_zeroer = SimpleNamespace(zero_block_ids=lambda blocks: None)
        self.runner._zero_block_ids = lambda blocks: None
        output.new_block_ids_to_zero = [block]
        return True

    def load(self, goes_wrong: bool) -> dict[str, Any]:
        """A prefix that was written here comes back through a connector; into its own blocks, or into others."""
        own, jobs = self.runner.kv_connector, []

        def pre_forward(scheduler_output: Any) -> None:
            for blocks, kept in jobs:
                for cache, data in zip(self.caches(), kept, strict=True):
                    cache[blocks] = data
            jobs.clear()

        methods = {name: getattr(own, name) for name in ("post_forward", "no_forward", "set_disabled")}
        self.runner.kv_connector = SimpleNamespace(kv_connector=Restored(), pre_forward=pre_forward, **methods)
        try:
            with self.bench.watched(mode="log", content="full") as handle:
                return self._loaded(handle, jobs, goes_wrong)
        finally:
            self.runner.kv_connector = own

    def _loaded(self, handle: Any, jobs: list[Any], goes_wrong: bool) -> dict[str, Any]:
        prompt, state = make_prompts(1, seed=9)[0], []
        self.bench.run([prompt], tokens=8)
        inner = self.runner.add_requests

        def add_requests(output: Any) -> Any:
            for data in output.scheduled_new_reqs:
                blocks = list(data.block_ids[self.group])[: data.num_computed_tokens // self.size]
                if blocks and not state:
                    state.append(len(blocks))
                    kept = [cache[blocks].clone() for cache in self.caches()]
                    for cache in self.caches():
                        cache[blocks] = 0
                    handle.canary.memory.forget()
                    jobs.append((self.unused(len(blocks)) if goes_wrong else blocks, kept))
            return inner(output)

        self.runner.add_requests = add_requests
        try:
            self.bench.generate([prompt], tokens=4)
        finally:
            self.runner.add_requests = inner
        report = handle.report()
        codes = [(entry["code"], entry["reader"], entry["page"], entry["action"]) for entry in report["findings"][:3]]
        return {"blocks": state, "found": codes, "unchecked": report["unchecked"], "checked": report["loads_checked"]}
