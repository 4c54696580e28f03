"""Bits that are flipped in the pools of a running vLLM, one after the other, and which findings are theirs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcanary_tools.bench.vllm.cpu import CpuFaults

SHOWN = ("code", "reader", "writer", "position", "page", "layer", "layers", "part", "head", "dim", "byte", "bit")


@dataclass
class Flip:
    """One flipped bit: steps are the canary's, `until` that in which the bit was put back.

    positions: that the block has in its requests
    element: of the block's, in the backend's own order; readers: requests that held the block meanwhile
    """

    step: int
    request: str
    block: int
    positions: range
    layer: int
    element: int
    bit: int
    readers: set[str] = field(default_factory=set)
    until: int | None = None
    found: dict[str, Any] | None = None
    found_step: int | None = None

    def caused(self, finding: Any) -> bool:
        """Whether this is what the canary must say of it, for the request or another reader of the block."""
        where = finding.code, finding.page, finding.layers, finding.reader in self.readers
        is_there = where == ("R9", self.block, (self.layer,), True) and finding.position in self.positions
        is_then = finding.step >= self.step and (self.until is None or finding.step <= self.until)
        return is_there and is_then and finding.bit in (self.bit, None)  # None: it was put back before it was described

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("step", "request", "block", "layer", "element", "bit", "found")}
        return own | {"steps_until_found": None if self.found_step is None else self.found_step - self.step}


class Flips:
    """Strikes whole blocks of running requests, so that every element is of an entry that somebody has."""

    def __init__(self, faults: CpuFaults, seed: int, block_size: int) -> None:
        self._faults, self._draw, self._size = faults, random.Random(seed), block_size
        self.struck: list[Flip] = []
        self._kept: Any = None  # the block as it was struck

    def strike(self, scheduled: Iterable[str], step: int) -> bool:
        """Flip a random bit of a random layer, in a random whole block; False where nobody of this step has one."""
        lengths = self._faults.runner.input_batch.num_computed_tokens_cpu
        rows = [(name, row, int(lengths[row]) // self._size) for name, row in self._rows() if name in scheduled]
        rows = [own for own in rows if own[2]]
        if not rows:
            return False
        name, row, whole = self._draw.choice(rows)
        place, layer = self._draw.randrange(whole), self._draw.randrange(len(self._faults.caches()))
        positions = range(place * self._size, (place + 1) * self._size)
        block, bit = int(self._faults.table()[row, place]), self._draw.randrange(16)
        flip = Flip(step, name, block, positions, layer, 0, bit)
        words = self._words(flip)
        flip.element = self._draw.randrange(len(words))
        self._flip(words, flip)
        self._kept = words.clone()
        self.struck.append(flip)
        self.watch()
        return True

    def watch(self) -> None:
        """Note who holds the block that was struck."""
        if self.struck and self.struck[-1].until is None:
            flip, table = self.struck[-1], self._faults.table()
            flip.readers |= {
                name for name, row in self._rows() if table[row, flip.positions.start // self._size] == flip.block
            }

    def take(self, finding: Any) -> bool:
        """Whether a finding is that of a flip; the first one is kept."""
        flip = next((own for own in self.struck if own.caused(finding)), None)
        if flip is None:
            return False
        if flip.found is None:
            flip.found, flip.found_step = {name: getattr(finding, name) for name in SHOWN}, finding.step
        return True

    def put_back(self, step: int) -> None:
        """The bit as it was, unless the block has been written anew: what is found later has another cause."""
        flip = self.struck[-1]
        words = self._words(flip)
        if words.equal(self._kept):
            self._flip(words, flip)
        flip.until = step

    def _rows(self) -> list[tuple[str, int]]:
        return list(self._faults.runner.input_batch.req_id_to_index.items())

    def _words(self, flip: Flip) -> Any:
        import torch

        return self._faults.caches()[flip.layer].view(torch.int16)[flip.block].view(-1)

    @staticmethod
    def _flip(words: Any, flip: Flip) -> None:
        words[flip.element] ^= (1 << flip.bit) - (1 << 16) * (flip.bit == 15)  # int16
