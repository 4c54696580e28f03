"""What a fault did to an engine, as it knows itself; and that it cannot be made now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The writer that a finding must name where bytes changed and nobody declared it.
UNDECLARED = "undeclared write"


class NotNow(Exception):
    """The engine has nothing now that the fault could strike: it is asked again before the next step."""


def need(is_there: object) -> None:
    """NotNow without it."""
    if not is_there:
        raise NotNow


@dataclass(frozen=True)
class Strike:
    """What a fault did, as it knows itself; findings are compared with it.

    step: first engine step whose tokens it can touch; None where that is not one step, as for a wrong size.
    place: fields of a Finding (pool, slot, layer, position, reader, part, head, dim, bit, site) and their values; a
        frozenset holds all that are right. Of a typed error: "request" must stand in its message.
    writer: request that the finding must name as the writer, a frozenset of those that are right, UNDECLARED, or None
        where there is none to name.
    code: what must be found here, where it is another than the fault's `expected`; "" in a quiet twin: nothing.
    """

    step: int | None
    place: Mapping[str, Any] = field(default_factory=dict)
    writer: str | frozenset[str] | None = None
    code: str | None = None
