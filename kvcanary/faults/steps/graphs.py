"""Padding that counts as live, and buffers that a captured program still reads where they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers import replays
from kvcanary.faults.helpers.harmless import PADDING, lengthen_plans, noise_in_a_free_page
from kvcanary.faults.helpers.reach import (
    SPREAD_BITS,
    Place,
    any_entry,
    any_layer,
    change,
    read_other,
    redirect,
    strike_forward,
    written_of,
)
from kvcanary.faults.strike import UNDECLARED
from kvcanary.faults.target import Call, Target

if TYPE_CHECKING:
    from kvcanary.captured.buffers import StaticBuffers


def _pad_with_minus_one(target: Target) -> None:
    """The mark of padding stands for a slot, and nobody guards the write."""

    def pad(call: Call) -> Place:
        redirect(call, target.rng.randrange(len(call.write.slots)), PADDING)
        return {"slot": PADDING}

    strike_forward(target, pad)


def _pad_with_a_live_slot(target: Target) -> None:
    """A row of padding writes where a request that is not in the batch has its entries."""
    size, owner_of = target.setup.page_size, target.canary.session.ledger.owner_of

    def pad(call: Call) -> Place | None:
        slots = call.write.slots[written_of(call, 1)].tolist()
        live = [slot for slot in slots if owner_of(slot // size) == call.read.requests[1]]
        if not live:
            return None
        redirect(call, target.rng.randrange(written_of(call, 0).stop), live[-1])
        return {"slot": live[-1]}

    strike_forward(target, pad, requests=2)


def _keep_old_positions(target: Target) -> None:
    """A replay finds the positions of the one before in its buffer."""

    def keep(call: Call, before: Call) -> Place | None:
        positions = before.write.positions.clone()
        if bool((positions == call.write.positions).any()):
            return None
        call.write = replace(call.write, positions=positions)
        return {"slot": frozenset(call.write.slots.tolist())}

    _replay_with_the_one_before(target, keep)


def _replay_with_the_one_before(target: Target, change: Callable[[Call, Call], Place | None]) -> None:
    """Change a forward by what the one before it had, of the same requests."""
    kept: list[Call] = []

    def replayed(call: Call) -> Place | None:
        before = kept.pop() if kept else None
        kept.append(Call(call.kind, call.index, call.pool, call.read, call.write))
        if before is None or before.read.requests != call.read.requests:
            return None
        return change(call, before)

    strike_forward(target, replayed)


def _query_by_another_stride(target: Target) -> None:
    """Offsets of the requests are multiples of another number than the runner lays out."""

    def stride(call: Call) -> Place:
        indptr = call.read.indptr.clone()
        indptr[1:-1] -= 1
        call.read = replace(call.read, indptr=indptr)
        return {}

    strike_forward(target, stride, requests=2)


def _read_a_rebound_buffer(target: Target) -> None:
    """The index array was made anew, and the captured program reads the old one where it was."""

    def rebind(call: Call, before: Call) -> Place | None:
        stale = before.read.indices[: len(call.read.indices)]
        if bool((call.read.indices[: len(stale)] == stale).all()):
            return None
        read_other(call, slice(len(stale)), stale)
        return {}

    _replay_with_the_one_before(target, rebind)


def _make_buffers_anew(target: Target) -> None:
    """Arrays of a forward lie elsewhere than before, with the same numbers in them: nothing is due."""

    def anew(call: Call) -> Place:
        call.read = replace(call.read, indices=call.read.indices.clone(), indptr=call.read.indptr.clone())
        call.write = replace(call.write, slots=call.write.slots.clone(), positions=call.write.positions.clone())
        return {"code": ""}

    strike_forward(target, anew)


def _share_a_graph_pool(target: Target) -> None:
    """A second program was captured in the memory of the first, and its scratch lies over what that one keeps."""
    entry = any_entry(target)
    layer = any_layer(target, entry.pool)
    change(entry.pool, layer, entry.slot, lambda words: words ^ target.rng.randrange(1, 1 << SPREAD_BITS))
    target.record(UNDECLARED, **entry.place, layer=layer)


def _pad_a_replay(target: Target, slots: range, code: str | None = None) -> None:
    """An entry of padding in a captured batch is to be written at one of these slots."""
    slot = target.rng.choice(slots)

    def pad(buffers: StaticBuffers) -> None:
        buffers.slots[-1] = slot
        target.record(code=code, pool=replays.NAME, slot=slot)

    replays.replay(target, pad)


FAULTS = (
    Fault(
        name="graphs.padding_of_a_replay",
        bugs=("NVIDIA/TensorRT-LLM#13278",),
        story="A captured batch is padded, and what pads it named slots that a request still had: every replay of a "
        "smaller batch wrote there.",
        expected="W9",
        applies_to="any engine: the pool and the captured forward are the fault's own",
        strike=partial(_pad_a_replay, slots=range(replays.FIRST, replays.FIRST + replays.PROMPT_LEN)),
        quiet=partial(_pad_a_replay, slots=range(replays.PAGE_SIZE), code=""),
    ),
    Fault(
        name="graphs.padding_is_minus_one",
        bugs=("vllm-project/vllm#43810", "vllm-project/vllm#43869"),
        story="Rows of padding carried slot -1 into a write by index, where it means the last slot of the last block: "
        "a real entry was overwritten by every replay of a batch that did not fill its graph.",
        expected="W1",
        strike=_pad_with_minus_one,
        quiet=lengthen_plans,
    ),
    Fault(
        name="graphs.padding_on_a_live_slot",
        bugs=(
            "NVIDIA/TensorRT-LLM#13278",
            "vllm-project/vllm#13922",
            "vllm-project/vllm#13418",
        ),
        story="Padding took slots that live requests outside the batch still had, from a stale tail of indices or "
        "since the count of writes was that of the padded tensor.",
        expected="W2",
        also=("W4",),
        applies_to="two requests and more",
        applies=lambda setup: setup.batch > 1,
        strike=_pad_with_a_live_slot,
        cause="addressing",
        quiet=lengthen_plans,
    ),
    Fault(
        name="graphs.positions_of_before",
        bugs=(
            "sgl-project/sglang#10892",
            "sgl-project/sglang#9687",
            "sgl-project/sglang#6309",
            "sgl-project/sglang#8296",
            "sgl-project/sglang#8336",
            "sgl-project/sglang#9888",
        ),
        story="Where a batch was smaller than its graph, rows kept the positions of an earlier replay and were used as "
        "indices. One line closed four reports that had been open for months; a fix before it had only hidden them.",
        expected="W5",
        strike=_keep_old_positions,
        cause="lengths",  # struck where nothing is replayed
        quiet=_make_buffers_anew,
    ),
    Fault(
        name="graphs.wrong_stride",
        bugs=("sgl-project/sglang#27545",),
        story="Offsets of the queries went up by the number of steps plus one, and the runner laid out as many rows as "
        "the tree has nodes: equal with topk 1 alone, NaN in replays of larger batches else.",
        expected="W5",
        also=("R10",),
        applies_to="drafting for two requests and more",
        applies=lambda setup: setup.drafts and setup.batch > 1,
        strike=_query_by_another_stride,
        cause="draft",
        quiet=lengthen_plans,
    ),
    Fault(
        name="graphs.rebound_buffer",
        bugs=("sgl-project/sglang#27664",),
        story="Metadata was made anew for each replay, and the captured kernels went on reading the old addresses. "
        "Greedy output changed from run to run.",
        expected="R4",
        strike=_read_a_rebound_buffer,
        quiet=_make_buffers_anew,
        cause="addressing",
    ),
    Fault(
        name="graphs.shared_scratch",
        bugs=("sgl-project/sglang#22930",),
        story="Target and draft were captured in one memory pool, and the draft's capture took addresses that the "
        "target's captured tensors still need.",
        expected="R9",
        strike=_share_a_graph_pool,
        quiet=noise_in_a_free_page,
        cause="bits",
    ),
)
