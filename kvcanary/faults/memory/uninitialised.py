"""Slots that nobody has written, and bytes that are not neutral where nothing was stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.harmless import come_and_go, edit_behind_the_end, hit_and_give_back, recycle_as_it_is
from kvcanary.faults.helpers.reach import (
    Place,
    any_layer,
    any_part,
    any_reader,
    as_words,
    change,
    generation_of,
    own_state,
    part_of,
    read_entry,
    strike_row,
)
from kvcanary.faults.helpers.recycling import grant_again, never_granted, recycle
from kvcanary.faults.strike import UNDECLARED, NotNow, need
from kvcanary.faults.target import Call, Target

if TYPE_CHECKING:
    from torch import Tensor

    from kvcanary.pools.views import PoolView

SPARE_SLOTS = 2  # of a last page that the next step does not reach
Way = Callable[..., None]  # of a target, and the number that is put somewhere


def _read_unwritten(target: Target, pool: str) -> None:
    """An entry of a forward's row names a slot of the request's newest page, into which nothing was ever stored."""
    reader, page = any_reader(target), never_granted(target)
    slot = page * target.setup.page_size + target.rng.randrange(target.setup.page_size)

    def read(call: Call, number: int) -> Place:
        target.canary.on_alloc(reader.request_id, [page])
        position = target.rng.randrange(int(call.read.prefix_lens[number]))
        read_entry(call, number, position, slot)
        return {"reader": reader.request_id, "position": position, "slot": slot}

    strike_row(target, reader.request_id, read, pool, "draft" if pool == "draft" else "")


def _read_in_coarser_pages(target: Target) -> None:
    """The table was written in pages twice as long as the reader's: it looks behind what was ever granted."""
    reader, page, size = any_reader(target), never_granted(target), target.setup.page_size
    need(reader.committed_len >= size)
    place = target.rng.randrange(reader.committed_len // size) * size
    reader.slots[place : place + size] += page * size - int(reader.slots[place])
    target.record(reader=reader.request_id, position=place, slot=page * size)


def _publish_before_writing(target: Target) -> None:
    """A page is offered to a cache when its forward is scheduled, not when it has run."""
    reader = any_reader(target)
    need(len(reader.pages) * target.setup.page_size > reader.committed_len)
    target.record(request=f"page {reader.pages[-1]}")
    target.canary.on_share(reader.request_id, [reader.pages[-1]])


def _recycle_nan(target: Target) -> None:
    """What a freed page held for another kind of layer is NaN for the next one."""
    view, page = target.pools["target"], never_granted(target)
    recycle(target, page)
    slot = page * view.page_size + target.rng.randrange(view.page_size)
    _put_somewhere(target, view, slot, float("nan"))
    target.record(pool="target", slot=slot)
    grant_again(target, page)


def _grant(target: Target, value: float) -> None:
    """A page that was never used holds this number somewhere when it is granted."""
    view, page = target.pools["target"], never_granted(target)
    slot = page * view.page_size + target.rng.randrange(view.page_size)
    layer = _put_somewhere(target, view, slot, value)
    target.record(UNDECLARED, pool="target", slot=slot, layer=layer)
    grant_again(target, page)


def _write_behind_a_row(target: Target, value: float) -> None:
    """This number lies on the last page of a row, where nobody has written."""
    reader, view = any_reader(target), target.pools["target"]
    size = view.page_size
    need(0 < reader.committed_len % size < size - SPARE_SLOTS)
    place = reader.committed_len // size
    if target.setup.content == "rolling" and (place + 1) * size < _end(target, reader.request_id):
        raise NotNow  # the row stores there before anybody looks again
    slot = reader.pages[place] * size + size - 1
    need(generation_of(own_state(target, view), slot) != target.canary.session.ledger.generations[slot // size])
    layer = _put_somewhere(target, view, slot, value)
    target.record(UNDECLARED, pool="target", slot=slot, layer=layer, reader=reader.request_id)


def _end(target: Target, request_id: str) -> int:
    """Entries of a request of this traffic when it ends, at most."""
    _, prompt_len = target.canary.session.ledger.request(request_id).growth[0]
    return prompt_len + target.setup.new_tokens


def _write_into_the_null_page(target: Target, value: float) -> None:
    """This number lies where padding, and the ends of tables, lead."""
    view = target.pools["target"]
    slot = view.null_slots - 1
    layer = _put_somewhere(target, view, slot, value)
    target.record(UNDECLARED, pool="target", slot=slot, layer=layer)


def _put_somewhere(target: Target, view: PoolView, slot: int, value: float) -> int:
    """In all of K or V of a slot, in the layer that it gives; nobody is told."""
    layer, part = any_layer(target, view), part_of(view, any_part(target, view))
    values = as_words(view, value, part.stop - part.start)
    change(view, layer, slot, lambda words: words.index_copy(0, _range(part), values))
    return layer


def _in_whole_pages(name: str, story: str, bugs: tuple[str, ...], way: Way, **settings: Any) -> Fault:
    """NaN where nobody has written; the twin writes a number."""
    return Fault(
        name=f"uninitialised.{name}",
        bugs=bugs,
        story=story,
        expected="R9",
        strike=partial(way, value=float("nan")),
        quiet=partial(way, value=0.5),
        **settings,
    )


def _range(part: slice) -> Tensor:
    import torch

    return torch.arange(part.start, part.stop)


FAULTS = (
    Fault(
        name="uninitialised.never_written",
        bugs=("sgl-project/sglang#19897", "sgl-project/sglang#19796"),
        story="A prefix hit brought the target's entries, and those of the draft were never written: the draft read "
        "what happened to lie there, NaN at worst.",
        expected="R12",
        applies_to="pools with pages that nobody has had",
        applies=lambda setup: setup.pages is None,
        strike=partial(_read_unwritten, pool="target"),
        quiet=come_and_go,
    ),
    Fault(
        name="uninitialised.coarser_pages",
        bugs=("lightseekorg/tokenspeed#958",),
        story="The draft's page table was published in pages of 128 tokens, and the backend counts in 64: it read rows "
        "that were all zero, and the draft's logits collapsed.",
        expected="R7",
        applies_to="pools with pages that nobody has had",
        applies=lambda setup: setup.pages is None and setup.page_size <= setup.prompt_len,
        strike=_read_in_coarser_pages,
        quiet=edit_behind_the_end,
    ),
    Fault(
        name="uninitialised.draft_not_transferred",
        bugs=("NVIDIA/TensorRT-LLM#17371",),
        story="Prefill and decode ran in two servers, and only the target's pages went from one to the other: drafting "
        "began on prompts whose entries nobody had written, and lost up to a quarter of what it had accepted.",
        expected="R12",
        applies_to="drafts of two steps and more",
        applies=lambda setup: setup.drafts and setup.num_steps > 1 and setup.pages is None,
        strike=partial(_read_unwritten, pool="draft"),
        quiet=come_and_go,
    ),
    Fault(
        name="uninitialised.published_before_written",
        bugs=("vllm-project/vllm#41838",),
        story="The hash of a block was published when its forward was scheduled. A request that came in the same step "
        "hit it, and read zeros or what was there before; acceptance fell as the hours went by.",
        expected="PageStateError",
        also=("PageOwnerError",),
        strike=_publish_before_writing,
        quiet=hit_and_give_back,
    ),
    Fault(
        name="uninitialised.nan_recycled",
        bugs=(
            "vllm-project/vllm#35219",
            "vllm-project/vllm#35138",
            "vllm-project/vllm#43990",
            "vllm-project/vllm#936",
            "vllm-project/vllm#641",
        ),
        story="A block that had held the state of another kind of layer was given to attention as it was. Its bits are "
        "NaN there; masked entries are multiplied by zero, and NaN times zero is NaN.",
        expected="P1",
        needs={"quarantine": 0},
        applies_to="pools with pages that nobody has had",
        applies=lambda setup: setup.pages is None,
        strike=_recycle_nan,
        quiet=recycle_as_it_is,
    ),
    _in_whole_pages(
        "nan_granted",
        "Memory that no layer of this kind has used is granted as it is. Whole pages of it are read with masks, and "
        "its bits are NaN behind what was written.",
        ("vllm-project/vllm#35219", "vllm-project/vllm#35138"),
        _grant,
        applies_to="pools with pages of several slots that nobody has had",
        applies=lambda setup: setup.pages is None and setup.page_size > 1,
    ),
    _in_whole_pages(
        "nan_behind_the_row",
        "Somebody writes NaN behind the end of a row, on its last page: a kernel that reads whole pages and masks what "
        "it must not see gives NaN for the whole row.",
        (),
        _write_behind_a_row,
        k="K43",
        applies_to="plain decoding on pages of 16 slots, of which branches leave none unwritten",
        needs={"drafts": False, "num_draft_tokens": None, "page_size": 16},
        applies=lambda setup: not setup.adaptive,
        cause="bits",
    ),
    _in_whole_pages(
        "nan_null_page",
        "Graph capture ran dummy batches whose tables are all zero and left garbage in block 0; kernels gather that "
        "block for masked entries, and zero times NaN is NaN in whole batches.",
        ("vllm-project/vllm#57158", "vllm-project/vllm#57156"),
        _write_into_the_null_page,
        applies_to="everything; on pages of one slot padding stores over it first",
        needs={"new_tokens": 60},  # so many that a slice of the rolling check comes behind it
        applies=lambda setup: setup.page_size > 1,
        cause="graphs",
    ),
)
