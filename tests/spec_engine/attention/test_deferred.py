"""DeferredAttention: opened once, and not before a layer reads the pool."""

from __future__ import annotations

import torch

from spec_engine.attention.deferred import DeferredAttention

ONE = torch.ones(1)


class Recorded:
    def __init__(self, events: list) -> None:
        self.events = events
        events.append("opened")

    def attend(self, layer, q, k, v):
        self.events.append(layer)
        return q + k + v

    def store(self, layer, k, v):
        self.events.append(("stored", layer, float(k), float(v)))


def test_it_is_opened_by_the_first_layer():
    """What comes before runs first; all layers have the same attention."""
    events: list = []
    attention = DeferredAttention(lambda: Recorded(events))
    assert events == []
    assert [float(attention.attend(layer, ONE, ONE, ONE)) for layer in (0, 1)] == [3.0, 3.0]
    attention.finish()
    assert events == ["opened", 0, 1]


def alone(events: list) -> DeferredAttention:
    """One whose first layer reads nothing of the pool."""

    def attend(layer, q, k, v):
        events.append(("alone", layer))
        return q - k - v

    return DeferredAttention(lambda: Recorded(events), attend)


def test_a_first_layer_that_reads_no_pool_is_stored_when_the_second_opens_it():
    """Its own K and V, before those of the second; what it attended is what it gave."""
    events: list = []
    attention = alone(events)
    assert float(attention.attend(0, ONE, 2 * ONE, 3 * ONE)) == -4.0
    assert events == [("alone", 0)]
    assert float(attention.attend(1, ONE, ONE, ONE)) == 3.0
    attention.finish()
    assert events == [("alone", 0), "opened", ("stored", 0, 2.0, 3.0), 1]


def test_an_only_layer_that_reads_no_pool_is_stored_when_the_body_has_run():
    """And nothing is opened for a body that has not attended."""
    events: list = []
    attention = alone(events)
    attention.finish()
    assert events == []
    attention.attend(0, ONE, ONE, ONE)
    attention.finish()
    assert events == [("alone", 0), "opened", ("stored", 0, 1.0, 1.0)]
