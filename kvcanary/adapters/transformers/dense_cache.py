"""Dense caches: what every entry of every layer should hold, while its bytes lie in tensors that come and go.

A dense cache is one tensor a layer for K and one for V, [batch, heads, length, dim]. It has no slots and no pages, and
most of its tensors are new after every step: so an entry is named by layer, row and position (its index in the row,
padding counted), its fingerprints are kept here, and its bytes are read in whatever tensor attention is given. A tensor
of n entries holds the last n positions of the row; a longer one has an unwritten tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcanary.adapters.transformers.judging import (
    NOT_KNOWN,
    DenseCanary,
    Reread,
    Site,
    dense_violation,
    judge_fed,
    judge_reread,
    judge_stored,
    judge_tokens,
    wrong_length,
)
from kvcanary.adapters.transformers.positions import Fed, RowPositions
from kvcanary.adapters.transformers.states import Place, StateRows
from kvcanary.calls.violation import Violation
from kvcanary.config import share_of
from kvcanary.pools.launch_site import pack_site
from kvcanary_kernels.record.layout import COLUMNS, STEP_SITE, TOKEN_POSITION

Said = Callable[[int], int]  # by layer, the length that it says it has
Held = Callable[[int], tuple[Tensor, Tensor]]  # by layer, K and V as they lie now


@dataclass
class DenseLayer:
    """What one layer should hold.

    fingerprints:  [2, batch, length] int64, both fingerprints
    seen:   [length] int64, step of the last good re-read
    first:  position of the first entry that attention was last given
    cursor: where the next slice of a rolling check begins
    """

    fingerprints: Tensor
    seen: Tensor
    first: int = 0
    cursor: int = 0
    # of which fingerprints and seen are the beginning, unless they were replaced
    _room: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return self.fingerprints.shape[2]

    def append(self, fingerprints: Tensor, step: int) -> None:
        """Entries follow, seen in this step; what lies there is copied only when there is no room left."""
        before, length = self.length, self.length + fingerprints.shape[2]
        room = self._room
        if room is None or room[0].data_ptr() != self.fingerprints.data_ptr() or room[1].shape[0] < length:
            room = self._room = (
                fingerprints.new_empty(2, fingerprints.shape[1], 2 * length),
                fingerprints.new_empty(2 * length),
            )
            room[0][:, :, :before], room[1][:before] = self.fingerprints, self.seen
        room[0][:, :, before:length], room[1][before:length] = fingerprints, step
        self.fingerprints, self.seen = room[0][:, :, :length], room[1][:length]


@dataclass
class DenseRows:
    """All layers of one cache.

    tokens: [batch, length] int64 on the host, NOT_KNOWN where nobody said; None before the first forward
    step:   forwards so far
    weights: number of the weights that wrote last; NOT_KNOWN before the first forward that was told of
    records: [positions, 8] int64 as record/layout.py has them: position, step and site of the forward that wrote it
    """

    canary: DenseCanary
    layers: dict[int, DenseLayer] = field(default_factory=dict)
    tokens: Tensor | None = None
    step: int = 0
    last_layer: int = -1
    pool_id: int = 0
    records: Tensor = field(default_factory=lambda: torch.zeros(0, COLUMNS, dtype=torch.int64))
    positions: RowPositions = field(default_factory=RowPositions)
    weights: int = NOT_KNOWN

    def __post_init__(self) -> None:
        self.pool_id = self.canary.new_pool()
        self._not_finite: set[str | None] = set()  # rows that are known to have stored NaN or Inf
        self.states = StateRows(self.canary)

    @property
    def length(self) -> int:
        """Entries that every row should have; without K and V, tokens that its states have absorbed."""
        return max((layer.length for layer in self.layers.values()), default=self.states.absorbed)

    def begin(self, states: dict[Place, Tensor], num_fed: int) -> None:
        """A forward begins: its states are those that the last one has left."""
        length = self.length if self.layers else None
        self._report(self.states.begun(states, length, _site(self.length, num_fed)))

    def left(self, states: dict[Place, Tensor]) -> None:
        """It has run, and `fed` was told."""
        if states and not self.layers:
            self.step += 1
            self.canary.coverage.forwards += 1
        self.states.keep(states, 0 if self.tokens is None else self.tokens.shape[1])

    def reordered(self, rows: Tensor, states: dict[Place, Tensor]) -> None:
        """States have moved with their rows (T1)."""
        self._report(self.states.selected(rows, states))

    @property
    def live_bytes(self) -> int:
        entries = sum(own.fingerprints.shape[1] * (own.length - own.first) for own in self.layers.values())
        return entries * self.canary.entry_bytes

    def length_of(self, layer: int) -> int:
        return self.layers[layer].length if layer in self.layers else 0

    @torch.no_grad()
    def adopt(self, layer: int, k: Tensor, v: Tensor, length: int) -> None:
        """Take the bytes of a layer for the truth as they lie: they were written when nobody looked."""
        count = min(k.shape[2], length)
        held = self.canary.fingerprints(layer, k[:, :, :count], v[:, :, :count])
        fingerprints = held.new_zeros(2, len(k), length)  # what a window has dropped is never read
        fingerprints[:, :, length - count :] = held
        self.layers[layer] = DenseLayer(fingerprints, torch.full((length,), self.step, device=fingerprints.device))
        self.canary.coverage.skip("entries taken as they lay", len(k) * count)

    @torch.no_grad()
    def stored(self, layer: int, new: tuple[Tensor, Tensor], read: tuple[Tensor, Tensor], said: int) -> None:
        """A layer was given `new` K and V, and gives attention `read` to read; `said`: its own length now.

        Raises KVCorruptionError in mode raise, as all that looks.
        """
        canary, (k, v) = self.canary, new
        if layer <= self.last_layer or not self.step:
            self.step += 1
            canary.coverage.forwards += 1
            self._seal(self.length_of(layer), k.shape[2])
        self.last_layer = layer
        before, (fingerprints, bad) = self.length_of(layer), canary.stored_fingerprints(layer, k, v)
        if layer not in self.layers:
            self.layers[layer] = DenseLayer(fingerprints[:, :, :0], fingerprints.new_empty(0))
        own = self.layers[layer]
        own.append(fingerprints, self.step)
        canary.coverage.slots_sealed += fingerprints.shape[1] * fingerprints.shape[2]
        site = _site(before, k.shape[2])
        if said != own.length:
            violation = wrong_length(layer, own.length, said, site)
            self.adopt(layer, *read, said)
            self._report([violation])
            return
        self._report(self._first_not_finite(judge_stored(bad, layer, k.shape[2], before, site)))
        first = own.length - min(read[0].shape[2], own.length)
        self._count_unread(own, first, before)
        canary.coverage.slots_checked += fingerprints.shape[1] * (own.length - first)
        looks = [Reread(layer, *read, first, *bounds, before, site) for bounds in self._planned(layer, first, before)]
        self._report([violation for reread in looks for violation in self._violations(reread)])

    def _first_not_finite(self, found: list[Violation]) -> list[Violation]:
        """Of a row the first alone: what it stores from then on follows from that."""
        new = [violation for violation in found if violation.request_id not in self._not_finite]
        self._not_finite |= {violation.request_id for violation in new}
        return new

    def cropped(self, count: int, said: Said, held: Held) -> None:
        """The last `count` entries are to be gone (R10)."""
        violations = []
        for layer, own in self.layers.items():
            length = max(own.length - count, 0)
            own.fingerprints, own.seen = own.fingerprints[:, :, :length], own.seen[:length]
            if said(layer) != length:
                violations.append(wrong_length(layer, length, said(layer), ("move", 0)))
                self.adopt(layer, *held(layer), said(layer))
        self._report(violations)
        self.positions.cropped(count, self.length)
        if self.tokens is not None and count:
            self.tokens = self.tokens[:, : max(self.tokens.shape[1] - count, 0)]

    def selected(self, rows: Tensor, held: Held) -> None:
        """Row i is what row `rows[i]` was; all bytes are read again at once (T1)."""
        for own in self.layers.values():
            own.fingerprints = own.fingerprints.index_select(1, rows.to(own.fingerprints.device))
        self.positions.selected(rows)
        if self.tokens is not None:
            self.tokens = self.tokens.index_select(0, rows.to(self.tokens.device))
        if self.canary.config.content != "write":
            self.reread_all(held, ("move", 0))

    @torch.no_grad()
    def reread_all(self, held: Held, site: Site) -> None:
        """Read every byte that lies in the cache now."""
        violations = []
        for layer, own in self.layers.items():
            if own.length:
                k, v = held(layer)
                first = own.length - min(k.shape[2], own.length)
                violations += self._violations(Reread(layer, k, v, first, first, own.length, own.length, site))
        self._report(violations)

    def forget(self) -> None:
        """The cache was emptied."""
        self.layers.clear()
        self.positions.forget()
        self.states.forget()
        self.tokens = None

    # what only the model's own inputs say

    def go_on(self, fed: Fed | None, count: int) -> None:
        """A forward is about to be fed `count` entries a row: W5 where a row does not go on where it ended."""
        before = self.length
        if fed is None:
            self.canary.coverage.skip("forwards whose positions are not followed", 1)
        site = _site(before, count)
        self._report(
            [
                dense_violation(
                    "W5", (), one.row, before + one.entry, site, ({"position": one.wanted}, {"position": one.found})
                )
                for one in self.positions.follow(fed)
            ]
        )

    def written_by(self, weights: int, count: int) -> None:
        """The model has these weights now, for a forward of `count` entries: R6 where others wrote what it reads."""
        before, self.weights = self.weights, weights
        if self.length and before not in (NOT_KNOWN, weights):
            sides = {"weights": weights}, {"weights": before}
            self._report([dense_violation("R6", (), 0, 0, _site(self.length, count), sides)])

    def expect(self, row_tokens: Tensor, num_fed: int) -> None:
        """`row_tokens` [batch, n]: the whole rows, of which the last `num_fed` are about to be fed (R10, R6); NOT_KNOWN
        where nobody says.
        """
        past = row_tokens.shape[1] - num_fed
        if self.states.is_trusted and not self.layers:  # nobody knows how many tokens they had absorbed
            self.states.absorbed, self.states.is_trusted = past, False
        known, wanted = self._known(self.length, len(row_tokens)), row_tokens[:, :past].cpu()
        violations = judge_tokens(known, wanted, _site(past, num_fed), self.canary.config.show_tokens)
        is_unknown = known == NOT_KNOWN
        if known.shape == wanted.shape:
            is_unknown |= wanted == NOT_KNOWN
        self.canary.coverage.skip("entries whose token nobody said", int(is_unknown.sum()))
        self._report(violations)

    def fed(self, tokens: Tensor, before: int, has_states: bool = False) -> None:
        """A forward was fed these tokens [batch, n], NOT_KNOWN where nobody says, when rows had `before` entries.

        `has_states`: the cache may have no K and V at all
        """
        length = before + tokens.shape[1]
        self.canary.coverage.peak_live_bytes = max(self.canary.coverage.peak_live_bytes, self.live_bytes)
        lengths = {layer: own.length for layer, own in self.layers.items()}
        if lengths or not has_states:
            self._report(judge_fed(lengths, length, _site(before, tokens.shape[1])))
        self.tokens = torch.cat((self._known(before, len(tokens)), tokens.cpu()), 1)

    # helpers

    def _report(self, violations: Sequence[Violation]) -> None:
        self.canary.report(violations, self.step, self.pool_id, self.records)

    def _seal(self, before: int, count: int) -> None:
        """This forward writes so many positions; the room for records doubles when it is full."""
        length = before + count
        if length > len(self.records):
            self.records = torch.cat((self.records, self.records.new_zeros(length, COLUMNS)))
        self.records[before:length, TOKEN_POSITION] = torch.arange(before, length) << 32
        self.records[before:length, STEP_SITE] = pack_site(*_site(before, count)) << 32 | self.step

    def _known(self, length: int, default_rows: int) -> Tensor:
        """Tokens of as many entries; NOT_KNOWN where the cache was filled, or cut to size, when nobody looked."""
        if self.tokens is not None and self.tokens.shape[1] == length:
            return self.tokens
        rows = next((own.fingerprints.shape[1] for own in self.layers.values()), default_rows)
        return torch.full((rows, length), NOT_KNOWN)

    def _planned(self, layer: int, first: int, before: int) -> Iterator[tuple[int, int]]:
        """Positions to look at: what was just stored, and all before it (`full`) or its next slice (`rolling`)."""
        content, own = self.canary.config.content, self.layers[layer]
        if content == "write":
            self.canary.coverage.unproved_stores += 1
            return
        if content == "full":
            yield first, own.length
            return
        start = own.cursor if first <= own.cursor < before else first
        end = min(start + self._share(before - first, own), before)
        own.cursor = end
        if start < end:
            yield start, end
        yield max(before, first), own.length

    def _count_unread(self, own: DenseLayer, first: int, before: int) -> None:
        """How long what attention is about to read was not looked at, and what a window dropped since the last
        re-read.
        """
        coverage = self.canary.coverage
        if first > own.first:
            dropped = int((own.seen[own.first : first] < self.step - 1).sum())
            coverage.freed_unread_bytes += dropped * own.fingerprints.shape[1] * self.canary.entry_bytes
        if first < before:
            coverage.max_unread_steps = max(coverage.max_unread_steps, self.step - int(own.seen[first:before].min()))
        own.first = first

    def _share(self, entries: int, own: DenseLayer) -> int:
        budget = self.canary.config.budget
        if budget is None:
            return share_of(entries, 1)
        return max(1, budget // (len(self.layers) * own.fingerprints.shape[1] * self.canary.entry_bytes))

    def _violations(self, reread: Reread) -> list[Violation]:
        own = self.layers[reread.layer]
        return judge_reread(self.canary, reread, own.fingerprints, own.seen, self.step)


def _site(before: int, num_new: int) -> Site:
    """What a forward is, by what it writes."""
    if not before:
        return "prefill", 0
    return ("decode" if num_new == 1 else "extend"), 0
