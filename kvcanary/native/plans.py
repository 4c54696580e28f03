"""Plans: how loops see what a forward reads and writes, in the memory that was filled when it was opened."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, cast

from kvcanary.native.jit import longs_at, loop, view
from kvcanary.native.layout import FORWARD, PlanLayout, plan_layout

Plan = cast(Any, namedtuple)("Plan", PlanLayout._fields[:-1])
_layout_of = loop()(plan_layout)


@loop()
def layout_of(forward):
    """`PlanLayout` of a forward, by its head."""
    return _layout_of(forward.entries, forward.rows, forward.requests)


@loop()
def _part(plan, begin, end):
    return longs_at(plan + 8 * begin, end - begin)


@loop()
def plan_of(head):
    """The arrays of a forward's plan and what lies behind it, as `PlanLayout` has them, by the address of its head."""
    at, plan = layout_of(view(FORWARD, head)), head + 8 * FORWARD.size
    return Plan(
        _part(plan, at.slots, at.tokens),
        _part(plan, at.tokens, at.positions),
        _part(plan, at.positions, at.parents),
        _part(plan, at.parents, at.bounds),
        _part(plan, at.bounds, at.written),
        _part(plan, at.written, at.starts),
        _part(plan, at.starts, at.owns),
        _part(plan, at.owns, at.begins),
        _part(plan, at.begins, at.skipped),
        _part(plan, at.skipped, at.prefixes),
        _part(plan, at.prefixes, at.who),
        _part(plan, at.who, at.chains),
        _part(plan, at.chains, at.end),
    )
