"""Recurrent states through trees: what a verify leaves and a commit takes is what plain decoding would have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcanary.invariants import RecurrentStateError
from kvcanary_kernels.engine.delta_shape import DeltaShape, DeltaWeights
from spec_engine.memory.recurrent import RecurrentPool, SpanStates
from spec_engine.mock import with_random_weights
from spec_engine.models import CheckpointError
from spec_engine.models.config import ModelConfig
from spec_engine.models.hybrid import HybridDecoder

DELTA = DeltaShape(1, 2, 3, 4, 3)
CONFIG = ModelConfig("LlamaForCausalLM", 16, 24, 4, 2, 1, 8, 50, 128, delta=DELTA, delta_layers=(0, 2))
PROMPTS = [[3, 14, 15, 9, 26], [5, 35, 8]]
PARENTS = [[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 2, 0, 4, 5]]
NODES = [[7, 11, 12, 13, 14, 15, 16], [8, 21, 22, 23, 24, 25, 26]]
PATHS = [[[0, 1, 4, 6], [0]], [[0, 2, 5], [0, 4, 5, 6]], [[0, 1], [0, 1, 2, 3]]]  # nodes accepted of each request


class DenseKV:
    """Requests kept whole; the new tokens of each see its stored rows and, of one another, what `masks` says."""

    def __init__(self, masks: list[Tensor], stored: list[dict[int, Tensor]]) -> None:
        self.masks, self.stored, self.new = masks, stored, [{} for _ in stored]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, first = [], 0
        for mask, stored, new in zip(self.masks, self.stored, self.new, strict=True):
            part = slice(first, first + len(mask))
            new[layer] = torch.stack((k[part, 0], v[part, 0]), 1)
            rows = torch.cat((stored[layer], new[layer])) if layer in stored else new[layer]
            seen = torch.cat((mask.new_ones(len(mask), len(rows) - len(mask)), mask), 1)
            scores = torch.einsum("nhd,md->hnm", q[part], rows[:, 0]) / 8**0.5
            out.append(torch.einsum("hnm,md->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), rows[:, 1]))
            first = part.stop
        return torch.cat(out)

    def keep(self, kept: list[list[int]]) -> None:
        for stored, new, nodes in zip(self.stored, self.new, kept, strict=True):
            for layer, rows in new.items():
                stored[layer] = torch.cat((stored[layer], rows[nodes])) if layer in stored else rows[nodes]


class Runner:
    """A hybrid model, its states and its dense K/V, for the requests in rows 2 and 1."""

    def __init__(self) -> None:
        self.model = with_random_weights(HybridDecoder(CONFIG), seed=5)
        settings = {"num_layers": self.model.num_state_layers, "size": DELTA.size, "dtype": torch.float64}
        self.pool = RecurrentPool(num_rows=3, max_nodes=8, device=torch.device("cpu"), **settings)
        self.rows, self.lens, self.stored = [2, 1], [0, 0], [{}, {}]

    def chain(self, tokens: list[list[int]]) -> Tensor:
        """Hidden states of requests that go on in a line, [sum of lens, hidden]."""
        lens = [len(part) for part in tokens]
        kv = DenseKV([torch.ones(n, n).tril().bool() for n in lens], self.stored)
        positions = torch.cat([torch.arange(at, at + n) for at, n in zip(self.lens, lens, strict=True)])
        flat = torch.tensor([token for part in tokens for token in part])
        hidden = self.model(flat, positions, kv, (), self.pool.chain(self.rows, lens)).hidden
        kv.keep([list(range(n)) for n in lens])
        self.lens = [at + n for at, n in zip(self.lens, lens, strict=True)]
        return hidden

    def verify(self, paths: list[list[int]]) -> Tensor:
        """Hidden states of the trees, [2, N, hidden]; then only the accepted `paths` are kept."""
        parents = torch.tensor(PARENTS)
        masks = [torch.eye(7).bool() for _ in PARENTS]
        for mask, own in zip(masks, PARENTS, strict=True):
            for node, parent in enumerate(own):
                if parent >= 0:
                    mask[node] |= mask[parent]
        depths = torch.stack([mask.sum(-1) - 1 for mask in masks])
        kv, positions = DenseKV(masks, self.stored), torch.tensor(self.lens)[:, None] + depths
        states = self.pool.tree(self.rows, parents)
        hidden = self.model(torch.tensor(NODES).flatten(), positions.flatten(), kv, (), states).hidden
        self.pool.commit(self.rows, [path[-1] for path in paths])
        kv.keep(paths)
        self.lens = [at + len(path) for at, path in zip(self.lens, paths, strict=True)]
        return hidden.view(2, 7, -1)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("paths", PATHS)
def test_a_verify_and_a_commit_equal_the_accepted_tokens_one_by_one(paths: list[list[int]]) -> None:
    """Hidden states, states and the step after are those of a run that never saw the rejected nodes, to 1e-12."""
    drafting = Runner()
    drafting.chain(PROMPTS)
    tree = drafting.verify(paths)
    after = drafting.verify(paths)  # the same tree again, from the committed states
    ends = drafting.chain([[40], [41]])
    for request, path in enumerate(paths):
        alone = Runner()
        alone.rows, alone.lens, alone.stored = [3], [0], [{}]
        for token in PROMPTS[request]:
            alone.chain([[token]])
        for verified in (tree, after):
            for node in path:
                close(alone.chain([[NODES[request][node]]])[0], verified[request, node])
        close(alone.chain([[40 + request]])[0], ends[request])
        close(alone.pool.states[:, 3], drafting.pool.states[:, drafting.rows[request]])


@torch.no_grad()
def test_a_prompt_in_chunks_leaves_the_state_of_the_whole() -> None:
    """Chunks of any lengths, ragged over the requests, end in the state that one forward leaves."""
    whole, chunked = Runner(), Runner()
    hidden = whole.chain([[3, 14, 15, 9, 26], [5, 35, 8, 1]])
    parts = [chunked.chain(chunk) for chunk in ([[3, 14], [5]], [[15], [35, 8]], [[9, 26], [1]])]
    close(torch.stack((parts[2][1], parts[2][2])), hidden[[4, 8]])
    close(whole.pool.states, chunked.pool.states)


def pool_of(rows: int = 2, nodes: int = 3) -> RecurrentPool:
    shape = {"num_layers": 1, "num_rows": rows, "max_nodes": nodes, "size": DELTA.size}
    return RecurrentPool(**shape, dtype=torch.float64, device=torch.device("cpu"))


def run(states: SpanStates, n: int) -> None:
    """One layer over so many tokens, all alike."""
    ones = lambda *size: torch.ones(*size, dtype=torch.float64)  # noqa: E731
    heads, x, gates = DELTA.v_heads, ones(n, DELTA.channels), ones(n, DELTA.values + 2 * DELTA.v_heads)
    weights = DeltaWeights(ones(DELTA.channels, DELTA.width), ones(heads), ones(heads), ones(DELTA.v_dim))
    states.advance(0, x, gates, weights, DELTA, 1e-6)


def test_the_null_state_stays_zero() -> None:
    """Padding rows run through every forward and leave row 0 as it was."""
    pool = pool_of()
    run(pool.chain([1, 0, 0], [1, 1, 1]), 3)
    assert pool.states[0].any(1).tolist() == [False, True, False]
    run(pool.tree([0], torch.tensor([[-1, 0, 1]])), 3)
    assert pool.states[0, 0].eq(0).all()
    assert pool.nodes[0, 0].eq(0).all()
    run(pool.chain([0], [1]), 1)  # and no commit is owed for it


def test_a_new_request_begins_at_zero() -> None:
    """Reset forgets the state and the open verify of the request before."""
    pool = pool_of()
    run(pool.chain([1], [3]), 3)
    run(pool.tree([1], torch.tensor([[-1, 0, 1]])), 3)
    pool.reset(1)
    assert pool.states.eq(0).all()
    pool.chain([1], [1])


def test_what_an_open_verify_forbids() -> None:
    """No forward of a row before its commit, no commit of a node that is none, none twice, each with its numbers."""
    pool = pool_of()
    pool.tree([1], torch.tensor([[-1, 0, 1]]))
    words = "state of row 1 must be committed before its next forward, a verify of 3 nodes is open"
    for forward in (lambda: pool.chain([2, 1], [1, 1]), lambda: pool.tree([1], torch.tensor([[-1]]))):
        with pytest.raises(RecurrentStateError, match=words):
            forward()
    for node in (3, -1):
        with pytest.raises(RecurrentStateError, match=f"row 1 must commit one of the 3 nodes .* got node {node}$"):
            pool.commit([1], [node])
    pool.commit([1], [2])
    with pytest.raises(RecurrentStateError, match="row 1 must commit one of the 0 nodes"):
        pool.commit([1], [0])


def test_recurrent_layers_lie_within_the_model() -> None:
    """A layer that the model does not have is refused; attention and recurrence are counted apart."""
    with pytest.raises(CheckpointError, match=r"must lie within the model's 4, got \[1, 4\]"):
        HybridDecoder(replace(CONFIG, delta_layers=(1, 4)))
    with pytest.raises(CheckpointError, match=r"must have layers with a gated delta net, got DeltaShape.* in \(\)"):
        HybridDecoder(replace(CONFIG, delta_layers=()))
    with pytest.raises(CheckpointError, match="of one head has a state of 5 numbers: take an even number"):
        HybridDecoder(CONFIG, (1,), 5)
    model = HybridDecoder(replace(CONFIG, delta_layers=(1,)))
    assert (model.num_kv_layers, model.num_state_layers) == (3, 1)


@pytest.mark.parametrize("size", [4, 7, 12, 20])
def test_any_decoder_is_a_hybrid_with_states_of_a_size(size: int) -> None:
    """A config that names no recurrent layers, and which of them are."""
    model = HybridDecoder(replace(CONFIG, delta=None, delta_layers=()), (0, 2), size)
    assert (model.state_size, model.num_state_layers, model.config.delta_layers) == (size, 2, (0, 2))
    assert model.config.delta.size == sum(model.state_parts.values()) == size
