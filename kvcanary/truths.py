"""W6, R10, R13 and H1: what forwards and commits say, against what the host knows of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvcanary.entries import fired_writes
from kvcanary.forward import Forward, Ints, on_host
from kvcanary.hits import Hit
from kvcanary.intake import HitBatch
from kvcanary.ledger import Request
from kvcanary.state import PoolState


def judge_tokens(forward: Forward) -> list[HitBatch]:
    """W6 for every entry whose input the host knows and that is another token. Draft guesses have no truth."""
    if forward.kind == "draft":
        return []
    wrong: list[Ints] = []
    tokens, offset, first = forward.planned.tokens.tolist(), forward.pool.view.token_offset, 0
    for row, (begin, count) in enumerate(zip(forward.begins, forward.written, strict=True)):
        known = forward.request_of(row).tokens[begin + offset : begin + offset + count]
        if forward.parents is None:
            if tokens[first : first + len(known)] != known:
                own = forward.planned.tokens[first : first + len(known)]
                wrong.append(first + np.flatnonzero(own != np.array(known)))
        elif known and count and tokens[first] != known[0]:  # of a tree the root alone, its first node, is no guess
            wrong.append(np.array([first]))
        first += count
    return [fired_writes("W6", forward, np.concatenate(wrong))] if wrong else []


def judge_lengths(forward: Forward) -> list[Hit]:
    """R10 for every row whose prefix is not as long as what acceptance has made final and forwards have written."""
    hits = []
    pool_id = forward.pool.pool_id
    for number, (request, prefix) in enumerate(zip(forward.requests, forward.prefixes, strict=True)):
        truth = request.final_len(pool_id, forward.committed[number])
        if prefix != truth:
            row = number * forward.width
            place = forward.bounds[row] + max(prefix - 1, 0)
            slot = int(forward.ids[place]) if place < len(forward.ids) else 0
            hits.append(
                Hit(
                    "R10",
                    forward.pool,
                    slot,
                    max(prefix - 1, 0),
                    request.request_id,
                    forward.site,
                    forward.step,
                    expected={"length": truth},
                    found={"length": prefix},
                )
            )
    return hits


def judge_mask(forward: Forward) -> list[Hit]:
    """R13 for every tree node that sees anything but itself and its ancestors."""
    if forward.tree_mask is None or forward.parents is None:
        return []
    num_nodes = forward.tree_mask.shape[-1]
    seen = np.packbits(on_host(forward.tree_mask).reshape(-1, num_nodes), axis=1, bitorder="little")
    expected = _lineages(forward.parents, forward.written)
    width = seen.shape[1]
    if b"".join(lineage.to_bytes(width, "little") for lineage in expected) == seen.tobytes():
        return []
    found = [int.from_bytes(row.tobytes(), "little") for row in seen]
    wrong = [entry for entry, own in enumerate(expected) if own != found[entry]]
    batch = fired_writes("R13", forward, np.array(wrong))
    return [
        replace(batch.hit(number), expected={"sees": _bits(expected[entry])}, found={"sees": _bits(found[entry])})
        for number, entry in enumerate(wrong)
    ]


def judge_commit(request: Request, pools: Sequence[PoolState], committed_len: int, step: int) -> list[Hit]:
    """H1 where entries become final that no forward with hooks has written. Draft pools catch up one step later."""
    hits = []
    for pool in pools:
        expected, seen = committed_len, request.row_lens[pool.pool_id]
        if pool.view.token_offset == pool.view.ahead == 0 and seen < expected:
            hits.append(
                Hit(
                    "H1",
                    pool,
                    0,
                    seen,
                    request.request_id,
                    ("commit", 0),
                    step,
                    expected={"entries": expected},
                    found={"entries": seen},
                )
            )
    return hits


def _lineages(parents: Sequence[int], written: Sequence[int]) -> list[int]:
    """By node the bits of itself and its ancestors, counted within its tree."""
    lineages: list[int] = []
    first = 0
    for count in written:
        for entry in range(first, first + count):
            parent = parents[entry]
            lineages.append((lineages[parent] if parent >= 0 else 0) | 1 << entry - first)
        first += count
    return lineages


def _bits(lineage: int) -> list[int]:
    return [node for node in range(lineage.bit_length()) if lineage >> node & 1]
