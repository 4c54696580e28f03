"""Pages that were put away, and come back into others with bytes that are not those that left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcanary.faults.helpers.reach import any_reader, part_of
from kvcanary.faults.strike import need
from kvcanary.faults.target import Setup, Target

if TYPE_CHECKING:
    from torch import Tensor

    from kvcanary.pools.views import PoolView

CHILD = "child"
NUM_PAGES = 2
#: Of the rows [slots, words] of one layer that left, and of what lies where they come back: those that arrive.
Arrive = Callable[["PoolView", "Tensor", "Tensor"], "Tensor"]


def bring_back(target: Target, arrive: Arrive, of_earlier: bool = False) -> None:
    """The first pages of a running request are put away, and come back as another one's, changed in the target's pool.

    of_earlier: the second page is put away before the first, and comes back in its place
    """
    import torch

    reader, size, canary = any_reader(target), target.setup.page_size, target.canary
    pages = _never_granted(target, 1 if of_earlier else NUM_PAGES)
    need(reader.committed_len >= NUM_PAGES * size and pages)
    sent = list(reader.pages[:NUM_PAGES])
    if of_earlier:
        canary.on_offload(sent[1:])
    snapshot, length = canary.on_offload(sent[: len(pages)]), len(pages) * size
    own, other = _slots(sent[: len(pages)], size), _slots(sent[-len(pages) :], size)
    into = _slots(pages, size)
    first: dict[str, Any] | None = None
    for name, view in target.pools.items():
        for layer in range(view.num_layers):
            left = view.rows.gather_layer(layer, own)
            arrived = left
            if name == "target":
                source = view.rows.gather_layer(layer, other) if of_earlier else left
                arrived = arrive(view, source, view.rows.gather_layer(layer, into))
            wrong = (arrived != left).any(1).nonzero().flatten()
            if len(wrong) and first is None:
                first = {"pool": name, "slot": int(into[wrong[0]]), "layer": layer, "reader": CHILD}
            view.rows.scatter_layer(layer, into, arrived.to(torch.int32))
    if first is None:
        target.record(code="")
    else:
        target.record(**first)
    canary.admit(CHILD, canary.session.ledger.request(reader.request_id).tokens[: length + 2].tolist())
    canary.on_alloc(CHILD, pages, for_load=True)
    canary.on_restore(CHILD, pages, length, snapshot)


def as_they_left(view: PoolView, left: Tensor, lies: Tensor) -> Tensor:
    return left


def rotated_pages(view: PoolView, left: Tensor, lies: Tensor) -> Tensor:
    return left.roll(len(left) // NUM_PAGES, 0)


def all_but_the_last_page(view: PoolView, left: Tensor, lies: Tensor) -> Tensor:
    import torch

    return torch.cat((left[: len(left) // NUM_PAGES], lies[len(left) // NUM_PAGES :]))


def rotated_heads(view: PoolView, left: Tensor, lies: Tensor) -> Tensor:
    """Of K and of V."""
    arrived = left.clone()
    for number in range(2 if view.v else 1):
        part = part_of(view, number)
        arrived[:, part] = left[:, part].unflatten(1, (view.kv_heads, -1)).roll(1, 1).flatten(1)
    return arrived


def has_two_pages(setup: Setup) -> bool:
    """Whether prompts have as many whole pages, and nobody has had the last ones of the pool."""
    return setup.pages is None and NUM_PAGES * setup.page_size <= setup.prompt_len and setup.window is None


def _never_granted(target: Target, count: int) -> list[int]:
    """The last free pages, if nobody has ever had them."""
    pages = list(target.free_pages())[-count:]
    return pages if len(pages) == count and not target.canary.session.ledger.generations[pages].any() else []


def _slots(pages: list[int], size: int) -> Tensor:
    import torch

    return (torch.tensor(pages)[:, None] * size + torch.arange(size)).flatten()
