"""A host's attention is asked what it reads before it serves, as far as it can be: one pool after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.report import pool_state
from kvcanary.adapters.observed.state import Group, Layers
from kvcanary.pools.views import PoolView
from kvcanary.probe.forwards import ProbeForward, least_budget, probe_pages
from kvcanary.probe.misread import Misread
from kvcanary.probe.reader import Attend, misread_violation

PATHS = ("prefill", "chunk", "decode")
ROWS, ROWS_APART = 3, 2  # of its largest forward, and those whose pages lie in no order
IN_A_GRAPH = "in a graph alone: the same layers read right outside of one"
Found = tuple[ProbeForward, int, Misread]
#: Attention of one layer by replays of a graph, for forwards of one token a row; q, k and v: [rows, heads * head_dim].
Replayed = Callable[[ProbeForward, Sequence[Tensor]], Tensor]


class Asked(Protocol):
    """Layers of one pool."""

    def why_not(self) -> str | None:
        """Why they cannot be asked; None: they can."""
        ...

    def probe(self) -> Found | None:
        """What the first forward that reads something else than its row has read."""
        ...


def ask(canary: PagedCanary, group: Group, layers: Layers, make: Callable[[], Asked]) -> bool:
    """Probe one pool, unless there is a reason not to, and tell what is wrong. KVCorruptionError in mode raise.

    Gives whether it was asked, and everything was right.
    """
    coverage = canary.coverage
    try:
        reason, found = "R8 is disabled" if "R8" in canary.config.disable else None, None
        if not reason:
            asked = make()
            reason = asked.why_not()
            found = None if reason else asked.probe()
    except Exception as error:  # of a backend that was not made for such a batch
        reason, found = f"{type(error).__name__}: {error}", None
    coverage.reader_probes += not reason
    coverage.not_probed = reason or coverage.not_probed
    if found is not None:
        violation = misread_violation(pool_state(canary, group, layers), canary.step, *found)
        canary.response.answer([violation], canary.step, coverage)
    return not reason and found is None


class InGraphs:
    """`kvcanary.probe.reader.Attend` where forwards of one token a row are replays of a graph, as a server runs them.

    attend: all other forwards;  capture: gives the graph of a layer, for q, k and v like these, flat, of any rows
    """

    def __init__(self, attend: Attend, capture: Callable[[int, Sequence[Tensor]], Replayed]) -> None:
        self._attend, self._capture = attend, capture
        self._graphs: dict[int, Replayed] = {}

    def __call__(self, forward: ProbeForward, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if forward.path != "decode":
            return self._attend(forward, layer, q, k, v)
        values = [value.flatten(1) for value in (q, k, v)]
        if layer not in self._graphs:
            self._graphs[layer] = self._capture(layer, values)
        return self._graphs[layer](forward, values).view(q.shape)


def in_a_graph(found: Found | None) -> Found | None:
    """The same, with where it was found, for layers that were right outside of a graph."""
    if found is None:
        return None
    forward, layer, misread = found
    return forward, layer, misread._replace(evidence=(*misread.evidence, IN_A_GRAPH))


def too_large(view: PoolView, budget: int, longest_row: int, num_rows: int, window: int = 0) -> str | None:
    """Why a host has no room for a probe of this pool: entries of a step, of a row, and rows; None: it has.

    window: beyond which rows go
    """
    num_pages = probe_pages(view.page_size, window)
    longest = view.page_size * (num_pages // ROWS_APART)
    is_within = budget >= least_budget(view.page_size, window) and longest_row >= longest and num_rows >= ROWS
    if is_within and view.num_pages >= first_page(view) + num_pages:
        return None
    return f"two rows of {longest} entries in blocks of {view.page_size} are more than this worker has room for"


def first_page(view: PoolView) -> int:
    """The first that is not padding's."""
    return -(-view.null_slots // view.page_size)


def free_pages(view: PoolView, room: tuple[int, int, int], window: int = 0) -> range:
    """Those that a probe takes, before anybody has one; rows go beyond the window where there is room for that.

    room: as `too_large` takes it: entries of a step, of a row, and rows
    """
    window = 0 if too_large(view, *room, window) else window
    return range(first_page(view), first_page(view) + probe_pages(view.page_size, window))


def is_given(value: Any) -> bool:
    """Whether a setting of attention is one that changes it."""
    return value is not None and not (isinstance(value, int | float) and not value)
