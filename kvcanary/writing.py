"""W1, W4 and W5: what a write plan says wrong, judged on the host before the body runs."""

from __future__ import annotations

from kvcanary.errors import PlanError
from kvcanary.forward import Forward
from kvcanary.hits import Hit


def judge_writes(forward: Forward, disabled: frozenset[str]) -> list[Hit]:
    """W1, W4 and W5 of a write plan."""
    hits = _wrong_positions(forward, "W5" not in disabled)
    if forward.refused and "W1" not in disabled:
        hits += [_write_hit("W1", forward, entry, slot) for entry, slot in forward.refused.items()]
    if len(set(forward.write_slots)) < len(forward.write_slots) and "W4" not in disabled:
        hits += _duplicates(forward)
    return hits


def _duplicates(forward: Forward) -> list[Hit]:
    """Every entry whose slot an earlier entry of this forward writes; padding may share null slots."""
    seen: set[int] = set()
    hits = []
    for entry, slot in enumerate(forward.write_slots):
        if slot in seen and slot >= forward.pool.view.null_slots:
            hits.append(_write_hit("W4", forward, entry, slot))
        seen.add(slot)
    return hits


def _wrong_positions(forward: Forward, report: bool) -> list[Hit]:
    """W5; trees are also refused when a parent does not come before its child."""
    hits: list[Hit] = []
    first = 0
    for row, written in enumerate(forward.written):
        before = forward.bounds[row + 1] - forward.bounds[row] - written - 1
        if forward.write_parents is None:
            parents = _chain_positions(forward, first, written, before)
        else:
            parents = _tree_positions(forward, first, written, before)
        for entry, parent in enumerate(parents, first):
            if report and forward.write_positions[entry] != parent + 1:
                slot = forward.refused.get(entry, forward.write_slots[entry])
                hits.append(_write_hit("W5", forward, entry, slot, parent_position=parent))
        first += written
    return hits


def _chain_positions(forward: Forward, first: int, written: int, before: int) -> list[int]:
    """Position of the parent of each entry of a chain that continues position `before`."""
    return [before, *forward.write_positions[first : first + written - 1]] if written else []


def _tree_positions(forward: Forward, first: int, written: int, before: int) -> list[int]:
    positions, parents = forward.write_positions, forward.write_parents or []
    for entry, parent in enumerate(parents[first : first + written], first):
        if parent != -1 and not first <= parent < entry:
            raise PlanError(f"parents[{entry}] must be -1 or in [{first}, {entry}), got {parent}")
    return [positions[parent] if parent >= 0 else before for parent in parents[first : first + written]]


def _write_hit(code: str, forward: Forward, entry: int, slot: int, parent_position: int | None = None) -> Hit:
    return Hit(
        code,
        forward.pool,
        slot,
        forward.write_positions[entry],
        forward.request_of(row_of_entry(forward, entry)).request_id,
        forward.site,
        forward.step,
        parent_position=parent_position,
    )


def row_of_entry(forward: Forward, entry: int) -> int:
    """The row that writes this entry of the write plan."""
    for row, written in enumerate(forward.written):
        if entry < written:
            return row
        entry -= written
    raise IndexError(entry)
