"""CapturedMove: a declared move inside a captured step; records follow bytes between slots known to the device."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcanary.calls.forward import Ints
from kvcanary.captured.kernel_launches import Shared
from kvcanary.native.layout import MOVE, filled
from kvcanary.pools.launch_site import pack_site
from kvcanary.records.dispatch import ops_for
from kvcanary.records.mailbox import NUM_MESSAGES, Message, Packed
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import TOKEN_POSITION

NOWHERE = -1
DESTINATIONS, SOURCES, TOKENS, MISMATCH = range(4)  # of what `CapturedMove.moved` tells


class CapturedMove:
    """At most ``size`` entries of one pool, made by `SubstepRegistry.add_move`. No hook allocates or waits for it.

    src, dst: [size] int64, what moved in the last run; NOWHERE (-1): nothing
    structs:    by line, MOVE (native/layout.py): what is known before a launch
    num_places: where entries may lie, before and behind
    moved:    what the host learns of a run: dst, src, the first column of the records there, and [size, 2] bitmaps of
              the layers whose bytes at dst are not those that were written at src (T1)
    """

    def __init__(self, shared: Shared, pool: PoolState, size: int, compares_content: bool) -> None:
        """`compares_content`: what arrived is read again; else no layer differs."""
        self.pool, self.size, self._shared, self._ops = pool, size, shared, ops_for(pool.records.device)
        self._compares_content = compares_content
        layers, device = pool.view.num_layers, pool.records.device
        with torch.inference_mode(False):
            self.src, self.dst = (torch.full((size,), NOWHERE, dtype=torch.int64, device=device) for _ in range(2))
            self._pages, self._generations, self._owners = (torch.zeros_like(self.src) for _ in range(3))
            self._arrived = torch.full_like(self.dst, NOWHERE)
            self._nowhere = self.src.new_full((1,), NOWHERE)
            columns = pool.records.shape[1]
            scratch = (
                torch.zeros(size, width, dtype=torch.int64, device=device) for width in (columns + layers, columns)
            )
            both = (pool.records, pool.content_a), (pool.expected, pool.content_a[:0])
            self._copies = [(*copy, own) for copy, own in zip(both, scratch, strict=True)]
            self._site = torch.tensor([pack_site("move", 0)], device=device)
            self._tokens = torch.zeros_like(self.dst)
            self._mismatch = self.dst.new_zeros(size, 2)
            self.moved = Packed((self.dst, self.src, self._tokens, self._mismatch), shared.step, self._ops.post)
        lines = map(self.moved.message_of, range(NUM_MESSAGES))
        self.num_places = 2 * size
        self.structs = [filled(MOVE, pool=pool.struct_at, message=message.at, count=size) for message in lines]

    def record(self, source: Tensor, destination: Tensor, moves: Tensor) -> None:
        """Behind the move of the bytes: ``source, destination [size] int64`` slots, where ``moves [size] bool``.

        Every source was read before any destination was written; destinations are distinct. It runs beside: behind the
        forwards that have judged and sealed these records, and before any that reads them.
        """
        with self._shared.side_stream.behind():
            state, pool, places = self._shared.state, self.pool, self._pages
            # kernels alone: a copy would have no priority, and wait for all blocks of the forward beside it
            torch.where(moves, source, self._nowhere, out=self.src)
            torch.where(moves, destination, self._nowhere, out=self.dst)
            torch.clamp(self.dst, 0, pool.view.num_slots - 1, out=places)
            torch.floor_divide(places, state.page_size, out=places)
            torch.index_select(state.generations, 0, places, out=self._generations)
            torch.index_select(state.owners, 0, places, out=self._owners)
            grants = {"generations": self._generations, "requests": self._owners, "page_size": state.page_size}
            seals = {"step": self._shared.step, "sites": self._site, "pool_id": pool.pool_id, "keys": pool.keys}
            own = grants | seals | {"page_generations": state.generations, "arrived": self._arrived}
            for records, content, scratch in self._copies:
                self._ops.move(records, content, self.src, self.dst, scratch=scratch, **own)
            torch.clamp(self.dst, min=0, out=places)
            torch.index_select(pool.expected[:, TOKEN_POSITION], 0, places, out=self._tokens)
            if self._compares_content:
                self._mismatch.zero_()
                self._ops.check_content(pool.rows, self._arrived, pool.keys, pool.content_a, mismatch=self._mismatch)
            self.moved.pack()


class LaunchedMove(NamedTuple):
    """A move that the host has launched in this turn.

    record: where the listener keeps its `places`; None: nowhere
    """

    move: CapturedMove
    turn: int
    record: Any = None

    @property
    def message(self) -> Message:
        """What `CapturedMove.moved` says of it."""
        return self.move.moved.message_of(self.turn)

    @property
    def has_run(self) -> bool:
        """Else its line is that of a run before."""
        return self.move.moved.has_run(self.turn)

    @property
    def entries(self) -> Ints:
        """[3, n]: slots where entries have arrived, where they lay, and the first column of their records."""
        entries = np.stack([self.message[part] for part in (DESTINATIONS, SOURCES, TOKENS)])
        return entries[:, (entries[DESTINATIONS] >= 0) & self.has_run]

    @property
    def places(self) -> array[int]:
        """[2 * n]: where entries have arrived, then where they lay, and NOWHERE where nothing has moved; a copy."""
        return array("q", self.message.numbers[: self.move.num_places if self.has_run else 0].tobytes())

    @property
    def differs(self) -> bool:
        """Whether bytes are not where they arrived."""
        return self.has_run and bool(self.message[MISMATCH].any())
