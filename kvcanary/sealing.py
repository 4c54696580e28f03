"""Sealing: a record for everything that the pending forwards have written, each chained to what it continues."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcanary.entries import fired_writes
from kvcanary.forward import Forward
from kvcanary.intake import HitBatch
from kvcanary.ledger import Ledger
from kvcanary.mirror import Mirror, Rows, Words, no_records, two_words
from kvcanary.sites import pack_site
from kvcanary_kernels.record import (
    CHAIN,
    CONTENT_B,
    REQUEST_GENERATION,
    STEP_SITE,
    TOKEN_POSITION,
    bitmap_columns,
    chain_of,
    continue_chain,
    mix_host,
)


class Sealer:
    """All entries of a step in a few numpy operations; only the chain goes forward by forward."""

    def __init__(self, mirror: Mirror, ledger: Ledger) -> None:
        self._mirror, self._ledger = mirror, ledger
        self.pages: NDArray[np.int64] = np.empty(0, np.int64)  # that the last `seal` wrote to

    def seal(self, forwards: Sequence[Forward]) -> list[HitBatch]:
        """Seal all entries in the order of their run; W5 where a position does not follow the parent's."""
        entries = [len(forward.write_slots) for forward in forwards]
        per_row = np.array([count for forward in forwards for count in forward.written], np.int64)
        slots = np.concatenate([forward.planned.slots for forward in forwards])
        rows = slots + np.repeat([forward.pool.base for forward in forwards], entries)
        tokens = np.concatenate([forward.planned.tokens for forward in forwards]).view(np.uint64)
        positions = np.concatenate([forward.planned.positions for forward in forwards])
        mixed = mix_host(tokens, positions.view(np.uint64), forwards[0].pool.keys)

        records = no_records(len(slots))
        records[:, TOKEN_POSITION] = two_words(tokens, positions.view(np.uint64))
        self.pages = np.concatenate([forward.slot_names for forward in forwards]) // self._ledger.page_size
        generations = self._ledger.generations[self.pages].view(np.uint64)
        records[:, REQUEST_GENERATION] = two_words(np.repeat(_uids(forwards), per_row), generations)
        records[:, STEP_SITE] = np.repeat(_sites(forwards), per_row)
        records[:, CONTENT_B:] = np.repeat(_tails(forwards), entries, axis=0)

        place = np.arange(len(slots)) - np.repeat(per_row.cumsum() - per_row, per_row)  # in the own part of its row
        begins = np.array([begin for forward in forwards for begin in forward.begins], np.int64)
        wanted = np.repeat(begins, per_row) + place
        first = 0
        for forward, count in zip(forwards, entries, strict=True):
            part = slice(first, first + count)
            self._chain(forward, rows[part], mixed[part], records[part], place[part], wanted[part])
            first += count
        live = slots >= np.repeat([forward.pool.view.null_slots for forward in forwards], entries)
        if live.all():
            self._mirror.write(rows, records)
        else:  # padding, and refused entries
            self._mirror.table[rows[~live], CHAIN] = 0  # null slots have no records
            self._mirror.write(rows[live], records[live])
        return _misplaced(forwards, positions, wanted) if (positions != wanted).any() else []

    def _chain(
        self, forward: Forward, rows: Rows, mixed: Words, records: Words, place: NDArray[np.int64], wanted: Rows
    ) -> None:
        """Chains, and what depends on the tree, of one forward's entries; the mirror knows their chains at once."""
        above = self._above(forward)
        if forward.parents is None:
            chains = _row_chains(forward, above, mixed)
        else:
            chains = _tree_chains(forward, above, mixed)
            parents = np.array(forward.parents, np.int64)
            wanted[:] = np.where(parents < 0, wanted - place, forward.planned.positions[parents] + 1)
            records[:, STEP_SITE] += place.view(np.uint64) << 48
        records[:, CHAIN] = chains
        self._mirror.table[rows, CHAIN] = chains

    def _above(self, forward: Forward) -> Words:
        """[rows] chain that each row's first own entry continues: of the last entry that the row reads before it."""
        pool_id, width = forward.pool.pool_id, forward.width
        roots = np.array([r.root(pool_id) for r in forward.requests for _ in range(width)], np.uint64)
        if not len(forward.ids):
            return roots
        owns = np.array(forward.owns)
        reads_none = owns == np.array(forward.bounds[:-1])
        if reads_none.any() and any(forward.starts):
            self._continue_tokens(forward, roots, np.flatnonzero(reads_none).tolist())
        chains = self._mirror.table[forward.ids[owns - 1] + forward.pool.base, CHAIN]  # of row 0's none, any
        return np.where(reads_none, roots, chains)

    def _continue_tokens(self, forward: Forward, roots: Words, rows: Sequence[int]) -> None:
        """Rows of a window that shows nothing before their own entries continue what the host knows."""
        for row in rows:
            truth = self._ledger.truth(forward.request_of(row), forward.pool.pool_id, forward.begins[row])
            roots[row] = 0 if truth is None else truth


def _row_chains(forward: Forward, above: Words, mixed: Words) -> Words | list[int]:
    keys = forward.pool.keys
    if len(mixed) == len(above) and max(forward.written, default=1) == 1:
        return continue_chain(above, mixed, keys)
    chains: list[int] = []
    first, values = 0, mixed.tolist()
    for value, count in zip(above.tolist(), forward.written, strict=True):
        chains += chain_of(values[first : first + count], value, keys)
        first += count
    return chains


def _tree_chains(forward: Forward, above: Words, mixed: Words) -> list[int]:
    """Nodes come after their parents."""
    chains: list[int] = []
    keys, parents, values, first = forward.pool.keys, forward.parents or (), mixed.tolist(), 0
    for value, count in zip(above.tolist(), forward.written, strict=True):
        for entry in range(first, first + count):
            parent = parents[entry]
            chains.append(continue_chain(value if parent < 0 else chains[parent], values[entry], keys))
        first += count
    return chains


def _uids(forwards: Sequence[Forward]) -> Words:
    """[rows] request of each row."""
    return np.array([r.uid for forward in forwards for r in forward.requests for _ in range(forward.width)], np.uint64)


def _sites(forwards: Sequence[Forward]) -> Words:
    """[rows] step and site of each row; rows of one request are its branches. Nodes of a tree are numbered later."""
    return np.array(
        [
            two_words(forward.step, pack_site(forward.kind, forward.index, branch))
            for forward in forwards
            for _ in forward.requests
            for branch in range(forward.width)
        ],
        np.uint64,
    )


def _tails(forwards: Sequence[Forward]) -> Words:
    """[forwards, 4] what follows the identity: no content_b yet, the layers, and the pool's part of the seal."""
    return np.array([[0, *bitmap_columns(forward.stored), forward.pool.seal_term] for forward in forwards], np.uint64)


def _misplaced(forwards: Sequence[Forward], positions: Rows, wanted: Rows) -> list[HitBatch]:
    hits, first = [], 0
    for forward in forwards:
        part = slice(first, first + len(forward.write_slots))
        which = np.flatnonzero(positions[part] != wanted[part])
        hits.append(fired_writes("W5", forward, which, parent_positions=wanted[part] - 1))
        first = part.stop
    return hits
