"""Sealing: a record for everything that the pending forwards have written, each chained to what it continues."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

import torch

from kvcanary.forward import Forward
from kvcanary.hits import Hit, entry_hit
from kvcanary.mirror import Mirror, Written
from kvcanary.sites import pack_site
from kvcanary_kernels.record import MASK_32, Keys, bitmap_columns, continue_chain, mix, mix_host

FEW = 64  # entries that plain integers mix faster than tensors


class Sealer:
    """Plain integers where there are dozens: a step of a CPU engine writes fewer entries than tensors pay for."""

    def __init__(self, mirror: Mirror, page_size: int, grants: Sequence[int]) -> None:
        """`grants`: the generation of each page, as it is granted now."""
        self._mirror, self._page_size, self._grants = mirror, page_size, grants

    def seal(self, forwards: Sequence[Forward]) -> list[Hit]:
        """Seal all entries in the order of their run; W5 where a position does not follow the parent's."""
        hits: list[Hit] = []
        fresh: dict[int, Written] = {}
        mixed = _mixed(forwards)
        first = 0
        for forward in forwards:
            end = first + len(forward.write_slots)
            hits += self._seal(forward, mixed[first:end], fresh)
            first = end
        self._mirror.write(fresh)
        return hits

    def _seal(self, forward: Forward, mixed: Sequence[int], fresh: dict[int, Written]) -> list[Hit]:
        pool, bounds, width = forward.pool, forward.bounds, forward.width
        positions, keys = forward.positions.tolist(), pool.keys
        chains: list[int] = []
        wanted: list[int] = []
        owners: list[int] = []
        sites: list[int] = []
        written_at = forward.step & MASK_32 | pack_site(forward.kind, forward.index) << 32
        first = 0
        for row, count in enumerate(forward.written):
            own, last = bounds[row + 1] - count, first + count
            begin = own - bounds[row]  # the position behind what the row read
            above = self._chain(pool.base + forward.ids[own - 1], fresh) if begin else pool.root
            owners += [forward.requests[row // width].uid] * count
            if forward.parents is None:
                chains += accumulate(
                    mixed[first:last], lambda value, own: continue_chain(value, own, keys), initial=above
                )
                del chains[first]  # what the row continues
                wanted += range(begin, begin + count)
                sites += [written_at | row % width << 48] * count
            else:
                for entry, parent in enumerate(forward.parents[first:last], first):
                    before, position = (above, begin) if parent < 0 else (chains[parent], positions[parent] + 1)
                    chains.append(continue_chain(before, mixed[entry], keys))
                    wanted.append(position)
                sites += range(written_at, written_at + (count << 48), 1 << 48)
            first = last
        self._note(forward, positions, chains, owners, sites, fresh)
        if wanted == positions:
            return []
        pairs = enumerate(zip(positions, wanted, strict=True))
        return [entry_hit("W5", forward, entry, parent_position=w - 1) for entry, (p, w) in pairs if p != w]

    def _note(
        self,
        forward: Forward,
        positions: Sequence[int],
        chains: Sequence[int],
        uids: Sequence[int],
        sites: Sequence[int],
        fresh: dict[int, Written],
    ) -> None:
        """The columns of these entries' records, by row."""
        base, slots, size, grants = forward.pool.base, forward.write_slots, self._page_size, self._grants
        pairs = zip(forward.tokens.tolist(), positions, strict=True)
        whos = [token & MASK_32 | (position & MASK_32) << 32 for token, position in pairs]
        owners = [uid | grants[slot // size] << 32 for uid, slot in zip(uids, slots, strict=True)]
        low, high = bitmap_columns(forward.stored)
        columns = zip(whos, chains, owners, sites, repeat(0), repeat(low), repeat(high), repeat(forward.pool.seal_term))
        rows = [base + slot for slot in slots] if base else slots
        fresh.update(zip(rows, columns, strict=False))
        if slots and min(slots) < forward.pool.view.null_slots:  # padding, and refused entries
            for slot in range(forward.pool.view.null_slots):
                fresh.pop(base + slot, None)

    def _chain(self, row: int, fresh: dict[int, Written]) -> int:
        found = fresh.get(row)
        return self._mirror.chain(row) if found is None else found[1]


def _mixed(forwards: Sequence[Forward]) -> list[int]:
    """`mix` of every entry, unsigned or signed: only its low 64 bits count."""
    keys: Keys = forwards[0].pool.keys
    if sum(len(forward.write_slots) for forward in forwards) > FEW:
        tokens = torch.cat([forward.tokens for forward in forwards])
        return mix(tokens, torch.cat([forward.positions for forward in forwards]), keys).tolist()
    return [
        mix_host(token, position, keys)
        for forward in forwards
        for token, position in zip(forward.tokens.tolist(), forward.positions.tolist(), strict=True)
    ]
