"""The reader's probe: an engine's own attention over known entries, before it serves and now and then while it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvcanary.calls.violation import Violation
from kvcanary.pools.views import PoolView
from kvcanary.probe.forwards import PATHS, ProbeForward, probe_forwards
from kvcanary.probe.known import Known, softmax_scale
from kvcanary.probe.misread import Misread, misread
from kvcanary.records.state import PoolState

#: Stores k, v [n, kv_heads, head_dim] of a forward's new tokens in one layer and attends with q [n, heads, head_dim],
#: as the engine does; q, k and v are as they come out of the rotation, on the host. Returns [n, heads, head_dim].
Attend = Callable[[ProbeForward, int, Tensor, Tensor, Tensor], Tensor]


@torch.inference_mode()
def probe_pool(
    view: PoolView,
    attend: Attend,
    pages: Sequence[int],
    num_heads: int,
    paths: Collection[str] = PATHS,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[ProbeForward, int, Misread] | None:
    """What the first forward that reads something else than its plan has read, its layer too; None: all is right.

    Bytes of the pages are put back as they were.

    pages: that nobody owns, `probe_pages(view.page_size)` of them; num_heads: query heads of the model
    scale: of the softmax, None: 1 / sqrt(head_dim); dtype: of q, k and v, None: the pool's
    """
    forwards = probe_forwards(pages, view.page_size, paths, min(1, view.null_slots // view.page_size))
    slots = dict.fromkeys(slot for forward in forwards for slot in forward.written)
    known = Known(tuple(slots), num_heads, view.kv_heads, view.head_dim, scale or softmax_scale(view.head_dim))
    kind = dtype or view.dtype
    with _kept(view, [*slots]) as layers:
        for layer in layers:
            passes = [_outputs(known, attend, forwards, layer, number, kind) for number in range(known.num_passes)]
            for forward, outputs in zip(forwards, zip(*passes, strict=True), strict=True):
                found = misread(forward, known, [one.cpu() for one in outputs], view.window)
                if found is not None:
                    return forward, layer, found
    return None


def misread_violation(pool: PoolState, step: int, forward: ProbeForward, layer: int, found: Misread) -> Violation:
    """R8 (E1): attention of this pool has read something else than the forward's plan names."""
    return Violation(
        "R8",
        pool,
        found.slot,
        found.position,
        None,
        (forward.kind, 0),
        step,
        layers=(layer,),
        expected={"reads": found.expected},
        found={"reads": found.found},
        misread=(found.family, found.text, found.evidence),
    )


def _outputs(
    known: Known, attend: Attend, forwards: Sequence[ProbeForward], layer: int, number: int, kind: torch.dtype
) -> list[Tensor]:
    """By forward, what attention gives in this pass."""
    outputs = []
    for forward in forwards:
        k, v = known.entries(forward.written, number)
        outputs.append(attend(forward, layer, known.query(len(k)).to(kind), k.to(kind), v.to(kind)))
    return outputs


@contextmanager
def _kept(view: PoolView, slots: Sequence[int]) -> Iterator[list[int]]:
    """The layers to probe, first and last; their bytes in these slots are put back behind it."""
    places, layers = torch.tensor(slots, device=view.device), sorted({0, view.num_layers - 1})
    before = [view.rows.gather_layer(layer, places) for layer in layers]
    try:
        yield layers
    finally:
        for layer, words in zip(layers, before, strict=True):
            view.rows.scatter_layer(layer, places, words)
