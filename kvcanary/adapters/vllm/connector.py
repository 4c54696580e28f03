"""Bytes from elsewhere: what a connector loaded is recorded as it lies, and compared with its name where that is known.

A content name is what the bytes of an entry were when this worker wrote the same prefix: chain to fingerprint, in a
table that never changes an entry. A prefix whose bytes were once written in two ways has no name any more.

Some connectors load layer by layer while the forward runs. In a step that admits loaded entries every layer is waited
for before the forward, as its attention would do later; that wait is then left out, since a connector may count it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.observed import moves as paged_moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Group
from kvcanary_kernels.record.layout import Identity

NAMES = 1 << 20


class Names:
    """Of one group, what the bytes of an entry were when this worker wrote it, by its chain.

    connector: what vLLM calls that which loads
    """

    def __init__(self, connector: str, device: torch.device) -> None:
        self.connector = connector
        #: Chain and fingerprint; the last is nobody's.
        self._known = torch.zeros(2, NAMES + 1, dtype=torch.int64, device=device)
        self._several = torch.zeros(NAMES + 1, dtype=torch.bool, device=device)

    def give(self, fingerprints: Tensor, chains: Tensor, is_stored: Tensor) -> None:
        """Entries [n] were stored under these chains, but for those where `is_stored` [n] bool says no."""
        places = torch.where(is_stored, chains & (NAMES - 1), NAMES)
        is_free = self._known[0, places] == 0
        self._known[0, torch.where(is_free, places, NAMES)] = chains
        is_own = self._known[0, places] == chains
        first = torch.where(is_own & is_free, places, NAMES)
        self._known[1, first] = fingerprints
        differs = is_own & (self._known[1, places] != fingerprints)
        self._several.index_fill_(0, torch.where(differs, places, NAMES), True)

    def fingerprint_of(self, chains: Tensor) -> tuple[Tensor, Tensor]:
        """([n] int64 fingerprints, [n] bool where they are known)."""
        places = chains & (NAMES - 1)
        known = (self._known[0, places] == chains) & ~self._several[places]
        return self._known[1, places], known

    def chain_of(self, fingerprint: int) -> int | None:
        """The chain under which bytes of such a sum were written; None where that is not known."""
        known = ((self._known[1] == fingerprint) & (self._known[0] != 0))[:-1].nonzero()
        return int(self._known[0, known[0, 0]]) if len(known) else None


class Loads:
    """External loads of one worker; `connector`: what vLLM calls that which loads."""

    def __init__(
        self, canary: PagedCanary, connector: str, layers: Sequence[str], wait_for: Callable[[str], object]
    ) -> None:
        """layers: that a forward stores, in its order; wait_for: lets one of them arrive"""
        self.canary, self.connector, self.compared = canary, connector, 0
        self.layers, self.wait_for = layers, wait_for
        self._waited: set[str] = set()  # layers of this step whose attention need not wait
        self.names = [Names(connector, canary.memory.device) for _ in canary.groups]
        self._new: list[tuple[tuple[int, str], Tensor, Tensor]] = []

    def expect(self, new: Sequence[tuple[int, str, Sequence[int] | None, int, Identity]]) -> None:
        """Requests whose first entries may come from elsewhere; as `PagedCanary.admit` takes them."""
        for number, request, tokens, length, identity in new:
            if tokens is not None and length:
                prefix = list(tokens[:length])
                self._new.append(
                    ((number, request), torch.tensor(prefix), self.canary.prefixes.every(prefix, identity))
                )

    def begin(self) -> None:
        """A step begins: nothing was waited for."""
        self._waited.clear()

    def wait(self) -> None:
        """Let all layers arrive, where entries of this step may come from elsewhere."""
        for layer in self.layers if self._new else ():
            self.wait_for(layer)
            self._waited.add(layer)

    def was_waited_for(self, layer: str) -> bool:
        """Whether a layer of this step is there already; said once."""
        was = layer in self._waited
        self._waited.discard(layer)
        return was

    def arrived(self, lines: Sequence[Tensor]) -> None:
        """Loads were started, on the stream of the forward: judge and record what they brought."""
        new, self._new = self._new, []
        for row, tokens, chains in new:
            self.compared += paged_moves.loaded(self.canary, row, tokens, chains, lines, self.names)

    def name(self) -> None:
        """Give names to what the last forward stored."""
        for group, names in zip(self.canary.groups, self.names, strict=True):
            self.canary.launch_on_stored("name", group, functools.partial(_name, group, names))


def _name(group: Group, names: Names, slots: Tensor, chains: Tensor) -> None:
    """Slots, -1 where nothing was stored, and their chains."""
    fingerprints = group.layers[0].fingerprints[0].index_select(1, slots.clamp(min=0)).sum(0)
    names.give(fingerprints, chains, slots >= 0)


def connector_name(connector: Any) -> str:
    """What vLLM calls a connector; of several, each."""
    name, parts = type(connector).__name__, getattr(connector, "_connectors", None)
    return name if not parts else f"{name} of {', '.join(type(part).__name__ for part in parts)}"
