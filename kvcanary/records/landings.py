"""Landings: where a load of known bytes comes together on the device, and what is launched for it, captured once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.graph_cache import Replays
from kvcanary.records.state import PoolState
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.record.layout import COLUMNS
from kvcanary_kernels.record.streams import current

Numbers = NDArray[np.int64]
LEAST_ROOM, MOST_ROOM = 64, 8192  # slots; the launches of a longer load are little beside it
KEPT = 2  # of each size, for loads that are under way at once


class Landing:
    """Slots of one pool with their records and fingerprints of then; read, and then written, in two launches.

    There is room for some more: the last slot comes again, with the same numbers.

    where:   [room] int64 on the device
    found_a: [layers, room] int64 on the device, what lies there, once it was read
    """

    def __init__(self, pool: PoolState, room: int, replays: Replays | None = None) -> None:
        device, layers = pool.records.device, pool.view.num_layers
        self._pool, self._replays, self._is_cuda = pool, replays, device.type == "cuda"
        with torch.inference_mode(False):
            host = torch.empty(1 + COLUMNS + layers, room, dtype=torch.int64, pin_memory=self._is_cuda)
            there = torch.empty_like(host, device=device) if self._is_cuda else host
            self._flag = torch.zeros(1, dtype=torch.bool, pin_memory=self._is_cuda)
            self.found_a = torch.empty(layers, room, dtype=torch.int64, device=device)
        self._host, self._there, self._numbers, self._differs = host, there, host.numpy(), self._flag.numpy()
        self.where, self._records, self._sent_a = there[0], there[1 : 1 + COLUMNS].t(), there[1 + COLUMNS :]
        self._over = torch.cuda.Event() if self._is_cuda else None
        self.user: weakref.ref[Any] | None = None

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None

    def fill(self, slots: Numbers, records: Numbers, fingerprint_a: Numbers) -> None:
        """[n], [n, 8] and [layers, n], with n at most the room."""
        self._wait()  # for a copy of numbers that nobody has read
        n, numbers = len(slots), self._numbers
        parts = (numbers[0], slots), (numbers[1 : 1 + COLUMNS], records.T), (numbers[1 + COLUMNS :], fingerprint_a)
        for own, values in parts:
            own[..., :n], own[..., n:] = values, values[..., -1:]
        if self._there is not self._host:
            self._there.copy_(self._host, non_blocking=True)
        self._mark()

    def read(self) -> None:
        """Begin to compare what lies there now; nobody waits for it yet."""
        self._run("read", self._read)
        self._mark()

    def is_right(self) -> bool:
        """What was read is what was sent. Waits for the device."""
        self._wait()
        return not self._differs[0]

    def write(self) -> None:
        """Both copies of the records, and fingerprint a; in host memory the records are where they belong."""
        self._run("write", self._write)

    def _read(self) -> None:
        if self._pool.host is None:
            fingerprint(self._pool.rows, self.where, self._pool.keys, fingerprint_a=self.found_a)
        else:
            self.found_a, _ = fingerprints_of_slots(self._pool, self.where)
        self._flag.copy_((self.found_a != self._sent_a).any().view(1), non_blocking=True)

    def _write(self) -> None:
        pool, where = self._pool, self.where
        pool.content_a.index_copy_(1, where, self._sent_a)
        for records in (pool.records, pool.expected) if self._is_cuda else ():
            records.index_copy_(0, where, self._records)

    def _run(self, what: str, launch: Callable[[], None]) -> None:
        if self._replays is None:
            launch()
        else:
            self._replays.run((self, what), launch)

    def _mark(self) -> None:
        if self._over is not None:
            self._over.record(current(self._there.device))

    def _wait(self) -> None:
        if self._over is not None:
            self._over.synchronize()


class Landings:
    """Those that are kept, by pool and room; a load that finds none has one for itself."""

    def __init__(self, device: torch.device) -> None:
        self._replays = Replays(device) if device.type == "cuda" else None
        self._kept: dict[tuple[int, int], list[Landing]] = {}

    def take(self, pool: PoolState, n: int, user: object) -> Landing:
        """For n slots, until `user` is gone."""
        room = max(LEAST_ROOM, 1 << (n - 1).bit_length())
        if self._replays is None or room > MOST_ROOM:
            return Landing(pool, n)
        kept = self._kept.setdefault((pool.pool_id, room), [])
        if len(kept) < KEPT:
            kept.append(Landing(pool, room, self._replays))
        landing = next((one for one in reversed(kept) if one.is_free), None) or Landing(pool, n)
        landing.user = weakref.ref(user)
        return landing
