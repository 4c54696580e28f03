"""Sealing: the records of everything that was written since the last check, at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcanary.forward import Forward
from kvcanary.sites import pack_site
from kvcanary.state import CanaryState
from kvcanary.twin import INCOMPLETE, Twin
from kvcanary_kernels import record
from kvcanary_kernels.record import MASK_32, MASK_64, mix
from kvcanary_kernels.seal import identity_words, seal_values


@dataclass(slots=True)
class Entries:
    """What the host knows of all entries that some forwards write; owners and sites are record columns, unsigned.

    rows:   by entry, its row in the records of all pools
    firsts: by forward, its first entry
    writer: by row, the last entry that writes it; refused entries and null slots are left out
    """

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)
    continues: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    seal_terms: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    writer: dict[int, int] = field(default_factory=dict)


class Sealer:
    """Writes records and the twin. Later forwards may continue and overwrite earlier ones."""

    def __init__(self, state: CanaryState, twin: Twin, grants: Sequence[int]) -> None:
        """`grants`: the generation of each page, as it is granted now."""
        self._state, self._twin, self._grants = state, twin, grants

    def seal(self, forwards: Sequence[Forward]) -> Entries:
        """Seal all entries of `forwards`, which are grouped by pool and in the order of their run."""
        state, entries = self._state, Entries()
        tokens = torch.cat([forward.write.tokens for forward in forwards])
        mixed = mix(tokens, torch.cat([forward.write.positions for forward in forwards]), state.keys).tolist()
        for forward in forwards:
            self._link(forward, mixed, entries)
        kept = list(entries.writer.values())
        if not kept:
            return entries
        columns = self._columns(entries, tokens.tolist())
        rows = columns.t().contiguous()  # [n, 8]
        slots = state.ints(slot for forward in forwards for slot in forward.write_slots)
        rows[:, record.SEAL] += seal_values(identity_words(rows), slots, 0, state.keys)
        if len(kept) < len(entries.rows):
            rows = rows.index_select(0, state.ints(kept))
        where = state.ints(entries.writer)
        state.records.index_copy_(0, where, rows)
        state.expected.index_copy_(0, where, rows)
        written = list(zip(entries.positions, entries.chains, entries.continues, entries.generations, strict=True))
        self._twin.write(entries.writer, [written[entry] for entry in kept])
        return entries

    def _link(self, forward: Forward, mixed: Sequence[int], entries: Entries) -> None:
        """Chain every entry to what it continues, and note what the host knows of its record."""
        first = entry = len(entries.rows)
        entries.firsts.append(first)
        chains, continues, owners, sites = entries.chains, entries.continues, entries.owners, entries.sites
        multiplier, parents, width = self._state.keys.multiplier, forward.write_parents, forward.read.rows_per_request
        site = forward.step & MASK_32 | pack_site(forward.kind, forward.index) << 32
        before: int | None = None
        for row, (written, tail) in enumerate(zip(forward.written, forward.tails, strict=True)):
            branch = row % width
            if not branch:
                before = None
            if len(tail) > written:
                above = self._chain_of(forward.pool.base + tail[-written - 1], entries)
            else:
                above = before = self._chain_of_prefix(forward, row, entries) if before is None else before
            owners += [forward.requests[row // width].uid] * written
            if parents is None:
                sites += [site | branch << 48] * written
                for own in mixed[entry : entry + written]:
                    continues.append(above)
                    above = (multiplier * above + own) & MASK_64
                    chains.append(above)
            else:
                sites += range(site, site + (written << 48), 1 << 48)
                for number in range(entry, entry + written):
                    parent = parents[number - first]
                    continued = above if parent < 0 else chains[first + parent]
                    continues.append(continued)
                    chains.append((multiplier * continued + mixed[number]) & MASK_64)
            entry += written
        self._note(forward, first, entries)

    def _chain_of_prefix(self, forward: Forward, row: int, entries: Entries) -> int:
        """Chain value of the entry before a row's tail."""
        end = forward.bounds[row] + forward.prefix_len(row)
        if end == forward.bounds[row]:
            return forward.pool.root
        return self._chain_of(forward.pool.base + forward.row_slots(end - 1, end)[0], entries)

    def _chain_of(self, row: int, entries: Entries) -> int:
        entry = entries.writer.get(row)
        return self._twin.chain(row) if entry is None else entries.chains[entry]

    def _note(self, forward: Forward, first: int, entries: Entries) -> None:
        pool, size, grants, slots = forward.pool, self._state.page_size, self._grants, forward.write_slots
        count, stored = len(slots), forward.stored
        granted = [grants[slot // size] for slot in slots]
        owners = entries.owners
        for entry, generation in enumerate(granted, first):
            owners[entry] |= generation << 32
        entries.positions += forward.write_positions
        entries.generations += granted if stored == pool.full_layers else [INCOMPLETE] * count
        entries.layers += [stored] * count
        entries.seal_terms += [pool.seal_term] * count
        rows = [pool.base + slot for slot in slots]
        entries.rows += rows
        entries.writer.update(_kept(forward, rows, first))

    def _columns(self, entries: Entries, tokens: Sequence[int]) -> Tensor:
        """[8, n]: the columns of the records, content_b 0 and the seal only what the pool adds to it."""
        n = len(tokens)
        values = [(p & MASK_32) << 32 | t & MASK_32 for p, t in zip(entries.positions, tokens, strict=True)]
        values += entries.chains
        values += entries.owners
        values += entries.sites
        values += [0] * n
        values += [layers & MASK_64 for layers in entries.layers]
        values += [layers >> 64 for layers in entries.layers]
        values += entries.seal_terms
        return self._state.columns(array("Q", values), n)


def _kept(forward: Forward, rows: Sequence[int], first: int) -> Iterable[tuple[int, int]]:
    """(row, entry) of the entries whose records are written: not the refused, not padding."""
    pairs = zip(rows, range(first, first + len(rows)), strict=True)
    null_slots = forward.pool.view.null_slots
    if not rows or min(forward.write_slots) >= null_slots:
        return pairs  # refused entries lie in null slot 0
    return [(row, entry) for row, entry in pairs if row - forward.pool.base >= null_slots]
