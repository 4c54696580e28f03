"""DeferredAttention: opened once, and not before a layer attends."""

from __future__ import annotations

import torch

from spec_engine.attention.deferred import DeferredAttention


class Recorded:
    def __init__(self, events: list) -> None:
        self.events = events
        events.append("opened")

    def attend(self, layer, q, k, v):
        self.events.append(layer)
        return q + k + v


def test_it_is_opened_by_the_first_layer():
    """What comes before runs first; all layers have the same attention."""
    events: list = []
    attention = DeferredAttention(lambda: Recorded(events))
    assert events == []
    one = torch.ones(1)
    assert [float(attention.attend(layer, one, one, one)) for layer in (0, 1)] == [3.0, 3.0]
    assert events == ["opened", 0, 1]
