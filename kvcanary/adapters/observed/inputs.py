"""What a forward was fed, compared with what it should have been fed, where the host or another forward knows it.

Tokens, positions and slots are compared on the device; the host looks only when the counter of findings says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.canary import FEWEST_ROWS, PagedCanary, at_least, sizes
from kvcanary.adapters.observed.state import RING, Forward, Group, Step
from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.report.causes.watched import FIRST_ENTRY, LAST_ENTRY
from kvcanary.report.watched_evidence import WatchedPool
from kvcanary_kernels.watch.walk import NO_VIOLATION, NOW_PLACE, NOW_ROWS, NOW_STEP, table_slots

KEPT_OTHERWISE = "this is what the engine keeps of the request's own tokens, from which it is fed"
TOO_MANY = "requests that began, too many at once for a comparison of what the engine keeps of them"
UNKNOWN, NOTHING = -1, -2  # in `expected`: nobody knows; there is no such token yet


@dataclass(frozen=True)
class Entries:
    """The entries of one forward, in the order in which they are fed.

    requests:  by row
    where:     what the report says besides of an entry, by its number: its branch, or its node in a tree
    rows:      [n] on the host, the row of each entry
    positions: [n] where it stands in its row
    slots:     [n] where it is stored
    indices:   [n] on the host, where they are of several forwards of a kind: of which
    """

    requests: Sequence[str]
    rows: NDArray[np.integer]
    positions: Tensor
    slots: Tensor
    where: Callable[[int], str] | None = None
    indices: NDArray[np.integer] | None = None


@dataclass(frozen=True, eq=False)
class Fed:
    """An event of a step: what was fed and what should have been, [n] each, in tensors that stay as they are."""

    code: str
    what: str
    found: Tensor
    expected: Tensor
    entries: Entries
    group: Group
    site: tuple[str, int]

    @property
    def wrong(self) -> Tensor:
        """[n] bool: where they differ."""
        return (self.found != self.expected) & (self.expected != UNKNOWN)

    def violations(self, step: int) -> Iterator[Violation]:
        """The first of each row. All of them are one incident, and so are those of its requests in later forwards."""
        told, rows = set[int](), self.entries.rows
        for entry in self.wrong.nonzero()[:, 0].tolist():
            row = int(rows[entry])
            if row in told:
                continue
            told.add(row)
            pool = WatchedPool.of(self.group.layers[0].view, self.group.number, self.group.records)
            slot, position = int(self.entries.slots[entry]), int(self.entries.positions[entry])
            index = self.site[1] if self.entries.indices is None else int(self.entries.indices[entry])
            site = self.site[0], index
            violation = Violation(self.code, pool, slot, position, self.entries.requests[row], site, step)
            expected = int(self.expected[entry])
            violation.expected = {self.what: None if expected == NOTHING else expected}
            violation.found = {self.what: int(self.found[entry])}
            violation.along = self.group.number, step
            violation.notes = (LAST_ENTRY,) if entry + 1 == len(rows) or rows[entry + 1] != row else ()
            violation.notes += () if self.entries.where is None else (self.entries.where(entry),)
            yield violation


@dataclass(frozen=True, eq=False)
class WrongLengths:
    """An event of a step: rows that have more, or are fed less, than can be.

    rows: request, position and slot of each, and what the report says was expected and found
    """

    rows: Sequence[tuple[str, int, int, dict[str, int], dict[str, int]]]
    group: Group
    site: tuple[str, int]

    def violations(self, step: int) -> Iterator[Violation]:
        """R10 of each."""
        pool = WatchedPool.of(self.group.layers[0].view, self.group.number, self.group.records)
        for request, position, slot, expected, found in self.rows:
            violation = Violation("R10", pool, slot, position, request, self.site, step)
            violation.expected, violation.found = expected, found
            violation.along = self.group.number, step
            yield violation


def tell_outgrown(canary: PagedCanary, requests: Sequence[tuple[str, int, int]], width: int) -> None:
    """Rows were given more entries than a line of the table has, so that the rest went elsewhere.

    requests: each with the entries that it was given, and the slot of the first that went elsewhere
    """
    rows = [(name, width, slot, {"row_width": width}, {"length": length}) for name, length, slot in requests]
    _tell_lengths(canary, rows, ("grant", 0))


def tell_unfed(canary: PagedCanary, requests: Sequence[tuple[str, int]]) -> None:
    """A prefill computes nothing for these rows: what is sampled of them is another row's.

    requests: each with the entries that it has
    """
    rows = [(name, length, NO_SLOT, {"fewest_new": 1}, {"new": 0}) for name, length in requests]
    _tell_lengths(canary, rows, ("prefill", 0))


def tell_lost(canary: PagedCanary, requests: Sequence[tuple[str, int, int]]) -> None:
    """Rows are longer than their requests: tokens were sampled that these did not get.

    requests: each with the tokens that it has, and should have
    """
    rows = [(name, known, NO_SLOT, {"tokens": wanted}, {"tokens": known}) for name, known, wanted in requests]
    _tell_lengths(canary, rows, ("decode", 0))


def _tell_lengths(canary: PagedCanary, rows: list[Any], site: tuple[str, int]) -> None:
    if rows:
        canary.memory.total += len(rows)
        canary.events.append(WrongLengths(rows, canary.groups[0], site))


def judge_fed(
    canary: PagedCanary,
    code: str,
    what: str,
    found: Tensor,
    expected: Tensor,
    entries: Entries,
    site: tuple[str, int],
) -> None:
    """Compare what a forward is fed with what it should be fed, UNKNOWN where nobody knows, NOTHING where it should be
    fed nothing; told with the next step.

    found, expected: [n] on the device. No wait.
    """
    # the engine may use its tensors again before the host looks
    kept = replace(entries, positions=entries.positions.clone(), slots=entries.slots.clone())
    fed = Fed(code, what, found.clone(), expected, kept, canary.groups[0], site)
    canary.memory.total += fed.wrong.sum()
    canary.events.append(fed)


def judge_kept(canary: PagedCanary, kept: Tensor, new: Iterable[tuple[int, str, Sequence[int] | None]]) -> None:
    """W6 where an engine keeps other tokens of a request that begins than this came with; told with the next step.

    kept: [rows, width] on the device, from which forwards are fed: `known` of these
    new:  (row, request, tokens, None where nobody knows them) of each, that were just admitted
    """
    width, rows = kept.shape[1], dict[int, tuple[str, Sequence[int]]]()
    for row, request, tokens in new:
        if tokens is None or not len(tokens):
            continue
        own = tokens[:width]
        if canary.compare_kept(row, own, width):
            rows[row] = request, own
        else:
            canary.coverage.skip(TOO_MANY, 1)
    if rows:
        canary.events.append(KeptTokens(rows, kept, canary.launches.kept_violations, canary.groups[0]))


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """An event of a step: rows that began, of which the device has compared what the engine keeps.

    rows:  by number, the request and the tokens that it came with;  cells: [RING, rows], where they differ first
    """

    rows: Mapping[int, tuple[str, Sequence[int]]]
    kept: Tensor
    cells: Tensor
    group: Group

    def violations(self, step: int) -> Iterator[Violation]:
        """W6 of each row that is kept otherwise."""
        pool = WatchedPool.of(self.group.layers[0].view, self.group.number, self.group.records)
        for row, position in enumerate(self.cells[step % RING].tolist()):
            if position == NO_VIOLATION or row not in self.rows:
                continue
            request, tokens = self.rows[row]
            violation = Violation("W6", pool, NO_SLOT, position, request, ("prefill", 0), step)
            violation.expected, violation.found = {"token": tokens[position]}, {"token": int(self.kept[row, position])}
            violation.along, violation.notes = (self.group.number, step), (KEPT_OTHERWISE,)
            yield violation


class SampledTokens:
    """A row goes on with the token that was sampled of it last: W6 where it does not.

    Engines keep sampled tokens on the device or in books of their own, from which the next forward is fed; here they
    are kept once more. It holds the canary, and is one of `PagedCanary.beside`.
    """

    number = -1  # told before what states say

    def __init__(self, canary: PagedCanary, most: int) -> None:
        """most: tokens that are sampled of one row in a step, at most"""
        self.canary, zeros, rows = canary, canary.memory.zeros, canary.num_rows
        self._next = zeros(rows + 1) - 1  # by number of a row; the last one is nobody's
        self._sampled = zeros(rows, most)
        self._told = zeros(RING, 4, rows)  # step, position, token that was fed and that was sampled, in batch order
        self._begun: list[int] = []
        canary.beside.add(self)

    @property
    def num_bytes(self) -> int:
        return sum(own.numel() * own.element_size() for own in (self._next, self._sampled, self._told))

    def begun(self, numbers: Iterable[int]) -> None:
        """Rows begin, or begin anew, with the next forward: nothing was sampled of them."""
        self._begun += numbers

    def compare(self, forward: Forward) -> None:
        """Look at what each row is fed first; behind `read` or `read_again`, before the forward runs."""
        if self._begun:
            self._next.index_fill_(0, self.canary.memory.upload(torch.tensor(self._begun)), UNKNOWN)
            self._begun = []
        self._launch_compare(forward, at_least(len(forward.numbers), FEWEST_ROWS, self.canary.num_rows))

    def sampled(self, tokens: Tensor, are_kept: NDArray[np.bool_] | None = None) -> None:
        """What was sampled of the rows of that forward, in batch order. No wait.

        tokens:   [rows, <= most] int32 or int64, those that count first, UNKNOWN behind them
        are_kept: [rows], False where the engine throws them away, since the prompt goes on; None: all are kept
        """
        n, width = tokens.shape
        self._sampled[:n, :width].copy_(tokens)
        self._sampled[:n, width:].fill_(UNKNOWN)
        if are_kept is not None:
            are_lost = self.canary.memory.upload(torch.from_numpy(are_kept.astype(np.int64))) == 0
            self._sampled[:n].masked_fill_(are_lost[:, None], UNKNOWN)
        self._launch_keep(at_least(n, FEWEST_ROWS, self.canary.num_rows))

    def prepare(self, forward: Forward) -> None:
        """Compile and capture what forwards of every size launch; `forward`: an empty one, over the same tensors."""
        rows = self.canary.num_rows
        for size in 2 * sorted({min(size, rows) for size in sizes(FEWEST_ROWS, rows)}):
            self._launch_compare(forward, size)
            self._launch_keep(size)

    def violations(self, step: Step) -> Iterator[Violation]:
        """W6 of each row that was fed another token than was sampled of it."""
        at_step, positions, fed, wanted = self._told[step.number % RING, :, : len(step.requests)].tolist()
        group = self.canary.groups[0]
        for row, request in enumerate(step.requests):
            if at_step[row] != step.number or wanted[row] in (UNKNOWN, fed[row]):
                continue
            line = self.canary.kept[group.number][int(step.numbers[row])]
            slot = int(table_slots(line[None], torch.tensor([[positions[row]]], device=line.device), group.block_size))
            pool = WatchedPool.of(group.layers[0].view, group.number, group.records)
            violation = Violation("W6", pool, slot, positions[row], request, step.site, step.number)
            violation.expected, violation.found = {"token": wanted[row]}, {"token": fed[row]}
            others = [name for name, own in zip(step.requests, wanted, strict=True) if own == fed[row]]
            violation.notes = (FIRST_ENTRY, *(f"that token was sampled of {name!r}" for name in others[:1]))
            violation.along = group.number, step.number
            yield violation

    def _launch_compare(self, forward: Forward, size: int) -> None:
        own = forward.tokens, forward.starts, forward.lengths
        key = "fed", *(tensor.data_ptr() for tensor in own)
        self.canary.launches.beside(key, size, functools.partial(self._compare, *own))

    def _launch_keep(self, size: int) -> None:
        self.canary.launches.beside("sampled", size, self._keep)

    def _compare(self, tokens: Tensor, starts: Tensor, lengths: Tensor, now: Tensor, numbers: Tensor) -> None:
        n = len(numbers)
        own, is_live = self._rows(now, numbers)
        first, behind = starts[:n].long(), starts[1 : n + 1].long()
        fed, wanted = tokens[first.clamp(0, len(tokens) - 1)].long(), self._next[own]
        has = is_live & (behind > first)
        wrong = has & (wanted != UNKNOWN) & (wanted != fed)
        self.canary.memory.total.add_(wrong.sum())
        at_step = now[NOW_STEP.value].expand(n)
        told = torch.stack((at_step, lengths[:n].long() - (behind - first), fed, torch.where(has, wanted, UNKNOWN)))
        self._told[:, :, :n].index_copy_(0, now[NOW_PLACE.value][None], told[None])
        self._next.index_copy_(0, own, torch.where(has, UNKNOWN, wanted))

    def _keep(self, now: Tensor, numbers: Tensor) -> None:
        own, _ = self._rows(now, numbers)
        tokens = self._sampled[: len(numbers)]
        count = (tokens != UNKNOWN).sum(1)
        last = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self._next.index_copy_(0, own, torch.where(count > 0, last, UNKNOWN))

    def _rows(self, now: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Where each row stands in `_next`, and whether it is one; padding stands at the end."""
        is_live = torch.arange(len(numbers), device=numbers.device) < now[NOW_ROWS.value]
        return torch.where(is_live, numbers, self.canary.num_rows), is_live
