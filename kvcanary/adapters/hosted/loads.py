"""Bytes from elsewhere: what a connector loaded is recorded as it lies, and compared with its name where that is known.

Some connectors load layer by layer while the forward runs. In a step that admits loaded entries every layer is waited
for before the forward, as its attention would do later; that wait is then left out, since a connector may count it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcanary.adapters.hosted.content_names import Names
from kvcanary.adapters.observed import moves as paged_moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Group
from kvcanary.names import Published
from kvcanary_kernels.record.layout import Identity

#: Of a row, by its request and number, its line of each group's block table.
LinesOf = Callable[[str, int], Sequence[Tensor]]


class Loads:
    """External loads of one worker; `connector`: what its engine calls that which loads."""

    def __init__(
        self,
        canary: PagedCanary,
        connector: str,
        layers: Sequence[str] = (),
        wait_for: Callable[[str], object] = bool,
        published: Published | None = None,
        model: str = "",
    ) -> None:
        """layers: that a forward stores, in its order; wait_for: lets one of them arrive
        published, model: where other processes find the names of full blocks, and under which model and shard
        """
        self.canary, self.connector, self.compared = canary, connector, 0
        self.layers, self.wait_for = layers, wait_for
        self._waited: set[str] = set()  # layers of this step whose attention need not wait
        self.names = [Names(canary, group, connector, published, model) for group in canary.groups]
        self._new: list[tuple[tuple[int, str], Tensor, Tensor]] = []
        self.wrong: list[tuple[str, Group, Tensor]] = []  # of the last `arrived`: whose, and where, by group

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

    def arrived(self, lines_of: LinesOf) -> None:
        """Loads were started, on the stream of the forward: judge and record what they brought."""
        new, self._new = self._new, []
        known = len(self.canary.events)
        for (number, request), tokens, chains in new:
            lines = lines_of(request, number)
            self.compared += paged_moves.loaded(self.canary, (number, request), tokens, chains, lines, self.names)
        loads = [(event, event.load) for event in self.canary.events[known:] if event.load is not None]
        self.wrong = [(load.request, event.group, event.slots[load.wrong]) for event, load in loads]

    def name(self) -> None:
        """Give names to what the last forward stored."""
        for group, names in zip(self.canary.groups, self.names, strict=True):
            self.canary.launch_on_stored("name", group, functools.partial(names.launch, group))
            names.publish()
