"""What the host is told of a drafted step, and refuses before a token of it leaves, with the canary off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcanary import CanaryConfig, invariants
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.acceptance.acceptor import Acceptor
from spec_engine.acceptance.walk import NO_TOKEN, Acceptance
from spec_engine.drafting import tree as tree_module
from spec_engine.drafting.chain import ChainConstants
from spec_engine.drafting.drafter import Drafter
from spec_engine.drafting.drawn import DrawnDrafts
from spec_engine.drafting.tree import TreeGrowth
from spec_engine.graphs.drafting import DraftProgram
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Standalone
from spec_engine.step.relay import Relay

PROMPTS = [list(range(3, 12)), list(range(20, 34)), list(range(40, 47))]
TREE = {"topk": 2, "num_steps": 3, "num_draft_tokens": 8}
CHAIN = {"topk": 1, "num_steps": 3}
CAPTURED = {"graphs": "on", "graph_buckets": [4]}
WAYS = {
    "trees": TREE,
    "trees, overlap": TREE | {"schedule": "overlap"},
    "chains": CHAIN,
    "adaptive": CHAIN | {"adaptive_steps": True},
    "captured trees": TREE | CAPTURED,
    "captured trees, overlap": TREE | CAPTURED | {"schedule": "overlap"},
    "captured chains, overlap": CHAIN | CAPTURED | {"schedule": "overlap"},
}
DRAWN = CHAIN | {"acceptance": "rejection"}
TREES = [name for name in WAYS if "trees" in name]
CHAINS = [name for name in WAYS if name not in TREES]

Break = Callable[[pytest.MonkeyPatch], None]


def left_by(temperature: float = 0.0, **settings) -> tuple[dict[str, list[int]], Exception | None]:
    """The tokens that leave an engine whose draft is its target, and the error that stops it."""
    model = random_model(3, logit_scale=30.0, max_position_embeddings=128)
    config = EngineConfig(
        draft="standalone",
        dtype="float64",
        page_size=4,
        max_total_tokens=1024,
        canary=CanaryConfig(mode="off"),
        **settings,
    )
    engine = Engine(config, model=model, draft=Standalone(model, model), tokenizer=MockTokenizer())
    left: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=14 + number, ignore_eos=True, temperature=temperature, seed=number)
        left[engine.submit(prompt, params)] = []
    try:
        while engine.has_work:
            for event in engine.step():
                left[event.request_id] += event.token_ids
    except invariants.InvariantError as error:
        return left, error
    return left, None


def refused(monkeypatch: pytest.MonkeyPatch, break_it: Break, temperature: float = 0.0, **settings) -> Exception:
    """What stops the broken engine; the tokens that left before are those of one that nobody breaks."""
    clean, error = left_by(temperature, **settings)
    assert error is None
    break_it(monkeypatch)
    left, error = left_by(temperature, **settings)
    assert error is not None
    assert all(tokens == clean[name][: len(tokens)] for name, tokens in left.items())
    return error


def neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request drafts from what was proposed to the one beside it."""
    own = Drafter.proposals
    monkeypatch.setattr(Drafter, "proposals", lambda drafter, rows: own(drafter, rows.roll(1)))


def earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals reach the relay by the prefill alone."""
    extend, propose = Drafter.extend, Drafter.propose_from

    def kept(drafter, kind, batch, *rest):
        before = drafter._tokens.clone()
        extend(drafter, kind, batch, *rest)
        if kind == "extend":
            drafter._tokens.copy_(before)

    monkeypatch.setattr(Drafter, "extend", kept)
    monkeypatch.setattr(Drafter, "propose_from", lambda drafter, rows, *rest: propose(drafter, 0 * rows, *rest))


@pytest.mark.parametrize("break_it", [neighbours, earlier])
@pytest.mark.parametrize("way", WAYS)
def test_proposals_of_another_row_or_step_are_refused(monkeypatch, way, break_it):
    """They cost acceptance and no token is wrong: the device says for whom they lay there, in every kind of step."""
    error = refused(monkeypatch, break_it, **WAYS[way])
    assert type(error) is invariants.RelayError
    assert "but was given the proposals of row " in str(error)


@pytest.mark.parametrize("break_it", [neighbours, earlier])
def test_proposals_of_drawn_drafts_are_refused(monkeypatch, break_it):
    """The same where drafts are drawn."""
    assert type(refused(monkeypatch, break_it, 0.8, **DRAWN)) is invariants.RelayError


def test_what_drafts_were_drawn_from_belongs_to_their_request(monkeypatch):
    """Probabilities of a neighbour would change what is sampled."""

    def neighbours_probs(monkeypatch):
        begin = DrawnDrafts.begin

        def rolled(drawn, batch):
            drawn._first, own = drawn._first.index_copy(0, batch.rows, drawn._first[batch.rows.roll(1)]), drawn._first
            begin(drawn, batch)
            drawn._first = own

        monkeypatch.setattr(DrawnDrafts, "begin", rolled)

    error = refused(monkeypatch, neighbours_probs, 0.8, **DRAWN)
    assert type(error) is invariants.RelayError
    assert str(error).count("at length") == 3


@pytest.mark.parametrize("way", ["trees", "captured trees, overlap"])
def test_proposals_of_who_had_the_row_before_are_refused(monkeypatch, way):
    """A request of the same length in the same row does not go on from what was proposed to the one before."""
    model = random_model(3, logit_scale=30.0, max_position_embeddings=128)
    config = EngineConfig(draft="standalone", dtype="float64", page_size=4, max_running_requests=1, **WAYS[way])
    engine = Engine(config, model=model, draft=Standalone(model, model), tokenizer=MockTokenizer())
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    engine.generate([PROMPTS[0]], params)
    extend = engine.drafter.extend

    def unwritten(*reported):
        before = engine.drafter._tokens.clone()
        extend(*reported)
        engine.drafter._tokens.copy_(before)

    engine.drafter.extend = unwritten
    with pytest.raises(invariants.RelayError, match=r"given the proposals of row 0 at length 0"):
        engine.generate([PROMPTS[0][::-1]], SamplingParams(max_new_tokens=8, ignore_eos=True))


def accepting(change: Callable[[Acceptance], Acceptance]) -> Break:
    """What a step has accepted is changed, eager or captured."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        walk, accept = Acceptor._walk, DraftProgram._accept

        def walked(acceptor, logits, settings, nodes):
            accepted = walk(acceptor, logits, settings, nodes)
            return accepted if nodes.tree is None else change(accepted)

        monkeypatch.setattr(Acceptor, "_walk", walked)
        monkeypatch.setattr(DraftProgram, "_accept", lambda program, tree: change(accept(program, tree)))

    return break_it


def another_token(accepted: Acceptance) -> Acceptance:
    """What leaves behind the root is not the draft that was accepted."""
    predict = accepted.predict.clone()
    predict[:, 0] ^= 1
    return Acceptance(accepted.nodes, accepted.lens, predict)


def a_wrong_child(accepted: Acceptance) -> Acceptance:
    """The walk goes to the last node, a child of another path or none."""
    nodes = accepted.nodes.clone()
    nodes[:, 1] = accepted.predict.shape[1] - 1
    return Acceptance(nodes, accepted.lens.clamp_max(2), accepted.predict)


def no_token(accepted: Acceptance) -> Acceptance:
    """The last node that was accepted has nothing behind it."""
    predict = accepted.predict.clone()
    last = accepted.nodes.gather(1, accepted.lens[:, None] - 1)
    return Acceptance(accepted.nodes, accepted.lens, predict.scatter(1, last, NO_TOKEN))


def too_many(accepted: Acceptance) -> Acceptance:
    """More nodes are counted than the path has places."""
    return Acceptance(accepted.nodes, accepted.lens + accepted.nodes.shape[1], accepted.predict)


@pytest.mark.parametrize("way", ["trees", "chains", "captured trees", "captured chains, overlap"])
@pytest.mark.parametrize("change", [another_token, a_wrong_child])
def test_a_draft_that_is_accepted_is_what_leaves(monkeypatch, way, change):
    """No token of the step that accepts something else than it emits leaves."""
    error = refused(monkeypatch, accepting(change), **WAYS[way])
    assert type(error) in (invariants.AcceptanceError, invariants.TreeShapeError)
    assert type(error) is invariants.AcceptanceError or change is a_wrong_child


@pytest.mark.parametrize("rule", ["rejection", "tree"])
def test_sampled_drafts_that_are_accepted_are_what_leaves(monkeypatch, rule):
    """The same where drafts are kept by their probability."""
    settings = DRAWN if rule == "rejection" else TREE | {"acceptance": "tree"}
    error = refused(monkeypatch, accepting(another_token), 0.8, **settings)
    assert "must be the tokens emitted before the last" in str(error)


@pytest.mark.parametrize("change", [no_token, too_many])
def test_what_is_no_token_does_not_leave(monkeypatch, change):
    """A node without a token behind it, and more nodes than there are places."""
    assert type(refused(monkeypatch, accepting(change), **CHAIN)) is invariants.AcceptanceError


