"""All breaks, by the part of the engine in which somebody might make them."""

from __future__ import annotations

from kvcanary_tools.breaks.broken import Break
from kvcanary_tools.breaks.catalogue import acceptance, captured, drafting, hooks, lifetimes, sizes, tiers

AREAS = (sizes, drafting, hooks, acceptance, lifetimes, captured, tiers)
BREAKS: dict[str, Break] = {one.name: one for area in AREAS for one in area.BREAKS}
