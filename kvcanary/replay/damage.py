"""Damager: what a check found of bytes and records in a recording, brought about in a replay; no event explains it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvcanary.codes import UNWRITTEN
from kvcanary.dumps.reading import Call
from kvcanary.recorder.recorder import PUBLIC_WORDS
from kvcanary.records.state import PoolState
from kvcanary.replay.stage import Stage, fingerprint_of
from kvcanary_kernels.record.layout import SEAL


class Damager:
    """Damages the pools and records of a stage, each place once."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def bring_about(self, event: Call) -> None:
        """What a check found while this event ran, just before it does."""
        for damage in event.get("damage", ()):
            pool, slot = self._stage.pool(damage["pool"]), damage["slot"]
            if damage["words"] or damage["code"] == "R3":
                self._damage_record(pool, damage)
                continue
            page = slot // self._stage.manager_state.state.page_size
            poisoner = self._stage.manager_state.poisoner_of(pool)
            if damage["code"] == "P1" and page in poisoner.waiting:
                poisoner.fill([page])
            if damage["code"] == UNWRITTEN:
                _fill_with_nan(pool, damage["layers"], slot)
                continue
            for layer in damage["layers"]:
                if self._is_new(pool, slot, layer):
                    _flip(pool, layer, slot, damage.get("word") if self._stage.is_exact else None)

    def _is_new(self, pool: PoolState, slot: int, layer: int) -> bool:
        """Whether nobody has damaged this place before: several rows may have seen the same."""
        before = len(self._stage.damaged)
        self._stage.damaged.add((pool.name, slot, layer))
        return len(self._stage.damaged) > before

    def _damage_record(self, pool: PoolState, damage: dict[str, Any]) -> None:
        slot, words = damage["slot"], damage["words"]
        if damage["fingerprint"]:
            for layer in damage["layers"]:
                if self._is_new(pool, slot, fingerprint_of(layer)):
                    pool.content_a[layer, slot] ^= 1
        elif damage["halves"]:
            found, expected = (rows[slot].numpy().view(np.uint32) for rows in (pool.records, pool.expected))
            public = dict(zip(PUBLIC_WORDS, words, strict=True)) if words else {}
            for half in range(len(found)):
                if damage["halves"] >> half & 1 and found[half] == expected[half]:
                    found[half] = public.get(half, int(found[half]) ^ 1)
        elif words:  # whole in itself: somebody has written it with the canary's keys
            record_store, row = self._stage.manager_state.checks.record_store, pool.base + slot
            record = record_store.table[[row]]
            record.view(np.uint32)[0, list(PUBLIC_WORDS)] = words
            record[0, SEAL] = pool.seal_term
            record_store.write(np.array([row]), record)


def _fill_with_nan(pool: PoolState, layers: list[int], slot: int) -> None:
    """What nobody has written is not finite."""
    for part in pool.view.parts:
        if part.dtype.is_floating_point:
            for layer in layers:
                part.tensors[layer][slot] = float("nan")


def _flip(pool: PoolState, layer: int, slot: int, word: list[Any] | None) -> None:
    """The word of a row that changed, or several where not one alone did."""
    if word is None:
        for part in pool.view.parts:
            row = part.tensors[layer][slot].reshape(-1).view(torch.uint8)
            row[0] ^= 1
            row[-1] ^= 2
        return
    name, head, dim, byte, bit = word
    part = next(part for part in pool.view.parts if part.name == name)
    row = part.tensors[layer][slot].reshape(-1).view(torch.uint8)
    number = (head * part.dim + dim) * part.element_size
    if bit is None:
        row[number + byte] ^= 3  # more than one bit of this byte
    else:
        row[number + bit // 8] ^= 1 << bit % 8
