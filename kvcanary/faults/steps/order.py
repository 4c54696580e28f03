"""Work that does not wait for what it needs: copies, zeroings, staging buffers, and steps built on unknown tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.async_work import Work, unordered
from kvcanary.faults.helpers.harmless import lengthen_plans
from kvcanary.faults.helpers.reach import (
    Place,
    another_token,
    any_reader,
    redirect_row,
    strike_forward,
    strike_row,
    submit_prompt,
    write_other,
    written_of,
)
from kvcanary.faults.helpers.recycling import never_granted
from kvcanary.faults.steps.draft import CHUNK
from kvcanary.faults.strike import need
from kvcanary.faults.target import Call, Target

STAGING = "pinned staging buffer"
HOST_BLOCK = "host block 7"


def _feed(target: Target, change: Callable[[Call, list[int]], Sequence[int]]) -> None:
    """The tokens that the next forward takes for the newest ones are others; `change` gives the entries that it hit."""

    def fed(call: Call) -> Place | None:
        width = len(call.write.tokens) // len(call.read.requests)
        tokens = call.write.tokens.clone()
        roots = list(range(0, len(tokens), width))
        kept, call.write = call.write, replace(call.write, tokens=tokens)
        hit = change(call, roots)
        if not hit:
            call.write = kept
            return None
        writer = call.read.requests[hit[0] // width] if len(hit) == 1 else None
        return {"writer": writer, "slot": frozenset(call.write.slots[list(hit)].tolist())}

    strike_forward(target, fed)


def _take_the_rows_of_before(target: Target) -> None:
    """Accepted tokens are read after the rows were put into another order."""

    def exchange(call: Call, roots: list[int]) -> Sequence[int]:
        tokens = call.write.tokens
        first = next((root for root in roots[1:] if int(tokens[root]) != int(tokens[0])), None)
        if first is not None:
            tokens[0], tokens[first] = tokens[first].clone(), tokens[0].clone()
        return () if first is None else (0, first)

    _feed(target, exchange)


def _build_on_the_step_before(target: Target) -> None:
    """A step is scheduled before the tokens of the last one are known, and takes those that it knows."""

    def stale(call: Call, roots: list[int]) -> Sequence[int]:
        root = target.rng.choice(roots)
        known = target.canary.session.ledger.request(call.read.requests[roots.index(root)]).tokens
        token = known[max(0, len(known) - 2)]
        if token == int(call.write.tokens[root]):
            return ()
        call.write.tokens[root] = token
        return (root,)

    _feed(target, stale)


def _feed_a_chunk_what_was_sampled(target: Target) -> None:
    """A chunk that is not the last one puts its sampled token where the next one finds its first."""
    request_id = submit_prompt(target, 3 * CHUNK)

    def sampled(call: Call, number: int) -> Place | None:
        if not int(call.read.prefix_lens[number]):
            return None
        entry = written_of(call, number).start
        write_other(call, entry, tokens=another_token(target, call, entry))
        return {"writer": request_id, "slot": int(call.write.slots[entry])}

    strike_row(target, request_id, sampled, kind="prefill")


def _walk_the_table_with_old_rows(target: Target) -> None:
    """The rows of this step's table are taken in last step's order."""

    def walk(call: Call) -> Place | None:
        lens = call.read.prefix_lens.tolist()
        shorter, longer = sorted(range(2), key=lambda number: lens[number])
        return redirect_row(call, shorter, longer)

    strike_forward(target, walk, requests=2)


def _read_a_later_step(target: Target) -> None:
    """A record of a step that has not come yet: its forward ran beside the one that reads."""
    reader = any_reader(target)
    need(reader.committed_len > target.setup.most_accepted)
    position = target.rng.randrange(reader.committed_len - target.setup.most_accepted)
    slot = int(reader.slots[position])
    _write_later(target, slot)
    target.record(pool="target", position=position, slot=slot)


def _write_later_where_nobody_reads(target: Target) -> None:
    """The same in a page that nobody has had: nothing is due."""
    page = never_granted(target)
    _write_later(target, page * target.setup.page_size)
    target.record(code="")


def _write_later(target: Target, slot: int) -> None:
    """The record of this slot says that a later step has written it."""
    import numpy as np

    canary = target.canary
    state, record_store = canary.session.state.by_name["target"], canary.session.checks.record_store
    record = record_store.table[[state.base + slot]]
    record[0, 3] += LATER_STEPS  # which no run reaches
    record[0, 7] = state.seal_term
    record_store.write(np.array([state.base + slot]), record)


LATER_STEPS = 500
FAULTS = (
    Fault(
        name="order.copy_beside_the_forward",
        bugs=(
            "vllm-project/vllm#45704",
            "vllm-project/vllm#46278",
            "vllm-project/vllm#31210",
            "vllm-project/vllm#31341",
            "LMCache/LMCache#4870",
        ),
        story="A copy to the host began when the host knew that the tokens were final, which is before the device had "
        "written them. The same hazard was fixed in one connector and came back in the next.",
        expected="O1",
        **unordered(Work("forward", "main", True), Work("copy to the host", "copies")),
    ),
    Fault(
        name="order.sent_beside_the_forward",
        bugs=("sgl-project/sglang#33970", "sgl-project/sglang#31368"),
        story="The event of a prefill was recorded, and only one of the transports waited for it: all chunks but the "
        "last could leave half written. The damage began exactly at a chunk's edge.",
        expected="O1",
        **unordered(Work("forward", "main", True), Work("send", "network"), others=("copies",)),
    ),
    Fault(
        name="order.zeroed_after_the_load",
        bugs=("vllm-project/vllm#48481",),
        story="Zeroing of new blocks and the remote load into the same blocks ran on two streams, in any order.",
        expected="O1",
        **unordered(Work("load", "network", True), Work("zero", "main", True)),
    ),
    Fault(
        name="order.layer_not_waited_for",
        bugs=("sgl-project/sglang#22811",),
        story="Layers came back from the host one after another. K and V waited for theirs, the index buffer did not: "
        "a few answers in ten thousand were garbage.",
        expected="O1",
        **unordered(Work("load of a layer", "copies", True), Work("attention", "main")),
    ),
    Fault(
        name="order.host_block_filled_twice",
        bugs=("NVIDIA/TensorRT-LLM#9056", "NVIDIA/TensorRT-LLM#8813", "NVIDIA/TensorRT-LLM#8274"),
        story="Two blocks were offloaded to one block of the host in one step, since events were kept by logical id "
        "and not by memory. The first fix changed the symptom and did not end it.",
        expected="O1",
        **unordered(Work("offload", "copies 1", True), Work("offload", "copies 2", True), HOST_BLOCK),
    ),
    Fault(
        name="order.input_copied_too_early",
        bugs=("ikawrakow/ik_llama.cpp#2083",),
        story="A wait between two backends was left out, so that rows were computed from what the input buffer had "
        "held before. Long contexts became salad; replaying a bad session was clean.",
        expected="O1",
        **unordered(Work("staging kernel", "main", True), Work("copy", "host thread"), STAGING),
    ),
    Fault(
        name="order.staging_buffer_reused",
        bugs=(
            "sgl-project/mini-sglang#103",
            "NVIDIA/TensorRT-LLM#15546",
            "NVIDIA/TensorRT-LLM#15349",
            "NVIDIA/Megatron-LM#5715",
        ),
        story="Two asynchronous copies went through one pinned buffer: the second filled it before the first had run. "
        "Four code bases had it in one year, and found it in four ways.",
        expected="O1",
        **unordered(Work("copy to the device", "copies"), Work("fill", "host", True), STAGING),
    ),
    Fault(
        name="order.rows_of_before",
        bugs=("vllm-project/vllm#45100", "vllm-project/vllm#53919", "sgl-project/sglang#35748"),
        story="What a step had accepted was read by row after the rows had been put into another order, or seeded on "
        "another stream: a request went on from its neighbour's token.",
        expected="W6",
        applies_to="two requests and more",
        applies=lambda setup: setup.batch > 1,
        strike=_take_the_rows_of_before,
        quiet=lengthen_plans,
    ),
    Fault(
        name="order.table_of_another_step",
        bugs=("wtdcode/vllm-backport#63",),
        story="A late rank went through this step's table with last step's row order, and used blocks of other "
        "requests: one answer in five looped on one token.",
        expected="R8",
        applies_to="two requests of different prompts",
        applies=lambda setup: setup.batch > 1 and not setup.shared,
        strike=_walk_the_table_with_old_rows,
        cause="identity",
        quiet=lengthen_plans,
    ),
    Fault(
        name="order.unresolved_step",
        bugs=("vllm-project/vllm#52071",),
        story="A field that keeps two decodes of one request apart was read by one scheduler and set only by the "
        "other: a step was built before the tokens of the last were known.",
        expected="W6",
        strike=_build_on_the_step_before,
        quiet=lengthen_plans,
    ),
    Fault(
        name="order.sampled_into_the_prompt",
        bugs=("sgl-project/mini-sglang@ef4367f",),
        story="A chunk that was not the last one wrote the token that it had sampled to the place of the next prompt "
        "token, where the next chunk, which overlapped with it, took it for its input.",
        expected="W6",
        applies_to="prompts in chunks",
        needs={"chunk": CHUNK},
        applies=lambda setup: setup.pages is None,
        strike=_feed_a_chunk_what_was_sampled,
        quiet=partial(lengthen_plans, kind="prefill", prompt=3 * CHUNK),
    ),
    Fault(
        name="order.later_step",
        story="A forward reads an entry that a later step has written: two steps ran at the same time.",
        expected="R11",
        strike=_read_a_later_step,
        quiet=_write_later_where_nobody_reads,
    ),
)
