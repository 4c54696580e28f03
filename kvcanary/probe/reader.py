"""The reader's probe: an engine's own attention over known entries, before it serves and now and then while it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.calls.violation import Violation
from kvcanary.pools.views import PoolView
from kvcanary.probe.forwards import PATHS, ProbeForward, edge_of, probe_forwards
from kvcanary.probe.known import NEAR, SKETCH, Known, softmax_scale
from kvcanary.probe.misread import Misread, is_right, misread
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
    window: int | None = None,
    most: int | None = None,
) -> tuple[ProbeForward, int, Misread] | None:
    """What the first forward that reads something else than its plan has read, its layer too; None: all is right.

    Bytes of the pages are put back as they were.

    pages: that nobody owns, `probe_pages(view.page_size)` of them, or as many as rows need to go beyond the window:
           `probe_pages(view.page_size, window)`; num_heads: query heads of the model
    scale: of the softmax, None: 1 / sqrt(head_dim); dtype: of q, k and v, None: the pool's; window: None: the pool's
    most: entries of a forward; None: any number
    """
    window = view.window if window is None else window
    null_pages = min(1, view.null_slots // view.page_size)
    forwards = probe_forwards(pages, view.page_size, paths, null_pages, most, window or 0)
    slots = dict.fromkeys(slot for forward in forwards for slot in forward.written)
    scale, edge = scale or softmax_scale(view.head_dim), edge_of(forwards, window or 0)
    known = Known(tuple(slots), num_heads, view.kv_heads, view.head_dim, scale, edge)
    ask = Asked(attend, forwards, known, dtype or view.dtype)
    near = NEAR[view.dtype.itemsize]
    with _kept(view, [*slots]) as layers:
        for layer in layers:
            sketch = ask.outputs(layer, SKETCH)
            answers = zip(forwards, sketch, strict=True)
            if not all(is_right(forward, known, output, near, window) for forward, output in answers):
                return ask.named(layer, window)
    return None


@dataclass(frozen=True)
class Asked:
    """An engine's attention over the entries of one probe; kind: of q, k and v."""

    attend: Attend
    forwards: Sequence[ProbeForward]
    known: Known
    kind: torch.dtype

    def outputs(self, layer: int, number: int) -> list[Tensor]:
        """By forward, what attention gives in this pass, on the host."""
        outputs = []
        for forward in self.forwards:
            k, v = self.known.entries(forward.written, number)
            query = self.known.query(len(k))
            outputs.append(self.attend(forward, layer, query.to(self.kind), k.to(self.kind), v.to(self.kind)))
        return [output.cpu() for output in outputs]

    def named(self, layer: int, window: int | None) -> tuple[ProbeForward, int, Misread] | None:
        """What was read, by all passes."""
        passes = [self.outputs(layer, number) for number in range(self.known.num_passes)]
        for forward, outputs in zip(self.forwards, zip(*passes, strict=True), strict=True):
            found = misread(forward, self.known, outputs, window)
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
