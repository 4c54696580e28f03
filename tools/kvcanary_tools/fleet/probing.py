"""A probe of a suspected GPU: its memory filled with known words, its kernels run on known inputs, again and again.

Everything is integers or the same kernel on the same bits: each answer has one right value, known from the host or from
the first round, and none is judged by a tolerance.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcanary import hardware_of
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.content.store import store
from kvcanary_kernels.engine.attention.paged import paged_attention
from kvcanary_kernels.record.layout import make_keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows

SLOTS, HEADS, DIM = 4096, 4, 64  # of a block of memory: 8 MiB
BLOCK_BYTES = 2 * SLOTS * HEADS * DIM * 4
ROWS, KEYS_A_ROW = 8, 256  # of attention
SEED = 0x5EED
MOST_FAULTS = 64
#: Multiplier of a word's number in the pattern, odd so that all are different (Knuth's golden ratio for 32 bits).
STRIDE = 2654435761


@dataclass
class Probed:
    """What a probe did. `faults`: wrong answers; `answers`: by kernel a digest, equal on devices of one kind."""

    hardware: dict[str, Any]
    device: str
    bytes: int
    rounds: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)

    def wrong(self, what: str, **where: Any) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append({"what": what, "round": self.rounds, **where})


class Probe:
    """Blocks of one device's memory, and the kernels that go over them."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """num_bytes: at least one block, of 8 MiB, is taken. torch.OutOfMemoryError where that is not to be had."""
        self._launches = device.type == "cuda"
        self._blocks = [
            torch.empty(2, SLOTS, HEADS, DIM, dtype=torch.float32, device=device)
            for _ in range(max(1, num_bytes // BLOCK_BYTES))
        ]
        self._rows = [pool_rows([block[0]], [block[1]]) for block in self._blocks]
        self._keys = make_keys(SEED, 1, self._rows[0].words_per_row, device)
        self._host = make_keys(SEED, 1, self._rows[0].words_per_row)
        self._slots = torch.arange(SLOTS, device=device)
        self.probed = Probed(hardware_of(device), _name(device), len(self._blocks) * BLOCK_BYTES)

    def round(self) -> None:
        """Fill, read, store, move and read again, then attention. Every other round has the complement of the words."""
        own = self.probed
        words, right = pattern(own.rounds), self._right(pattern(own.rounds))
        words = words.to(self._slots.device)
        for block in self._blocks:
            block.view(torch.int32).copy_(words)
        for number, rows in enumerate(self._rows):
            self._compare("fill", number, rows, right)
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(own.rounds)).to(self._slots.device)
        for number, rows in enumerate(self._rows):
            self._store(rows, words, order)
            self._compare("store", number, rows, right[order.argsort()])
            self._move(number, order)
            self._compare("move", number, rows, right)
        self._attend()
        own.rounds += 1

    def again(self) -> None:
        """What the last round left is read once more: memory that loses bits at rest has had until now."""
        right = self._right(pattern(self.probed.rounds - 1))
        for number, rows in enumerate(self._rows):
            self._compare("rest", number, rows, right)

    def _right(self, words: Tensor) -> Tensor:
        """Fingerprints of a block as the host computes them."""
        values = words.view(torch.float32)
        rows, slots = pool_rows([values[0]], [values[1]]), torch.arange(SLOTS)
        told = torch.empty(1, SLOTS, dtype=torch.int64)
        fingerprint(rows, slots, self._host, fingerprint_a=told, launches=False)
        return told[0].to(self._slots.device)

    def _compare(self, what: str, number: int, rows: PoolRows, right: Tensor) -> None:
        found = torch.empty(1, SLOTS, dtype=torch.int64, device=self._slots.device)
        fingerprint(rows, self._slots, self._keys, fingerprint_a=found, launches=self._launches)
        for slot in (found[0] != right).nonzero().flatten().tolist():
            place = self._blocks[number][0, slot]
            self.probed.wrong(what, block=number, slot=slot, address=f"0x{place.data_ptr():016x}")

    def _store(self, rows: PoolRows, words: Tensor, slots: Tensor) -> None:
        """Slot order[i] takes what slot i has had, by the kernel that an engine stores with."""
        k, v = words.view(torch.float32)
        kept = torch.empty(1, SLOTS, rows.words_per_row, dtype=torch.int32, device=slots.device)
        times = torch.zeros(1, SLOTS, dtype=torch.int64, device=slots.device)
        store(rows, 0, slots, k, v, kept=kept, times=times, launches=self._launches)

    def _move(self, number: int, order: Tensor) -> None:
        """Back to where they were."""
        block = self._blocks[number]
        block.copy_(block.index_select(1, order))

    def _attend(self) -> None:
        """Attention over known values: bit for bit what the first round gave."""
        device, generator = self._slots.device, torch.Generator().manual_seed(SEED)
        q = torch.randn(ROWS, HEADS, DIM, generator=generator).to(device)
        k, v = torch.randn(2, ROWS * KEYS_A_ROW, HEADS, DIM, generator=generator).to(device)
        out, rows = torch.empty_like(q), torch.arange(ROWS + 1, device=device)
        paged_attention(
            q, k, v, kv_indptr=rows * KEYS_A_ROW, kv_indices=torch.arange(len(k), device=device), q_indptr=rows,
            max_kv_len=KEYS_A_ROW, max_q_len=1, scale=DIM**-0.5, out=out, launches=self._launches,
        )  # fmt: skip
        digest = hashlib.blake2b(out.cpu().numpy().tobytes(), digest_size=16).hexdigest()
        if self.probed.answers.setdefault("attention", digest) != digest:
            self.probed.wrong("attention", digest=digest)


def probe(device: torch.device, num_bytes: int, seconds: float) -> Iterator[Probed]:
    """Rounds for that long, two at least; what is known after each."""
    own, end = Probe(device, num_bytes), time.monotonic() + seconds
    while own.probed.rounds < 2 or time.monotonic() < end:
        own.round()
        own.again()
        yield own.probed


def differences(here: Probed, there: dict[str, Any]) -> list[str]:
    """Kernels whose answers differ from another device's of the same kind. ValueError where it is of another kind."""
    if there["device"] != here.device:
        raise ValueError(f"answers of {there['device']} say nothing of {here.device}: compare devices of one kind")
    return [name for name, digest in here.answers.items() if there["answers"].get(name) != digest]


def pattern(number: int) -> Tensor:
    """[2, slots, heads, dim] int32 on the host: all words different; of odd rounds the complement of the one before."""
    words = torch.arange(BLOCK_BYTES // 4, dtype=torch.int64) * STRIDE + number // 2 * SEED
    words = ((words + 2**31) % 2**32 - 2**31).to(torch.int32)
    return (~words if number % 2 else words).view(2, SLOTS, HEADS, DIM)


def _name(device: torch.device) -> str:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{kind}, torch {torch.__version__}"
