"""What a query has read, in words: the weights that came back, compared with those of the entries that it may see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary.probe.forwards import ProbeForward
from kvcanary.probe.known import SKETCH, Known

NEAR = 0.25  # of a weight: what an entry that was read otherwise is off at least
FAINT = 0.05  # of the mean weight: less is nothing
NAMED = 8  # slots in a text
QUERIES = 256  # at a time


class Misread(NamedTuple):
    """slot, position: the first that was read otherwise; family: of causes; text: what was read instead."""

    slot: int
    position: int
    family: str
    text: str
    evidence: tuple[str, ...]
    expected: str
    found: str


def is_right(forward: ProbeForward, known: Known, sketch: Tensor, near: float, window: int | None = None) -> bool:
    """Whether every query read its row: what the sketch gave, [n, heads, dim], to within so much of a weight."""
    seen, codes = forward.seen(window), known.codes(SKETCH).double()
    for part in _parts(len(seen)):
        wanted = (known.weights(seen[part]) @ codes)[:, None]
        if not ((known.plain(sketch[part]) - wanted).abs() <= near * (wanted + FAINT)).all():
            return False
    return True


def misread(
    forward: ProbeForward, known: Known, outputs: Sequence[Tensor], window: int | None = None
) -> Misread | None:
    """The first query that read something else than its row; None: all is right.

    outputs: by pass [n, heads, dim], what attention gave for the forward's new tokens
    """
    seen = forward.seen(window)
    for part in _parts(len(seen)):
        wanted, (weights, sums) = known.weights(seen[part]), known.read([output[part] for output in outputs])
        faint = FAINT / (wanted > 0).sum(-1)
        near = NEAR * wanted + faint[:, None]
        wrong = ~((weights - wanted[:, None]).abs() <= near[:, None]).all(-1) | ~((sums - 1).abs() <= NEAR)
        if wrong.any():
            at, head = wrong.nonzero()[0].tolist()
            answer = Answer(forward, known, part.start + at, wanted[at], weights[at, head], float(sums[at, head]))
            return _named(answer, head, seen[part.start + at])
    return None


def _parts(count: int) -> Iterator[slice]:
    """Queries that are judged at a time: what all of them read at once may be more than a host's memory."""
    return (slice(first, first + QUERIES) for first in range(0, count, QUERIES))


def _named(answer: Answer, head: int, seen: Sequence[int]) -> Misread:
    family, text = answer.reason()
    position = answer.forward.positions()[answer.query]
    evidence = (
        f"query at position {position}, head {head}, over entries of known K and V in free pages",
        f"the weights of what it read add up to {answer.total:.3g}, those of its row to 1",
    )
    return Misread(answer.slot, position, family, text, evidence, _slots(seen), _slots(answer.read))


class Answer:
    """What one query gave: by slot of the probe the weight that it should have, and the one that it had.

    total: of all that was read, 1 where it was the probe's; extra, missing: slots that were read besides the row's,
    and those of the row that were not
    """

    def __init__(
        self, forward: ProbeForward, known: Known, query: int, wanted: Tensor, got: Tensor, total: float
    ) -> None:
        self.forward, self.query, self.total = forward, query, total
        self._known, self._wanted, self._got = known, wanted, got
        self.slot = forward.written[query]
        faint = FAINT / int((wanted > 0).sum())
        self.read = known.of((got > faint) | (wanted > 0) & (got > wanted / 2))
        self.extra, self.missing = known.of((wanted == 0) & (got > faint)), known.of((wanted > 0) & (got < wanted / 2))

    def reason(self) -> tuple[str, str]:
        """Family of causes, and text."""
        mine = next(slots for slots in self.forward.slots if self.slot in slots)
        foreign = [slot for slot in self.extra if slot not in mine]
        if not (torch.isfinite(self._got).all() and math.isfinite(self.total)):
            return "uninitialised", "attention gives NaN or infinities over entries that are finite"
        if abs(float(self._got.sum()) - self.total) > NEAR:
            return "addressing", "attention read slots that are not the row's, and that the probe has not written"
        if self.missing and (foreign or (self.extra and self.forward.mask is None)):
            return "addressing", f"attention ignores the row's table: it read {_slots(self.extra)}"
        if foreign:
            return "addressing", f"attention read slots of another row as well: {_slots(foreign)}"
        if self.extra and self.forward.mask is not None:
            return "draft", f"the mask lets in nodes that are no ancestors: {_slots(self.extra)}"
        if self.extra:
            return "lengths", f"attention read entries behind those of the row: {_slots(self.extra)}"
        if self.missing and self.total > 1 - NEAR and not self._is_sharper():
            return "lengths", f"attention left out entries of the row: {_slots(self.missing)}"
        return self._of_weights()

    def _of_weights(self) -> tuple[str, str]:
        """The entries of the row were read, and weigh otherwise."""
        ratio = (self._got / self._wanted)[self._wanted > 0]
        times = float(ratio.mean())
        is_even = float((ratio - times).abs().max()) <= NEAR * times
        if abs(self.total) < FAINT:
            return "lengths", "attention read no entry at all"
        if self.total < 1 - NEAR:
            return "addressing", "attention read slots besides those of the row, or in their place"
        if is_even and times > 1 + NEAR:
            return "scales", f"a scale of V is missing, or another's: values are {times:.3g} times what was stored"
        return "scales", "entries weigh otherwise than K and the query say: a scale of K or of the scores is another"

    def _is_sharper(self) -> bool:
        """Whether all entries up to a score are missing, and none above it: larger scores have done that."""
        row, gone = self._wanted > 0, torch.tensor([slot in self.missing for slot in self._known.slots])
        kept = self._known.scores[row & ~gone]
        return len(kept) > 0 and bool(self._known.scores[gone].max() < kept.min())


def _slots(slots: Sequence[int]) -> str:
    more = f" and {len(slots) - NAMED} more" if len(slots) > NAMED else ""
    return f"slots {', '.join(map(str, slots[:NAMED]))}{more}" if slots else "none that the probe knows"