@pytest.mark.parametrize("way", ["trees", "trees, overlap", "chains"])
def test_a_tree_hangs_on_the_token_that_left(monkeypatch, way):
    """A relay that goes on with another token than the bonus is seen at the next step, before its tokens leave."""

    def other_bonus(monkeypatch):
        publish = Relay.publish
        monkeypatch.setattr(
            Relay, "publish", lambda relay, rows, lens, bonus: publish(relay, rows, lens, [one ^ 1 for one in bonus])
        )

    error = refused(monkeypatch, other_bonus, **WAYS[way])
    assert type(error) is invariants.AcceptanceError
    assert "its tree was drafted behind token" in str(error)


def within(method: str, operation: str, change: Callable) -> Break:
    """``change`` is what a tensor's operation gives while a tree does this."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        own, work = getattr(torch.Tensor, operation), getattr(TreeGrowth, method)

        def changed(growth, *reported):
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, operation, lambda tensor, *how, **more: change(own(tensor, *how, **more)))
                return work(growth, *reported)

        monkeypatch.setattr(TreeGrowth, method, changed)

    return break_it


def survivor_beyond(found: tuple) -> tuple:
    """The likeliest survivor has a number that no candidate has."""
    return found[0], found[1].index_fill(1, torch.tensor([0]), 1 << 40)


def candidate_beyond(found: tuple) -> tuple:
    """So has the last of the chosen candidates, when they are put in order."""
    if not found[0].is_floating_point():
        found[0][:, -1] += 1000
    return found


def building(change: Callable[[torch.Tensor, torch.Tensor], None]) -> Break:
    """The index arrays of a tree are changed before it is built of them."""

    def break_it(monkeypatch: pytest.MonkeyPatch) -> None:
        build = tree_module.build_tree

        def changed(nodes, chosen, parent_list, *shape):
            change(chosen, parent_list)
            return build(nodes, chosen, parent_list, *shape)

        monkeypatch.setattr(tree_module, "build_tree", changed)

    return break_it


def parent_beyond(chosen: torch.Tensor, parents: torch.Tensor) -> None:
    """A survivor's entry of the parent list is no candidate."""
    parents[:, 1] = 10**6


def parent_below(chosen: torch.Tensor, parents: torch.Tensor) -> None:
    """The same, below all."""
    parents[:, 1] = -(10**6)


def chosen_beyond(chosen: torch.Tensor, parents: torch.Tensor) -> None:
    """A node is of no candidate."""
    chosen[:, -1] += 1000


@pytest.mark.parametrize(
    "break_it",
    [
        within("survive", "topk", survivor_beyond),
        within("finish", "sort", candidate_beyond),
        *map(building, (parent_beyond, parent_below, chosen_beyond)),
    ],
    ids=["survivor", "candidate", "parent beyond", "parent below", "chosen"],
)
@pytest.mark.parametrize("way", TREES)
def test_indices_out_of_range_are_told_with_the_step(monkeypatch, way, break_it):
    """Nothing is gathered by them, and the step's results say which node has no parent."""
    error = refused(monkeypatch, break_it, **WAYS[way])
    assert type(error) is invariants.TreeShapeError
    assert "has parent -1, must lie in [0, " in str(error)


@pytest.mark.parametrize("way", CHAINS)
def test_a_mask_that_is_none_of_a_chain_is_told_with_the_step(monkeypatch, way):
    """Constants that somebody has written to since they were made; what each node sees is counted where it is used."""

    def damaged(monkeypatch):
        tree = ChainConstants.tree

        def of_a_shorter_one(constants, tokens):
            constants._shape.mask[:, 2:, :2] = False
            return tree(constants, tokens)

        monkeypatch.setattr(ChainConstants, "tree", of_a_shorter_one)

    error = refused(monkeypatch, damaged, **WAYS[way])
    assert type(error) is invariants.TreeShapeError
    assert "by the mask the nodes see [1, 2, 1, 2] nodes, by their parents [-1, 0, 1, 2] it must be" in str(error)


@pytest.mark.parametrize("way", TREES)
def test_a_mask_that_is_not_of_its_tree_is_told_with_the_step(monkeypatch, way):
    """Nodes that do not see their grandparents."""

    def one_up(monkeypatch):
        mask = tree_module.ancestor_mask
        monkeypatch.setattr(tree_module, "ancestor_mask", lambda parents, depth: mask(parents, 1))

    error = refused(monkeypatch, one_up, **WAYS[way])
    assert type(error) is invariants.TreeShapeError
    assert "by the mask the nodes see" in str(error)
