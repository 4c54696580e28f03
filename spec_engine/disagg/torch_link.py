"""TorchLink: the three verbs over torch.distributed (gloo), where NIXL is not installed. Two processes make a group.

Gloo has no one-sided reads: a thread of the side that exposes answers. A group of which a member has died is dead, and
so is one in which a wait has timed out: what is fetched from it fails from then on, until somebody connects again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from spec_engine.disagg.errors import FAILED, TransferError
from spec_engine.disagg.link import Piece

FETCH, TELL = 1, 2
FOREVER = timedelta(days=365)
READER, OWNER = 0, 1  # ranks of a group


class TorchLink:
    """Groups of two: this side reads in those that it made, and answers in those that others made with its store."""

    name = "torch"

    def __init__(self, host: str, seconds: float) -> None:
        """host: under which peers reach this machine;  seconds: that a peer or one piece is waited for"""
        self._host, self._timeout = host, timedelta(seconds=seconds)
        self._parts: list[Tensor] = []
        self._store: TCPStore | None = None
        self._groups: dict[str, _Reader] = {}
        self._num_peers = 0
        self._heard: SimpleQueue[bytes] = SimpleQueue()

    def expose(self, parts: Sequence[Tensor]) -> bytes:
        """Contiguous tensors on the CPU."""
        self._parts = [_bytes_of(part) for part in parts]
        store = self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=FOREVER)
        threading.Thread(target=self._accept, args=(store,), name="kv link", daemon=True).start()
        return json.dumps([self._host, store.port]).encode()

    def connect(self, address: bytes) -> str:
        """A group is made in a thread, before the first bytes are fetched: who is not there lets that fetch fail."""
        host, port = json.loads(address)
        self._num_peers += 1
        peer = f"{host}:{port}#{self._num_peers}"
        self._groups[peer] = _Reader(host, port, self._timeout)
        return peer

    def fetch(self, peer: str, there: Sequence[Piece], here: Sequence[Piece]) -> _Fetch:
        return self._groups[peer].fetch(there, [_piece(self._parts, piece) for piece in here])

    def notify(self, peer: str, message: bytes) -> None:
        self._groups[peer].notify(message)

    def heard(self) -> list[bytes]:
        messages = []
        with suppress(Empty):
            while True:
                messages.append(self._heard.get_nowait())
        return messages

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    # threads of the side that exposes

    def _accept(self, store: TCPStore) -> None:
        number = 0
        with suppress(RuntimeError):  # the store has gone
            while True:
                number += 1
                store.wait([f"reader {number}"], FOREVER)
                threading.Thread(target=self._answer, args=(store.port, number), name="kv link", daemon=True).start()

    def _answer(self, port: int, number: int) -> None:
        with suppress(RuntimeError):  # whoever reads has gone
            group = _group(_client(self._host, port, self._timeout), number, OWNER, FOREVER)
            while True:
                what, count = _receive(group, 2)
                asked = _receive(group, count)
                if what == TELL:
                    self._heard.put(bytes(asked))
                    continue
                for first in range(0, count, len(Piece._fields)):
                    piece = _piece(self._parts, Piece(*asked[first : first + len(Piece._fields)]))
                    group.send([piece], READER, 0).wait()


class _Reader:
    """One group, whose requests are sent one after the other."""

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        self._host, self._port, self._timeout = host, port, timeout
        self._thread = ThreadPoolExecutor(1, "kv link")
        self._made = self._thread.submit(self._make)

    def _make(self) -> ProcessGroupGloo:
        store = _client(self._host, self._port, self._timeout)
        number = store.add("readers", 1)
        store.set(f"reader {number}", b"comes")
        return _group(store, number, READER, self._timeout)

    def fetch(self, there: Sequence[Piece], here: Sequence[Tensor]) -> _Fetch:
        return _Fetch(self._thread.submit(self._fetch, there, here))

    def notify(self, message: bytes) -> None:
        self._thread.submit(self._ask, TELL, list(message))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, there: Sequence[Piece], here: Sequence[Tensor]) -> None:
        self._ask(FETCH, [number for piece in there for number in piece])
        for piece in here:
            self._made.result().recv([piece], OWNER, 0).wait(self._timeout)

    def _ask(self, what: int, numbers: list[int]) -> None:
        for sent in ([what, len(numbers)], numbers):
            self._made.result().send([torch.tensor(sent, dtype=torch.int64)], OWNER, 0).wait(self._timeout)


class _Fetch:
    """A `Transfer` in a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def is_over(self) -> bool:
        return self._future.done()

    @property
    def error(self) -> str:
        failure = self._future.exception()
        return "" if failure is None else f"{type(failure).__name__}: {failure}"


def _client(host: str, port: int, timeout: timedelta) -> TCPStore:
    """One a group: who waits by a store lets nobody else ask by it."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _group(store: TCPStore, number: int, rank: int, timeout: timedelta) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore(f"group {number}", store), rank, 2, timeout)


def _receive(group: ProcessGroupGloo, count: int) -> list[int]:
    numbers = torch.zeros(count, dtype=torch.int64)
    group.recv([numbers], READER, 0).wait(FOREVER)
    answer: list[int] = numbers.tolist()
    return answer


def _bytes_of(part: Tensor) -> Tensor:
    return part.view(-1).view(torch.uint8)


def _piece(parts: Sequence[Tensor], piece: Piece) -> Tensor:
    """TransferError for bytes that were not exposed."""
    if not (0 <= piece.part < len(parts) and 0 <= piece.first <= piece.first + piece.count <= len(parts[piece.part])):
        raise TransferError(FAILED, f"{piece} is no piece of what is exposed")
    return parts[piece.part][piece.first : piece.first + piece.count]
