"""Bytes that were copied, loaded or restored wrongly, in part, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.async_work import Work, unordered
from kvcanary.faults.helpers.coming_back import (
    all_but_the_last_page,
    as_they_left,
    bring_back,
    has_two_pages,
    rotated_heads,
    rotated_pages,
)
from kvcanary.faults.helpers.reach import any_layer, any_reader, exchange_parts, overwrite, shift_heads, words_of
from kvcanary.faults.helpers.recycling import never_granted
from kvcanary.faults.helpers.unsaid import move_pools
from kvcanary.faults.strike import NotNow, need
from kvcanary.faults.target import Setup, Target

if TYPE_CHECKING:
    from torch import Tensor

    from kvcanary.pools.views import PoolView

CHILD = "child"
ROWS_OF_A_BLOCK = 16
Copy = Callable[["PoolView", "Tensor"], "Tensor"]  # what arrives of the words of a row


def _load(target: Target, end: Callable[[Target, str, int], None]) -> None:
    """A page of a running request is loaded, ends as `end` says, and its first entry is read."""
    page, reader = never_granted(target), any_reader(target)
    canary, name = target.canary, reader.request_id
    canary.on_alloc(name, [page], for_load=True)
    canary.on_load_begin(name, [page])
    end(target, name, page)
    size = target.setup.page_size
    position = target.rng.randrange(reader.committed_len // size * size or reader.committed_len)  # branches copy others
    reader.slots[position] = page * target.setup.page_size
    target.record(reader=name, position=position, slot=int(reader.slots[position]))


def _fail(target: Target, name: str, page: int) -> None:
    target.canary.on_load_fail(name, [page])


def _go_on(target: Target, name: str, page: int) -> None:
    """The load still runs."""


def _arrive_in_part(target: Target, name: str, page: int) -> None:
    """The end is told with the length of what did arrive, and the page lies behind it."""
    target.canary.on_load_end(name, [page], target.canary.session.ledger.request(name).committed_len)


def _load_over_final_entries(target: Target) -> None:
    """The length of a hit is rounded down to a chunk, and what lies behind is loaded over what is there."""
    for reader in target.running():
        final = target.canary.session.ledger.request(reader.request_id).final_pages
        if final:
            page = target.rng.choice(reader.pages[:final])
            target.record(request=f"page {page}")
            target.canary.on_load_begin(reader.request_id, [page])
            return
    raise NotNow


def _keep_what_was_rejected(target: Target) -> None:
    """A load is refused, and the number of computed tokens stays what it would have been."""
    _refuse_a_load(target)
    target.record(pool="target", reader=CHILD, position=0)
    target.canary.commit(CHILD, target.setup.page_size)


def _copy_a_page(target: Target, arrives: Copy, one_layer: bool = False, whole: bool = True) -> None:
    """A page is copied into a page of another request, and the copy is declared; its rows arrive changed.

    one_layer: only that one is copied wrong; whole: all rows, not only the last ones.
    """
    import torch

    page, reader = never_granted(target), any_reader(target)
    view, size = target.pools["target"], target.setup.page_size
    need(reader.committed_len >= size)
    canary, slots = target.canary, reader.slots[:size].clone()
    canary.admit(CHILD, canary.session.ledger.request(reader.request_id).tokens[: size + 1].tolist())
    canary.on_alloc(CHILD, [page])
    wrong = [any_layer(target, view)] if one_layer else list(range(view.num_layers))
    first = 0 if whole else size - max(1, size // ROWS_OF_A_BLOCK)
    differs = []
    for layer in range(view.num_layers):
        for offset, slot in enumerate(slots.tolist()):
            words = words_of(view, layer, slot)
            arrived = arrives(view, words.clone()) if layer in wrong and offset >= first else words
            overwrite(view, layer, page * size + offset, arrived)
            if bool((arrived != words).any()):
                differs.append((offset, layer))
    if arrives is _copy_as_it_is:
        target.record(code="")
    else:
        need(differs)
        offset, layer = min(differs)
        target.record(pool="target", slot=page * size + offset, layer=layer)
    canary.on_move("target", slots, page * size + torch.arange(size))


def _nothing(view: PoolView, words: Tensor) -> Tensor:
    return words.zero_()


def _copy_as_it_is(view: PoolView, words: Tensor) -> Tensor:
    return words


def _give_back_unread(target: Target) -> None:
    """A load fails, and its page goes back before anybody reads it: nothing is due."""
    page = _refuse_a_load(target)
    target.record(code="")
    target.canary.on_free(CHILD, [page])


def _refuse_a_load(target: Target) -> int:
    """The page of another request, into which nothing was loaded."""
    page, canary = never_granted(target), target.canary
    canary.admit(CHILD, [1] * (target.setup.page_size + 2))
    canary.on_alloc(CHILD, [page], for_load=True)
    canary.on_load_begin(CHILD, [page])
    canary.on_load_fail(CHILD, [page])
    return page


def _has_new_pages(setup: Setup) -> bool:
    return setup.pages is None and setup.page_size <= setup.prompt_len


def _fault(name: str, bugs: tuple[str, ...], story: str, **more: object) -> Fault:
    settings = {"applies": _has_new_pages} | more
    return Fault(f"transfer.{name}", story, bugs=bugs, applies_to=NEVER_HAD, **settings)  # type: ignore[arg-type]


def _has_heads(setup: Setup) -> bool:
    """Whether there are several of K and V."""
    return setup.model != "embedded"


def _back(name: str, story: str, **more: object) -> Fault:
    """Bytes that were put away, and come back wrong."""
    settings = {"expected": "T1", "applies": has_two_pages, "quiet": partial(bring_back, arrive=as_they_left)} | more
    where = "pools with pages that nobody has had, requests of two whole pages"
    return Fault(f"transfer.{name}", story, applies_to=where, **settings)  # type: ignore[arg-type]


NEVER_HAD = "pools with pages that nobody has had, requests of a whole page"
FAULTS = (
    _fault(
        "load_failed",
        ("LMCache/LMCache#4991", "LMCache/LMCache#3022", "ai-dynamo/dynamo#15079", "ai-dynamo/dynamo#6032"),
        "A store or a load failed, and only a warning said so: the key stayed listed, the transfer was marked as "
        "complete with an error that nobody read, and later hits were served what lay in the buffers.",
        expected="R12",
        strike=partial(_load, end=_fail),
        quiet=_give_back_unread,
    ),
    _fault(
        "read_while_loading",
        ("sgl-project/sglang#31108", "sgl-project/sglang#30321"),
        "K and V were fetched, and pages of the index beside them were not: the length of a hit was that of K and V "
        "alone. The miss was logged by another thread, and answers ran away after hours.",
        expected="R12",
        strike=partial(_load, end=_go_on),
        quiet=_give_back_unread,
    ),
    _fault(
        "loaded_in_part",
        ("sgl-project/sglang#30233", "sgl-project/sglang#38704"),
        "A prefill that was aborted left a placeholder of one token, which was handed over as if it were the prompt: "
        "decoding began on slots that nobody had filled.",
        expected="R12",
        strike=partial(_load, end=_arrive_in_part),
        quiet=_give_back_unread,
    ),
    _fault(
        "stored_while_loading",
        ("vllm-project/vllm#34526", "vllm-project/vllm#35092"),
        "One connector began a remote load into blocks, and another stored the same blocks at once: what they had held "
        "before went out, to be loaded by others later.",
        expected="O1",
        cause="order",
        **unordered(Work("load", "connector 1", True), Work("store", "connector 2")),
    ),
    _fault(
        "loaded_over_final_entries",
        ("LMCache/LMCache#2206",),
        "The length of a hit was rounded down to a chunk, and the load went over slots that the engine's own prefix "
        "cache had already, and shared.",
        expected="PageStateError",
        strike=_load_over_final_entries,
        quiet=_give_back_unread,
    ),
    _fault(
        "rejected_load_counted",
        ("vllm-project/vllm#49250", "vllm-project/vllm#53298"),
        "A connector refused a load, and the request's count of computed tokens stayed as if it had come. Comparing "
        "outputs was no help: reuse and recomputation may rightly differ.",
        expected="H1",
        strike=_keep_what_was_rejected,
        quiet=_give_back_unread,
    ),
    _fault(
        "block_counted_in_rows",
        ("ROCm/ATOM#1807",),
        "Blocks of a codec were sixteen times too small, since their bytes were counted in rows: a reload brought "
        "back the rest as it lay.",
        expected="T1",
        strike=partial(_copy_a_page, arrives=_nothing, whole=False),
        quiet=partial(_copy_a_page, arrives=_copy_as_it_is),
    ),
    _fault(
        "wrong_axis",
        ("vllm-project/vllm#17362",),
        "A tensor of blocks by K and V was copied as one of K and V by blocks: a swap moved other rows than it was "
        "asked to.",
        expected="T1",
        strike=partial(_copy_a_page, arrives=exchange_parts),
        quiet=partial(_copy_a_page, arrives=_copy_as_it_is),
    ),
    _fault(
        "strides_ignored",
        ("flashinfer-ai/flashinfer#527", "ovg-project/kvcached#391"),
        "A copy went by the shape of a tensor whose strides say otherwise. Within one server everything was right, "
        "and what came from another was garbled.",
        expected="T1",
        applies=lambda setup: _has_new_pages(setup) and _has_heads(setup),
        strike=partial(_copy_a_page, arrives=shift_heads),
        quiet=partial(_copy_a_page, arrives=_copy_as_it_is),
    ),
    _fault(
        "layer_group_skipped",
        ("LMCache/LMCache#4247", "LMCache/LMCache#4253"),
        "A packed layout left out what one group of layers needs: requests with a shared prefix came out as garbage, "
        "with every counter green. Planted facts in long documents gave it away.",
        expected="T1",
        strike=partial(_copy_a_page, arrives=_nothing, one_layer=True),
        quiet=partial(_copy_a_page, arrives=_copy_as_it_is),
    ),
    _back(
        "pages_rotated",
        "A block came back from the host with its list of places off by one: each of its pages held the bytes of the "
        "page before it.",
        strike=partial(bring_back, arrive=rotated_pages),
    ),
    _back(
        "last_page_not_copied",
        "A copy was cut to the length of the shorter of two regions: the last page of a block never came back, and "
        "what had lain there was read.",
        strike=partial(bring_back, arrive=all_but_the_last_page),
    ),
    _back(
        "earlier_parcel",
        "A reference to a place of the host outlived the block in it: a request was given what another one had left "
        "there before.",
        strike=partial(bring_back, arrive=as_they_left, of_earlier=True),
    ),
    _back(
        "heads_permuted",
        "Two engines agreed on shapes and not on the order of heads: every page arrived whole, with its heads in other "
        "places.",
        strike=partial(bring_back, arrive=rotated_heads),
        applies=lambda setup: has_two_pages(setup) and _has_heads(setup),
    ),
    Fault(
        name="transfer.pool_moved_short",
        story="A pool was allocated anew, and the copy of what it held left out a slot of a row that goes on.",
        expected="R9",
        applies_to="running requests",
        strike=lambda target: move_pools(target, is_short=True),
        quiet=lambda target: move_pools(target, is_short=False),
        cause="order",
    ),
)
