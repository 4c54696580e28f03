"""Indices in range that point at the wrong slot: exchanged, transposed, of another unit, of another request."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.harmless import come_and_go, edit_behind_the_end, lengthen_plans, noise_in_a_free_page
from kvcanary.faults.helpers.reach import (
    Place,
    any_entry,
    any_layer,
    entry_at,
    is_private,
    overwrite,
    row_start,
    strike_forward,
    strike_row,
    submit_prompt,
    words_of,
    write_other,
    written_of,
)
from kvcanary.faults.steps.draft import CHUNK, has_deep_branches, read_other_parents
from kvcanary.faults.strike import UNDECLARED, NotNow, need
from kvcanary.faults.target import Call, Target

PAGES_BACK = 3  # by which a compressed position lags: an image stands for many


def _exchange_pages(target: Target) -> None:
    """Two pages of a row are looked for in each other's place."""
    size = target.setup.page_size
    reader = next((reader for reader in target.running() if reader.committed_len >= 2 * size), None)
    if reader is None:
        raise NotNow
    first, second = sorted(target.rng.sample(range(reader.committed_len // size), 2))
    here, there = (slice(page * size, (page + 1) * size) for page in (first, second))
    reader.slots[here], reader.slots[there] = reader.slots[there].clone(), reader.slots[here].clone()
    is_own = is_private(target, reader.pages[second])
    target.record(
        writer=reader.request_id if is_own else None,  # another request may have written what is shared
        reader=reader.request_id,
        position=first * size,
        slot=int(reader.slots[first * size]),
    )


def _read_the_next_branch(target: Target) -> None:
    """Survivors take their parent from the column beside theirs, as by a slot matrix that was transposed."""
    read_other_parents(target, lambda column, num_columns: (column + 1) % num_columns)


def _permute_a_page(target: Target) -> None:
    """The rows of one page go round by one in one layer: the sum of the page stays what it was."""
    entry = any_entry(target)
    size, layer = entry.pool.page_size, any_layer(target, entry.pool)
    start = entry.position // size * size
    entries = [entry_at(entry.pool, entry.reader, start + offset) for offset in range(size)]
    need(start + size <= entry.reader.committed_len)
    rows = [words_of(entry.pool, layer, one.slot) for one in entries]
    for one, words in zip(entries, rows[1:] + rows[:1], strict=True):
        overwrite(entry.pool, layer, one.slot, words)
    moved = [one for one, old, new in zip(entries, rows, rows[1:] + rows[:1], strict=True) if bool((old != new).any())]
    need(moved)
    target.record(UNDECLARED, **moved[0].place, layer=layer)


def _write_to_the_next_slots(target: Target) -> None:
    """A window is written at its first slot plus i, where the row goes on in another page."""
    running, size = target.running(), target.setup.page_size
    private = {page: reader.request_id for reader in running for page in reader.pages}
    num_nodes = target.setup.most_accepted

    def contiguous(call: Call) -> bool:
        if call.pool != "target":
            return False
        slots, struck = call.write.slots.clone(), False
        for number, request_id in enumerate(call.read.requests):
            own = written_of(call, number)
            first = int(slots[own.start])
            for i in range(1, own.stop - own.start):
                page = (first + i) // size
                if private.get(page, request_id) != request_id and not struck:
                    struck = True
                    slots[own.start + i] = first + i
                    target.record(request_id, pool="target", slot=first + i)
        call.write = replace(call.write, slots=slots)
        return struck

    for reader in running:
        ends = [int(reader.slots[reader.committed_len + i]) for i in range(num_nodes)]
        if any(private.get((ends[0] + i) // size, reader.request_id) != reader.request_id for i in range(num_nodes)):
            target.before("verify", contiguous)
            return
    raise NotNow


def _write_at_a_lagging_position(target: Target) -> None:
    """Draft entries go to the slots of positions before theirs, which hold what is final."""
    back = PAGES_BACK * max(target.setup.page_size, target.setup.most_accepted)

    def lagging(call: Call) -> Place:
        lens = call.read.prefix_lens.tolist()
        first = min(range(len(lens)), key=lambda request: lens[request])
        slot = int(call.read.indices[row_start(call, first) + max(0, lens[first] - back)])
        write_other(call, first * call.read.rows_per_request, slots=slot)
        return {"writer": call.read.requests[first], "site": ("draft", call.index), "slot": slot}

    strike_forward(target, lagging, "draft", 0, "draft")


def _write_a_chunk_from_0(target: Target) -> None:
    """The second chunk of a prompt is written at its own offsets, over the first."""
    request_id = submit_prompt(target, 3 * CHUNK)

    def local(call: Call, number: int) -> Place | None:
        if not int(call.read.prefix_lens[number]):
            return None
        own, start = written_of(call, number), row_start(call, number)
        write_other(call, own, slots=call.read.indices[start : start + own.stop - own.start])
        return {"writer": request_id, "slot": int(call.write.slots[own.start])}

    strike_row(target, request_id, local, kind="prefill")


def _read_by_position_alone(target: Target) -> None:
    """Of two requests' entries of one position the map knows the last one's: a page of the other is read."""
    size, running = target.setup.page_size, list(target.running())
    need(len(running) >= 2)
    mine, theirs = target.rng.sample(running, 2)
    whole = min(mine.committed_len, theirs.committed_len) // size
    pages = [page for page in range(whole) if is_private(target, theirs.pages[page])]
    need(pages)
    page = target.rng.choice(pages)
    mine.slots[page * size : (page + 1) * size] = theirs.slots[page * size : (page + 1) * size]
    target.record(theirs.request_id, reader=mine.request_id, position=page * size, slot=int(theirs.slots[page * size]))


def _grant_the_null_page(target: Target) -> None:
    """A running request is given page 0, where padding writes."""
    need(target.running())
    target.record()
    target.canary.on_alloc(target.running()[0].request_id, [0])


FAULTS = (
    Fault(
        name="addressing.pages_exchanged",
        story="Two entries of a page table change places: every token is there, at another position.",
        expected="R4",
        applies_to="requests of two whole pages and more",
        applies=lambda setup: 2 * setup.page_size <= setup.prompt_len,
        strike=_exchange_pages,
        quiet=edit_behind_the_end,
    ),
    Fault(
        name="addressing.branch_slots_transposed",
        bugs=("sgl-project/sglang#7239",),
        story="The matrix of draft slots was built transposed for one backend, so that branches read each other's "
        "entries. It had been wrong since its first version, and came out when acceptance was compared across batch "
        "sizes.",
        expected="R5",
        applies_to="topk > 1, drafts of four steps and more",
        needs={"num_steps": 5, "topk": 4, "num_draft_tokens": None},
        applies=has_deep_branches,
        strike=_read_the_next_branch,
        cause="draft",
        quiet=partial(lengthen_plans, pool="draft", kind="draft"),
    ),
    Fault(
        name="addressing.page_permuted",
        bugs=("sgl-project/sglang#31218", "sgl-project/sglang#31215", "sgl-project/sglang#31060"),
        story="The move of accepted tokens addressed a page-major side buffer by token numbers: the bytes of a page "
        "were all there, in another order. No sum over a page can see it.",
        expected="R9",
        applies_to="page_size > 1",
        applies=lambda setup: setup.page_size > 1 and setup.prompt_len >= setup.page_size,
        strike=_permute_a_page,
        quiet=noise_in_a_free_page,
    ),
    Fault(
        name="addressing.slot_plus_one",
        bugs=("huggingface/text-generation-inference#2711",),
        story="Slots of drafted tokens were taken to follow each other: slot + 1, slot + 2. With a prefix cache they "
        "do not, and the writes went into whatever page came next.",
        expected="W2",
        applies_to="drafts, several requests whose pages lie side by side",
        applies=lambda setup: setup.drafts and setup.batch > 1 and setup.pages is None,
        strike=_write_to_the_next_slots,
        also=("W3",),
        quiet=lengthen_plans,
    ),
    Fault(
        name="addressing.compressed_position",
        bugs=("vllm-project/vllm#54498", "vllm-project/vllm#54716"),
        story="The drafter took a coordinate for the slot that an image compresses: behind one, drafted entries were "
        "written over the prompt's. Acceptance fell with every step; a text-only control gave it away.",
        expected="W8",
        also=("W3",),
        applies_to="drafts of two steps and more, requests of two whole pages",
        applies=lambda setup: setup.drafts and setup.num_steps > 1 and setup.page_size <= setup.prompt_len,
        strike=_write_at_a_lagging_position,
        quiet=partial(lengthen_plans, pool="draft", kind="draft"),
    ),
    Fault(
        name="addressing.chunk_local_position",
        bugs=("vllm-project/vllm#36580",),
        story="With prompts in chunks the slots of a chunk were computed from positions within it: the second chunk "
        "was written over the first.",
        expected="W8",
        applies_to="prompts in chunks",
        needs={"chunk": CHUNK},
        applies=lambda setup: setup.pages is None and setup.page_size <= CHUNK,
        strike=_write_a_chunk_from_0,
        quiet=partial(lengthen_plans, kind="prefill", prompt=3 * CHUNK),
    ),
    Fault(
        name="addressing.keyed_by_position",
        bugs=("ggml-org/llama.cpp#27994",),
        story="A block map was keyed by position, and not by sequence: with two sequences in one cache the first began "
        "to recall what the second had read.",
        expected="R8",
        applies_to="two requests and more",
        applies=lambda setup: setup.batch > 1 and not setup.shared and setup.page_size <= setup.prompt_len,
        strike=_read_by_position_alone,
        quiet=edit_behind_the_end,
    ),
    Fault(
        name="addressing.null_page_granted",
        bugs=("ovg-project/kvcached#398",),
        story="A thread that allocates ahead won a race, so that block 0 went to a request, though every kernel takes "
        "0 for no block at all.",
        expected="LifetimeError",
        strike=_grant_the_null_page,
        quiet=come_and_go,
    ),
    Fault(
        name="addressing.defragmented",
        bugs=(
            "ggml-org/llama.cpp#12253",
            "ggml-org/llama.cpp#9319",
            "ggml-org/llama.cpp#9314",
            "ggml-org/llama.cpp#14059",
        ),
        story="Cells were moved together, and the bytes of quantised types stayed where they were, or the plan was "
        "used after it had been given away.",
        expected="T1",
        applies_to="caches that are defragmented",
        reason="the engine's caches are paged and never defragmented; a declared move that loses bytes is "
        "draft.compaction_lost",
    ),
    Fault(
        name="addressing.beams_reordered",
        bugs=("microsoft/DeepSpeed#2506",),
        story="Beam search re-ordered its sequences, and not their K and V.",
        expected="R8",
        applies_to="beam search",
        reason="the engine has no beam search",
    ),
)
