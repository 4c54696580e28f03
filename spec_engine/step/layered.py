"""One forward over several pools: layers that see everything keep K and V in one, those with a window in another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from spec_engine.core import ForwardBatch
from spec_engine.models.decoder import KVAccess
from spec_engine.step.hooks import Forwards

if TYPE_CHECKING:
    from kvcanary import Announced, CanaryManager


class LayerGroup(NamedTuple):
    """Layers of a model, in the order of the pool that keeps theirs."""

    layers: tuple[int, ...]
    forwards: Forwards


class LayeredForwards:
    """Opens forwards whose every layer goes to the pool of its group; plans and moves name the full slots in all."""

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        self.groups = tuple(groups)
        places = {layer: (number, own) for number, group in enumerate(groups) for own, layer in enumerate(group.layers)}
        self._places = [places[layer] for layer in range(len(places))]  # by layer: its group, and its number there

    @property
    def canary(self) -> CanaryManager | None:
        """Of all groups."""
        return self.groups[0].forwards.canary

    def announced(self, kind: str, index: int = 0) -> list[Announced]:
        """What a forward of this kind must open, in every group, for `CanaryManager.expect`."""
        return [one for group in self.groups for one in group.forwards.announced(kind, index)]

    @contextmanager
    def open(self, batch: ForwardBatch) -> Iterator[KVAccess]:
        """The attention of one forward, opened in every group before the first layer runs."""
        with ExitStack() as stack:
            opened = [stack.enter_context(group.forwards.open(batch)) for group in self.groups]
            yield LayeredAttention([(opened[number], own) for number, own in self._places])

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy rows within each pool, ``[n] int64`` full slots."""
        for group in self.groups:
            group.forwards.move(source, destination)


class LayeredAttention:
    """A `KVAccess` that hands each layer on to the one of its group."""

    def __init__(self, places: Sequence[tuple[KVAccess, int]]) -> None:
        """``places``: by layer of the model who attends, and the layer's number there."""
        self._places = places

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the pool of this layer attends."""
        access, own = self._places[layer]
        return access.attend(own, q, k, v)
