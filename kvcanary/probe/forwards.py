"""The forwards of a probe: two rows on pages that nobody owns, as the paths of an engine meet them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary.errors import PlanError

PATHS = ("prefill", "chunk", "decode", "verify")
DRAFT, BRANCHES = "draft", 2  # one more, for who reads branches by their slots, wherever these lie
#: Nodes of the tree that "verify" reads, each with its parent: a root, two children, and a child of each.
PARENTS = (-1, 0, 0, 1, 2)
LEAST = 8  # entries of a row's first forward
MOST_WINDOW, BEYOND = 1024, 4  # of a window that a row goes beyond, and by how many entries
_NEW = {"chunk": (3, 2), "decode": (1, 1), "verify": (len(PARENTS), len(PARENTS))}


@dataclass(frozen=True)
class ProbeForward:
    """One forward of a probe, which an engine's own attention is to run.

    path:    of PATHS: a whole prompt; a chunk behind a cached prefix; one token a row; a drafted tree a row. Or DRAFT:
             rows are branches, those of a request one behind the other, by whose slots they differ behind its prefix
    slots:   by row its slots in the order of positions; the last `num_new` of them are written by this forward
    num_new: by row
    index:   of a draft forward, one a step: its rows differ in so many slots, and the one that they write
    mask:    [nodes, nodes] bool, node sees node, for "verify"; None: a chain, each sees itself and those before it
    """

    path: str
    slots: tuple[tuple[int, ...], ...]
    num_new: tuple[int, ...]
    mask: Tensor | None = None
    index: int = 0

    @property
    def kind(self) -> str:
        """Of forward, in an engine that takes this path."""
        return "prefill" if self.path == "chunk" else self.path

    @property
    def branches(self) -> int:
        """Rows of each request."""
        return BRANCHES if self.path == DRAFT else 1

    @property
    def written(self) -> list[int]:
        """Slots that it writes, row after row."""
        return [slot for row, new in zip(self.slots, self.num_new, strict=True) for slot in row[len(row) - new :]]

    def positions(self) -> list[int]:
        """Of the written entries; a tree's nodes at prefix plus depth."""
        if self.mask is None:
            spans = zip(self.slots, self.num_new, strict=True)
            return [place for row, new in spans for place in range(len(row) - new, len(row))]
        depths = (self.mask.sum(-1) - 1).tolist()
        return [len(row) - len(depths) + depth for row in self.slots for depth in depths]

    def seen(self, window: int | None = None) -> list[list[int]]:
        """By written entry the slots that it may see, in the order of the row."""
        sets: list[list[int]] = []
        for row, new in zip(self.slots, self.num_new, strict=True):
            prefix, own = row[: len(row) - new], row[len(row) - new :]
            for number in range(new):
                visible = [True] * (number + 1) if self.mask is None else self.mask[number].tolist()
                slots = [*prefix, *(slot for slot, is_seen in zip(own, visible, strict=False) if is_seen)]
                sets.append(slots[-window:] if window else slots)
        return sets


def probe_pages(page_size: int, window: int = 0) -> int:
    """Pages that a probe takes of so many slots each: two rows, and one page beside them.

    window: that attention sees of a row, beyond which the longer one goes then, up to MOST_WINDOW; 0: none
    """
    return 2 * _row_pages(page_size, window) + 1


def least_budget(page_size: int, window: int = 0) -> int:
    """Entries of its longest forward, where the rows of the first have one each."""
    return _first(page_size, window)


def probe_forwards(
    pages: Sequence[int],
    page_size: int,
    paths: Collection[str] = PATHS,
    null_pages: int = 0,
    most: int | None = None,
    window: int = 0,
) -> list[ProbeForward]:
    """In order: each goes on from what those before it wrote, as the rows of an engine do; the first is a prefill.

    pages: `probe_pages(page_size)` distinct ones that nobody owns; two rows take them in turns and from the last on,
           so that neither lies in the pool's order. A third row is in it: the pool's first `null_pages`, and the first
           of these pages, which who ignores a row's table is likely to read.
    most:  entries of a forward: where the rows of the first are more together, each has one of its own
    window: as of `probe_pages`; 0 is taken where pages, or `most`, are too few for it
    PlanError for a path that there is not, or too few pages.
    """
    given = sorted(set(pages))
    if len(given) < probe_pages(page_size, window) or (most is not None and most < least_budget(page_size, window)):
        window = 0
    needed = probe_pages(page_size, window)
    if unknown := set(paths) - {*PATHS, DRAFT}:
        allowed = ", ".join((*PATHS, DRAFT))
        raise PlanError(f"paths must be among {allowed}, got {', '.join(sorted(unknown))}: leave these out")
    if len(given) < needed:
        raise PlanError(f"a probe needs {needed} pages of {page_size} slots, got {len(given)}: give as many free ones")
    lowest, *own = given[:needed]
    rows = [_slots([*mine[1:], mine[0]], page_size) for mine in (own[::-2], own[-2::-2])]
    beside = tuple(_slots([*range(null_pages), lowest], page_size))
    first = _first(page_size, window)
    lens = [first - 1, first // 2 + 1]
    starts = *(tuple(row[:length]) for row, length in zip(rows, lens, strict=True)), beside
    is_split = most is not None and sum(map(len, starts)) > most
    forwards = [ProbeForward("prefill", own, tuple(map(len, own))) for own in (zip(starts) if is_split else [starts])]
    for path in (path for path in ("chunk", "decode", DRAFT, "verify") if path in paths):
        if path == DRAFT:
            forwards += _drafts(rows, lens)
            continue
        lens = [length + new for length, new in zip(lens, _NEW[path], strict=True)]
        slots = tuple(tuple(row[:length]) for row, length in zip(rows, lens, strict=True))
        forwards.append(ProbeForward(path, slots, _NEW[path], ancestors() if path == "verify" else None))
    return forwards


def edge_of(forwards: Sequence[ProbeForward], window: int) -> tuple[int, tuple[int, ...]]:
    """How long the longest row is, and its slots that a window of its last tokens ends at; none where it has none."""
    longest = max((row for forward in forwards for row in forward.slots), key=len)
    return len(longest), longest[: len(longest) - window + 1] if 0 < window < len(longest) else ()


def _drafts(rows: Sequence[Sequence[int]], lens: Sequence[int]) -> list[ProbeForward]:
    """Two branches of each row; in the second forward each goes on from the first node of the other."""
    first, second = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for row, length in zip(rows, lens, strict=True):
        prefix, (a, b, c, d) = row[:length], row[length : length + 4]
        first += [(*prefix, a), (*prefix, b)]
        second += [(*prefix, b, c), (*prefix, a, d)]
    new = (1,) * len(first)
    return [ProbeForward(DRAFT, tuple(first), new), ProbeForward(DRAFT, tuple(second), new, index=1)]


def _first(page_size: int, window: int) -> int:
    """Entries of a row's first forward, and one more."""
    return max(2 * page_size, LEAST, window + BEYOND if 0 < window <= MOST_WINDOW else 0)


def _row_pages(page_size: int, window: int) -> int:
    return -(-(_first(page_size, window) + sum(max(new) for new in _NEW.values())) // page_size)


def _slots(pages: Sequence[int], page_size: int) -> list[int]:
    return [page * page_size + offset for page in pages for offset in range(page_size)]


def ancestors() -> Tensor:
    """[nodes, nodes] bool: each sees itself and what leads to it."""
    mask = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
