"""Faults in the states of a running vLLM with runner V1, one at a time.

Each harm is called before every step until it says that it has struck; some wait for what the step itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, cycle
from typing import Any

from kvcanary.adapters.vllm.states import is_state
from kvcanary_tools.bench.vllm.cpu import CpuBench, free_for_a_step

HARMS = (
    "bit",  # of a state at rest
    "window_shifted",  # by one token
    "block_zeroed",  # as for attention, while it is a state
    "exchanged",  # two requests go on from each other's states
    "taken_by_two",  # one goes on from the other's
    "copy_left_out",  # where a row goes on in its next block
    "copy_of_one_less",  # part of a layer
    "copied_from_elsewhere",
    "hit_of_another_prefix",
    "full_block_goes_on",  # in place: who hits it later gets one that has absorbed too much
)
#: Of a server that drafts.
DRAFT_HARMS = (
    "drafted_bit",  # of the state behind the last token that was accepted
    "drafts_exchanged",  # two requests go on from each other's states
    "one_accepted_less",  # a row goes on from the state before its last token
    "rejected_draft",  # or from the one behind a draft that was rejected
    "no_drafts_no_column",  # a step without drafts goes on from the first column (vllm#39273)
)
#: Of one that has no prefix cache, and of one that has one.
OWN_DRAFT_HARMS = *DRAFT_HARMS, "freed_too_early"  # while its request runs
CACHED_DRAFT_HARMS = (
    *DRAFT_HARMS,
    "next_column_not_copied",  # where a row goes on in its next block
    "full_block_not_copied",  # where drafts that were accepted fill a block
)
FIRST_STEP = 12


class Harms:
    """Of a server without drafts.

    states: of the group that is struck, by layer;  touched, block: whose state was struck, and where it lies
    """

    def __init__(self, bench: CpuBench) -> None:
        from vllm.v1.worker import mamba_utils

        self.bench, self.runner, self.copying = bench, bench.runner, mamba_utils
        groups = self.runner.kv_cache_config.kv_cache_groups
        self.group = next(n for n, own in enumerate(groups) if is_state(own.kv_cache_spec))
        self.size = groups[self.group].kv_cache_spec.block_size
        context = self.runner.compilation_config.static_forward_context
        self.states = [context[name].kv_cache for name in groups[self.group].layer_names]
        self.touched: str | None = None
        self.block: int | None = None
        self._hits: dict[int, int] = {}

    def repair(self) -> None:
        """Undo what was done to vLLM itself."""

    # where things are

    @property
    def table(self) -> Any:
        return self.runner.input_batch.block_table[self.group].block_table.np

    def rows(self, output: Any, count: int, at_end: bool = False) -> list[tuple[str, int, int]]:
        """So many requests of this step that decode and stay in their block, or leave it: name, row and column."""
        cached, numbers, chosen = output.scheduled_cached_reqs, self.runner.input_batch.req_id_to_index, []
        for name, length in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            is_there = output.num_scheduled_tokens[name] == 1 and length > self.size and name in numbers
            if is_there and (length % self.size == 0) == at_end:
                chosen.append((name, numbers[name], (length - 1) // self.size))
        return chosen[:count] if len(chosen) >= count else []

    def _strike(self, name: str, block: int) -> bool:
        self.touched, self.block = name, int(block)
        return True

    # harms

    def bit(self, output: Any, step: int) -> bool:
        import torch

        for name, row, column in self.rows(output, 1) if step >= FIRST_STEP else ():
            block = self.table[row, column]
            self.states[-1][1][block].view(torch.int16).view(-1)[77] ^= 1 << 6
            return self._strike(name, block)
        return False

    def window_shifted(self, output: Any, step: int) -> bool:
        for name, row, column in self.rows(output, 1) if step >= FIRST_STEP else ():
            block = self.table[row, column]
            window = self.states[0][0][block]
            window.copy_(window.roll(1, 0))
            return self._strike(name, block)
        return False

    def block_zeroed(self, output: Any, step: int) -> bool:
        for name, row, column in self.rows(output, 1) if step >= FIRST_STEP else ():
            block = self.table[row, column]
            for layer in self.states:
                for part in layer:
                    part[block] = 0
            return self._strike(name, block)
        return False

    def exchanged(self, output: Any, step: int) -> bool:
        return self._mixed(output, step, both=True)

    def taken_by_two(self, output: Any, step: int) -> bool:
        return self._mixed(output, step, both=False)

    def _mixed(self, output: Any, step: int, both: bool) -> bool:
        chosen = self.rows(output, 2) if step >= FIRST_STEP else []
        if not chosen:
            return False
        (name, row, column), (_, other, its) = chosen
        own, block = self.table[row, column], self.table[other, its]
        self.table[row, column] = block
        if both:
            self.table[other, its] = own
        return self._strike(name, block)

    def copy_left_out(self, output: Any, step: int) -> bool:
        def copy(_: Callable[[Any], None], buffers: Any) -> None:
            """None of this step."""

        return self._at_copy(output, copy)

    def copy_of_one_less(self, output: Any, step: int) -> bool:
        def copy(right: Callable[[Any], None], buffers: Any) -> None:
            buffers.offset -= 1
            right(buffers)

        return self._at_copy(output, copy)

    def copied_from_elsewhere(self, output: Any, step: int) -> bool:
        tensor = self.states[0][0]
        stride, first = tensor.stride(0) * tensor.element_size(), tensor.data_ptr()

        def copy(right: Callable[[Any], None], buffers: Any) -> None:
            sources = buffers.src_ptrs.np[: buffers.offset]
            is_low = int(sources.min()) < first + 3 * stride
            sources[:] = sources.astype("int64") + (stride if is_low else -stride)
            right(buffers)

        return self._at_copy(output, copy)

    def _at_copy(self, output: Any, copy: Callable[[Callable[[Any], None], Any], None]) -> bool:
        """Do this in the place of the copy of states that this step makes."""
        chosen = self.rows(output, 1, at_end=True)
        if not chosen:
            return False
        right = self.copying.do_mamba_copy_block

        def once(buffers: Any) -> None:
            self.copying.do_mamba_copy_block = right
            copy(right, buffers)

        self.copying.do_mamba_copy_block = once
        return self._strike(chosen[0][0], 0)

    def hit_of_another_prefix(self, output: Any, step: int) -> bool:
        """The cache gives the state behind as many tokens, but of others."""
        pool = self.bench.scheduler.kv_cache_manager.block_pool
        for data in output.scheduled_new_reqs:
            column = data.num_computed_tokens // self.size - 1
            if column < 0:
                continue
            own = data.block_ids[self.group][column]
            before = self._hits.get(column)
            if before not in (None, own) and pool.blocks[before].block_hash is not None:
                data.block_ids[self.group][column] = before
                return self._strike(data.req_id, before)
            self._hits[column] = own
        return False

    def full_block_goes_on(self, output: Any, step: int) -> bool:
        chosen = self.rows(output, 1, at_end=True)
        if not chosen:
            return False
        name, row, column = chosen[0]
        block = self.runner.requests[name].block_ids[self.group][column]

        def copy(right: Callable[[Any], None], buffers: Any) -> None:
            right(buffers)
            self.runner.input_batch.block_table[self.group].block_table.gpu[row, column + 1] = block

        return self._at_copy(output, copy) and self._strike(name, block)


class DraftHarms(Harms):
    """Of a server that drafts: behind each token of a row lies a state in a column of its own."""

    _drafted: Mapping[str, int] = {}  # of the step before, by request
    _proposes: Callable[..., Any] | None = None

    def __init__(self, bench: CpuBench) -> None:
        super().__init__(bench)
        self._right: list[tuple[Any, str, Any]] = []  # what is left out

    def state_of(self, name: str, row: int, accepted: int) -> int:
        """The block behind so many accepted tokens."""
        return int(self.table[row, self.column_of(name) + accepted - 1])

    def column_of(self, name: str) -> int:
        """In which the last forward of a request went on."""
        is_aligned = self.runner.cache_config.mamba_cache_mode == "align"
        return int(self.runner.mamba_state_idx[name]) if is_aligned else 0

    def accepted(self, output: Any, least: int = 2) -> list[tuple[str, int, int]]:
        """Requests of which the step before accepted so many tokens, of which all but one are drafts: name, row, how
        many.
        """
        cached, numbers = output.scheduled_cached_reqs, self.runner.input_batch.req_id_to_index
        if output.finished_req_ids or output.scheduled_new_reqs or output.preempted_req_ids:
            return []  # rows are about to be numbered anew
        held = self.runner.input_batch.num_accepted_tokens_cpu
        known = [(name, numbers[name]) for name in cached.req_ids if name in numbers]
        return [(name, row, int(held[row])) for name, row in known if held[row] >= least]

    def drafted_bit(self, output: Any, step: int) -> bool:
        import torch

        for name, row, accepted in self.accepted(output) if step >= FIRST_STEP else ():
            block = self.state_of(name, row, accepted)
            self.states[-1][1][block].view(torch.int16).view(-1)[77] ^= 1 << 6
            return self._strike(name, block)
        return False

    def drafts_exchanged(self, output: Any, step: int) -> bool:
        before = self._drafted_before(output)
        known = self.accepted(output, least=1) if step >= FIRST_STEP else []
        for (name, row, accepted), (also, other, its) in combinations(known, 2):
            both = max(accepted, its)  # in columns which the other has left, and not both behind the first token
            are_there = both <= 1 + min(before.get(name, 0), before.get(also, 0))
            if both > 1 and are_there and self.column_of(name) == self.column_of(also):
                self.table[[row, other]] = self.table[[other, row]]
                return self._strike(name, self.state_of(name, row, accepted))
        return False

    def _drafted_before(self, output: Any) -> Mapping[str, int]:
        """How many drafts each request had in the step before; to be called in every step."""
        before, self._drafted = self._drafted, {n: len(own) for n, own in output.scheduled_spec_decode_tokens.items()}
        return before

    def one_accepted_less(self, output: Any, step: int) -> bool:
        for name, row, accepted in self.accepted(output) if step >= FIRST_STEP else ():
            self.runner.input_batch.num_accepted_tokens_cpu[row] -= 1
            return self._strike(name, self.state_of(name, row, accepted - 1))
        return False

    def rejected_draft(self, output: Any, step: int) -> bool:
        before = self._drafted_before(output)
        for name, row, accepted in self.accepted(output, least=1) if step >= FIRST_STEP else ():
            if accepted <= before.get(name, 0) and name in self._drafted:
                self.runner.input_batch.num_accepted_tokens_cpu[row] += 1
                return self._strike(name, self.state_of(name, row, accepted + 1))
        return False

    def no_drafts_no_column(self, output: Any, step: int) -> bool:
        """As releases before 0.32 did: rows are those of drafts where the step has some, and only there."""
        if self._proposes is None:
            self.propose_every_second_time()
        chosen = [] if output.scheduled_spec_decode_tokens or step < FIRST_STEP else self.accepted(output)
        if not chosen:
            return False
        self.runner.drafter.propose = self._proposes
        for groups in self.runner.attn_groups:
            for group in groups:
                self._without_drafts(group.get_metadata_builder(0))
        name, row, _ = chosen[0]
        return self._strike(name, self.state_of(name, row, 1))

    def propose_every_second_time(self) -> None:
        """As where nothing matches what was generated: the steps between have no drafts."""
        propose, turns = self.runner.drafter.propose, cycle((True, False))
        self._proposes = propose

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            drafts = propose(*args, **kwargs)
            return drafts if next(turns) else [[] for _ in drafts]

        self.runner.drafter.propose = sometimes

    def _without_drafts(self, builder: Any) -> None:
        """Its next metadata are not told of any."""
        build = builder.build

        def once(*args: Any, **kwargs: Any) -> Any:
            builder.build = build
            return build(*args, **{name: own for name, own in kwargs.items() if not name.startswith("num_")})

        builder.build = once

    def freed_too_early(self, output: Any, step: int) -> bool:
        """The pool takes the block back which a row goes on from."""
        scheduler = self.bench.scheduler
        for name, row, accepted in self.accepted(output, least=1) if step >= FIRST_STEP else ():
            block = self.state_of(name, row, accepted)
            free_for_a_step(scheduler, scheduler.kv_cache_manager.block_pool.blocks[block])
            return self._strike(name, block)
        return False

    def next_column_not_copied(self, output: Any, step: int) -> bool:
        """What its last column holds is not taken along into the one where a row goes on."""
        cached = output.scheduled_cached_reqs
        for name, row, accepted in self.accepted(output, least=1) if step >= FIRST_STEP else ():
            length = cached.num_computed_tokens[cached.req_ids.index(name)] + output.num_scheduled_tokens[name]
            if (length - 1) // self.size != self.column_of(name):
                self._leave_out("do_mamba_copy_block", "run_fused_precopy")
                return self._strike(name, self.state_of(name, row, accepted))
        return False

    def full_block_not_copied(self, output: Any, step: int) -> bool:
        """Nor what lies behind the last token of a block that is full, into that block."""
        cached = output.scheduled_cached_reqs
        for name, row, _ in self.accepted(output, least=1) if step >= FIRST_STEP else ():
            length = cached.num_computed_tokens[cached.req_ids.index(name)]
            if length // self.size < (length + output.num_scheduled_tokens[name] - 1) // self.size:
                self._leave_out("postprocess_mamba_align_gpu")
                return self._strike(name, self.table[row, length // self.size])
        return False

    def _leave_out(self, *names: str) -> None:
        """From now on these do nothing."""
        for name in names:
            owner = self.copying if hasattr(self.copying, name) else self.copying.MambaSpecDecodeGPUContext
            if hasattr(owner, name):
                self._right.append((owner, name, getattr(owner, name)))
                setattr(owner, name, lambda *args, **kwargs: None)

    def repair(self) -> None:
        while self._right:
            setattr(*self._right.pop())
