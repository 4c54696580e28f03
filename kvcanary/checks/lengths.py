"""R10, R13 and H1: what forwards and commits say, against what the host knows of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvcanary.calls.entries import fired_writes
from kvcanary.calls.forward import Forward, on_host
from kvcanary.calls.model_call import ModelCall
from kvcanary.calls.violation import NO_SLOT, Violation
from kvcanary.errors import LifetimeError
from kvcanary.ledger.ledger import Request
from kvcanary.pools.slot_maps import window_start
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import read_record

Values = dict[str, Any]


def judge_lengths(forward: Forward) -> list[Violation]:
    """R10 for every row whose prefix is not as long as what acceptance has made final and forwards have written.

    Behind it a row of draft[i] reads i ancestors, and no other row anything but what the forward writes. H1 where it is
    as long as acceptance says, and what should have written its end had no hooks; and of a draft forward all of whose
    rows are those of another number.
    """
    violations: list[Violation] = []
    right: list[int] = []  # numbers of requests
    for number, (request, prefix) in enumerate(zip(forward.requests, forward.prefixes, strict=True)):
        truth = request.final_len(forward.pool.pool_id, forward.committed[number])
        if prefix == truth:
            right.append(number)
        else:
            violations.append(_wrong_prefix(forward, number, truth, prefix))
    behind = [violation for number in right for violation in _judge_ancestors(forward, number)]
    if behind and not violations and forward.kind == "draft" and (own := own_number(forward)) != forward.index:
        return [_wrong_number(forward, own)]
    return violations + behind


def _judge_ancestors(forward: Forward, number: int) -> list[Violation]:
    """R10 for rows of this request in which another number of entries stands between its prefix and what is written."""
    violations: list[Violation] = []
    wanted = forward.prefixes[number] + (forward.index if forward.kind == "draft" else 0)
    for row in range(number * forward.width, (number + 1) * forward.width):
        if row in forward.short_rows:
            violations.append(_too_short(forward, row, wanted))
        elif (begin := forward.begins[row]) != wanted:
            violations.append(_wrong_length(forward, row, max(begin - 1, 0), {"length": wanted}, {"length": begin}))
    return violations


def _wrong_prefix(forward: Forward, number: int, truth: int, prefix: int) -> Violation:
    row, request = number * forward.width, forward.requests[number]
    if truth < prefix <= request.most_final(forward.pool.pool_id, forward.committed[number]):
        unhooked = _not_caught_up(forward, row, truth, prefix)
        if unhooked is not None:
            return unhooked
    return _wrong_length(forward, row, max(prefix - 1, 0), {"length": truth}, {"length": prefix})


def _not_caught_up(forward: Forward, row: int, written: int, final: int) -> Violation | None:
    """H1 for a row of which ``written`` entries have a forward with hooks, and ``final`` are final.

    None where the last of these forwards ran when they became final: then it had hooks, and wrote too few. None where a
    load should have brought them.
    """
    pool, request = forward.pool, forward.request_of(row)
    if written < request.brought_len:
        return None
    if written > forward.starts[row]:
        slot = int(forward.ids[forward.bounds[row] + written - 1 - forward.starts[row]])
        if 0 <= slot < pool.view.num_slots and read_record(pool.records, slot).step >= request.commit_step:
            return None
    return _at_commit(pool, NO_SLOT, written, request, forward.step, "entries", final, written)


def own_number(forward: Forward) -> int:
    """The number of a draft forward by the ancestors of its rows and its positions; its own where they do not agree."""
    begins, prefixes = np.array(forward.begins), np.repeat(forward.prefixes, forward.width)
    numbers = set((begins - prefixes).tolist())
    is_sure = len(numbers) == 1 and not forward.short_rows and np.array_equal(forward.planned.positions, begins)
    return numbers.pop() if is_sure else forward.index


def _wrong_number(forward: Forward, number: int) -> Violation:
    """H1 of a draft forward that was opened as another: numbers of substeps repeat, or leave one out."""
    first, *others = forward.request_ids
    violation = Violation("H1", forward.pool, NO_SLOT, None, first, forward.site, forward.step, is_unhooked=True)
    return replace(violation, others=tuple(others), expected={"number": number}, found={"number": forward.index})


def judge_starts(forward: Forward) -> list[Violation]:
    """R10 for every row that begins behind the first position that its own entries must see."""
    violations: list[Violation] = []
    if not forward.has_starts or not any(forward.starts):
        return violations
    for row, start in enumerate(forward.starts):
        if start > (wanted := window_start(forward.pool.view, forward.begins[row])):
            violations.append(_wrong_length(forward, row, start, {"first_position": wanted}, {"first_position": start}))
    return violations


def _too_short(forward: Forward, row: int, before: int) -> Violation:
    """At the row's last entry, or where it has none at the first that it writes; `before`: entries before those."""
    first, end, start = forward.bounds[row], forward.bounds[row + 1], forward.starts[row]
    expected, found = {"entries": before - start + forward.written[row]}, {"entries": end - first}
    violation = _wrong_length(forward, row, start + end - first - 1, expected, found)
    if end == first and forward.written[row]:
        own = sum(forward.written[:row])
        violation.slot, violation.position = int(forward.planned.slots[own]), before
        violation.named = None if violation.named is None else int(forward.slot_names[own])
    return violation


