"""A gated delta net's layer: the kernels against their reference, over chains, trees and padding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.engine.delta import gated_delta, gated_delta_torch
from kvcanary_kernels.engine.delta_shape import DeltaShape, DeltaWeights, Span

SHAPES = [DeltaShape(1, 1, 4, 4, 2), DeltaShape(2, 4, 6, 10, 4), DeltaShape(1, 3, 16, 8, 3)]
TREE = [-1, 0, 0, 1, 2, 2, 3]  # nodes that follow others than the one before them


Numbers = Sequence[Sequence[int]]


def span_of(rows: Numbers, sources: Sequence[int], targets: Numbers, device: str) -> Span:
    """By row the parents of its tokens, within the row; its entry; and where each token's state goes."""
    starts = [0]
    for own in rows:
        starts.append(starts[-1] + len(own))
    parents = [p if p < 0 else first + p for first, own in zip(starts, rows, strict=False) for p in own]
    flat = [target for own in targets for target in own]
    return Span(*(torch.tensor(own, device=device) for own in (starts, parents, list(sources), flat)))


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


class Layer:
    """Random states, weights and inputs for the tokens of a span."""

    def __init__(self, shape: DeltaShape, n: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(n)

        def random(*size: int, of: torch.dtype = dtype) -> Tensor:
            return torch.randn(*size, generator=generator).to(device, of)

        self.shape, self.states = shape, random(24, shape.size, of=torch.float32)
        self.states[0] = 0
        own = random(shape.channels, shape.width), random(shape.v_heads), random(shape.v_heads), random(shape.v_dim)
        self.weights = DeltaWeights(*own)
        self.x, self.gates = random(n, shape.channels), random(n, shape.values + 2 * shape.v_heads)

    def run(self, span: Span, *, launches: bool) -> tuple[Tensor, Tensor]:
        """What tokens read, and the states behind them."""
        states, n = self.states.clone(), len(self.x)
        mixed = torch.full((n, self.shape.channels), torch.nan, dtype=self.x.dtype, device=self.x.device)
        out = torch.full((n, self.shape.values), torch.nan, dtype=self.x.dtype, device=self.x.device)
        run = gated_delta if launches else gated_delta_torch
        run(states, span, self.x, self.gates, self.weights, self.shape, mixed=mixed, out=out, eps=1e-6)
        return out, states


SPANS = {
    "decode": ([[-1]] * 4, [3, 1, 7, 0], [[3], [1], [7], [-1]]),
    "chains": ([chain(5), chain(1), chain(9)], [2, 5, 6], [[-1] * 4 + [2], [5], [-1] * 8 + [6]]),
    "empty": ([chain(2), [], chain(1)], [2, 5, 6], [[-1, 2], [], [6]]),
    "kept": ([chain(3)], [4], [[8, 9, 10]]),
    "trees": ([TREE, TREE], [1, 9], [range(2, 9), range(10, 17)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SPANS)
def test_kernels_agree_with_their_reference(device: str, name: str, shape: DeltaShape, dtype: torch.dtype) -> None:
    """Whatever the rows are; states that nobody names stay as they are, bit for bit."""
    rows, sources, targets = SPANS[name]
    span = span_of(rows, sources, targets, device)
    layer = Layer(shape, len(span.parents), device, dtype)
    out, states = layer.run(span, launches=True)
    wanted, moved = layer.run(span, launches=False)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, moved, atol=tolerance, rtol=tolerance)
    others = torch.ones(len(states), dtype=torch.bool)
    others[span.targets[span.targets >= 0].cpu()] = False
    assert torch.equal(states[others], layer.states[others])


def test_a_row_of_padding_leaves_nothing(device: str) -> None:
    """Its nodes go on from the null state, whatever they follow; what they read is finite, and others read the same."""
    alone = span_of([TREE], [1], [range(2, 9)], device)
    padded = span_of([TREE, TREE], [1, 0], [range(2, 9), [-1] * 7], device)
    layer = Layer(SHAPES[1], 14, device)
    out, states = layer.run(padded, launches=True)
    layer.x, layer.gates = layer.x[:7], layer.gates[:7]
    wanted, moved = layer.run(alone, launches=True)
    assert torch.equal(out[:7], wanted)
    assert torch.equal(states, moved)
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode", "trees", "chains"])
def test_the_published_shape(name: str) -> None:
    """Heads as Qwen3.5-9B has them."""
    span = span_of(*SPANS[name], "cuda")
    layer = Layer(DeltaShape(16, 32, 128, 128, 4), len(span.parents), "cuda")
    for got, wanted in zip(layer.run(span, launches=True), layer.run(span, launches=False), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.gpu
def test_a_captured_layer_replays() -> None:
    """Entries and parents change between replays, and nothing is allocated."""
    span = span_of(*SPANS["trees"], "cuda")
    layer = Layer(SHAPES[1], len(span.parents), "cuda")
    states, n = layer.states.clone(), len(layer.x)
    mixed, out = layer.x.new_empty(n, layer.shape.channels), layer.x.new_empty(n, layer.shape.values)
    fixed = layer.x, layer.gates, layer.weights, layer.shape

    def run() -> None:
        gated_delta(states, span, *fixed, mixed=mixed, out=out, eps=1e-6)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    places = [range(12, 19), range(5, 12)]
    for rows, sources in (([TREE, TREE], [2, 4]), ([chain(7), [-1, 0, 1, 0, 3, 3, 5]], [1, 19])):
        other = span_of(rows, sources, places, "cuda")
        for own, new in zip(span, other, strict=True):
            own.copy_(new)
        states.copy_(layer.states)
        graph.replay()
        wanted, moved = layer.run(other, launches=True)
        assert torch.equal(out, wanted)
        assert torch.equal(states, moved)