def _wrong_length(forward: Forward, row: int, position: int, expected: Values, found: Values) -> Violation:
    place = min(forward.bounds[row] + max(position - forward.starts[row], 0), len(forward.ids) - 1)
    slot, named = (0, None) if place < 0 else (int(forward.ids[place]), int(forward.names[place]))
    name, site = forward.request_of(row).request_id, forward.site
    violation = Violation("R10", forward.pool, slot, position, name, site, forward.step, expected=expected, found=found)
    violation.named = None if forward.pool.view.slot_map is None else named
    return violation


def judge_mask(forward: ModelCall) -> list[Violation]:
    """R13 for every tree node that sees anything but itself and its ancestors."""
    if forward.tree_mask is None or forward.parents is None:
        return []
    num_nodes = forward.tree_mask.shape[-1]
    sees, parents = on_host(forward.tree_mask).reshape(-1, num_nodes), np.array(forward.parents, np.int64)
    if len(sees) == len(parents):
        wanted = sees[parents] & (parents >= 0)[:, None]  # what its parent sees
        wanted.reshape(-1, num_nodes * num_nodes)[:, :: num_nodes + 1] = True  # and itself
        if not np.count_nonzero(sees != wanted):
            return []
    seen = np.packbits(sees, axis=1, bitorder="little")
    expected = _lineages(forward.parents, forward.written)
    found = [int.from_bytes(row.tobytes(), "little") for row in seen]
    wrong = [entry for entry, own in enumerate(expected) if own != found[entry]]
    batch = fired_writes("R13", forward, np.array(wrong))
    return [
        replace(batch.violation(number), expected={"sees": _bits(expected[entry])}, found={"sees": _bits(found[entry])})
        for number, entry in enumerate(wrong)
    ]


def expect_growth(requests: Sequence[Request], committed_lens: Sequence[int]) -> None:
    """What is committed stays so, of those that the device has not reported before."""
    for request, length in zip(requests, committed_lens, strict=True):
        if length < request.committed_len and not request.uncollected:
            raise LifetimeError(
                f"committed_len of {request.request_id!r} must not shrink, {length} follows {request.committed_len}"
            )


def judge_commit(requests: Sequence[Request], pools: Sequence[PoolState], step: int) -> list[Violation]:
    """H1 where entries are final since this step that no forward with hooks has written.

    Draft pools catch up later: `judge_lengths` looks when their next forward reads these.
    """
    violations = []
    for pool in pools:
        if pool.view.token_offset or pool.view.ahead:
            continue
        for request in requests:
            seen, final = max(request.row_lens[pool.pool_id], request.brought_len), request.committed_len
            if seen < final and request.commit_step == step:
                violations.append(_at_commit(pool, 0, seen, request, step, "entries", final, seen))
    return violations


def judge_collected(
    requests: Sequence[Request], pool: PoolState, committed_lens: Sequence[int], step: int
) -> list[Violation]:
    """H1 where the engine says of a step that it has made another length final than the device has said."""
    violations = []
    for request, length in zip(requests, committed_lens, strict=True):
        uncollected = request.uncollected
        if uncollected and length != (reported := uncollected[0].committed_len):
            violation = _at_commit(pool, 0, length, request, step, "committed_len", reported, length)
            violations.append(replace(violation, is_unhooked=False))
    return violations


def _at_commit(
    pool: PoolState, slot: int, position: int, request: Request, step: int, what: str, expected: int, found: int
) -> Violation:
    """H1 of what is final by the engine's word."""
    where = pool, slot, position, request.request_id, ("commit", 0), step
    return Violation("H1", *where, expected={what: expected}, found={what: found}, is_unhooked=True)


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
