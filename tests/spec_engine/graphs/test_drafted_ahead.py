"""Under schedule "overlap" a drafted step is launched before the host has heard how much the one before it accepted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.invariants import AcceptanceError, BranchLayoutError, TreeShapeError
from kvcanary_kernels.record.layout import CHAIN
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.acceptance.walk import NO_TOKEN
from spec_engine.drafting.layout import branch_stride, longest_starts
from spec_engine.graphs import drafting
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Standalone
from spec_engine.models.embedded import load_excerpts

PROMPTS = [excerpt.prompt[: 30 + 9 * number] for number, excerpt in enumerate(load_excerpts()[20:23])]
TREES = {"topk": 2, "num_steps": 2, "page_size": 4}
CHAINS = {"topk": 1, "num_steps": 3, "page_size": 1}
UNPOISONED = "freed pages reused before they were poisoned"
AHEAD = {"dtype": "float64", "schedule": "overlap", "graphs": "on", "graph_buckets": [1, 3]}


def run(engine: Engine, left: dict[str, list[int]]) -> dict[str, list[int]]:
    """To the end; tokens by request."""
    while engine.has_work:
        for event in engine.step():
            left.setdefault(event.request_id, []).extend(event.token_ids)
    return left


def is_clean(engine: Engine) -> bool:
    """Nothing fired, and nothing of a captured step went unchecked: freed pages may wait for their poison."""
    certificate = engine.canary.certificate()
    return not certificate["findings"] and certificate["unchecked"].keys() <= {UNPOISONED}


@pytest.mark.parametrize(
    ("mode", "settings"),
    [("raise", TREES), ("off", CHAINS), ("raise", {"draft": "eagle", "page_size": 16, "topk": 4})],
    ids=str,
)
def test_nobody_waits_for_a_drafted_step(make, outcome, waits, mode, settings) -> None:
    """Requests come, end and go over buckets and a size that has none; each gets what it gets from plain steps."""
    prompts = [excerpt.prompt[: 40 + 7 * number] for number, excerpt in enumerate(load_excerpts()[20:26])]
    sampling = {"max_new_tokens": 9, "ignore_eos": False}
    plain, _ = outcome(make("off", draft="none", dtype="float64"), prompts, **sampling)
    engine = make(mode, **settings | AHEAD)
    assert outcome(engine, prompts, **sampling)[0] == plain
    assert waits == []
    assert engine.canary is None or is_clean(engine)


def test_truth_goes_to_each_feed_in_its_own_turn(make, outcome) -> None:
    """A step runs without its extend where all of its requests end, and from then on the turns of the two differ."""
    plain, _ = outcome(make("off", draft="none", dtype="float64"))
    engine = make(**TREES | AHEAD)
    with torch.inference_mode():
        for bucket in engine.runner._buckets:
            bucket.step._feed.send()
    assert outcome(engine)[0] == plain
    assert is_clean(engine)


@pytest.mark.parametrize(("page_size", "topk"), [(4, 1), (16, 2)])
def test_a_draft_model_that_is_one_entry_ahead(waits, page_size, topk) -> None:
    """Drafting for itself it is accepted whole, steps that nobody has heard of too."""
    target, settings = random_model(3, logit_scale=30.0, max_position_embeddings=128), {"page_size": page_size}
    config = EngineConfig(draft="standalone", topk=topk, num_steps=3, canary=CanaryConfig(), **settings | AHEAD)
    engine = Engine(config, model=target, draft=Standalone(target, target), tokenizer=MockTokenizer())
    alone = Engine(EngineConfig(draft="none", dtype="float64", **settings), model=target, tokenizer=MockTokenizer())
    prompts, params = [[5, 6, 7], [9] * 17 + [2]], SamplingParams(max_new_tokens=29, ignore_eos=True)
    outputs = [[output.token_ids for output in own.generate(prompts, params)] for own in (engine, alone)]
    assert outputs[0] == outputs[1]
    assert (engine.metrics.accepted_length, waits, is_clean(engine)) == (4, [], True)


@pytest.mark.parametrize(
    ("schedule", "sampling"), [("sync", {}), ("overlap", {"temperature": 0.7, "seed": 2}), ("overlap", {"logprobs": 1})]
)
def test_where_the_host_is_needed_it_waits(make, outcome, monkeypatch, waits, schedule, sampling) -> None:
    """A host that is not to be behind, what is drawn behind the program, and log-probabilities."""
    follow = "spec_engine.graphs.extend.ExtendProgram.follow"
    monkeypatch.setattr(follow, lambda *_: pytest.fail("extended by what nobody has heard"))
    settings = TREES | AHEAD | {"schedule": schedule}
    plain, _ = outcome(make(dtype="float64", **TREES), **sampling)
    assert outcome(make(**settings), **sampling)[0] == plain
    assert bool(waits) is not bool(sampling)


def test_a_request_that_draws_joins_and_leaves(make, waits) -> None:
    """The host catches up before the program no longer decides, and goes ahead again when it does."""
    greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
    drawn = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.8, seed=3)
    engine = make(**TREES | AHEAD)
    first = engine.submit(PROMPTS[0], greedy)
    left: dict[str, list[int]] = {first: []}
    for _ in range(5):
        for event in engine.step():
            left[event.request_id] += event.token_ids
    joined = engine.submit(PROMPTS[1], drawn)
    run(engine, left)
    plain = make("off", draft="none", dtype="float64")
    truths = [plain.generate([prompt], own)[0].token_ids for prompt, own in zip(PROMPTS, (greedy, drawn), strict=False)]
    assert [tuple(left[name]) for name in (first, joined)] == truths
    assert (waits, is_clean(engine)) == ([], True)


def test_a_stop_string_within_a_step_that_others_follow(make) -> None:
    """Text ends before it, and what a step behind it has accepted is nobody's; its pages add up."""
    plain = make("off", draft="none", dtype="float64")
    text = plain.generate(PROMPTS[:1], SamplingParams(max_new_tokens=24, ignore_eos=True))[0].text
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop=[text[len(text) // 2 :][:3]])
    wanted = [output.text for output in plain.generate(PROMPTS, params)]
    engine = make(**CHAINS | AHEAD)
    assert [output.text for output in engine.generate(PROMPTS, params)] == wanted
    assert is_clean(engine)


def started(make, mode: str = "raise", steps: int = 5, **settings: object) -> Engine:
    """Some steps after its prompts were submitted, one of them unheard."""
    engine = make(mode, prefix_cache=False, **TREES | AHEAD | settings)
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    return engine


def test_a_step_is_launched_with_the_lengths_of_before_the_last(make) -> None:
    """It names no token and no length until it has landed; the canary's ledger goes on when it is judged."""
    engine = started(make)
    before = {request.request_id: request.committed_len for request in engine.running}
    result = engine._pending[-1].result
    assert (result.is_collected, [part.tokens for part in result.parts]) == (False, [[NO_TOKEN]] * 2)
    assert all(part.committed_len < before[part.request.request_id] for part in result.parts)
    manager_state = engine.canary.session.ledger.requests
    assert [manager_state[name].committed_len for name in before] == list(before.values())
    assert [manager_state[name].pending_acceptances for name in before] == [1, 1]
    assert all(engine.relay.lens[request.row] > request.committed_len for request in engine.running)


def test_a_request_is_cancelled_with_a_step_in_the_air(make) -> None:
    """Its pages come back, and the other goes on."""
    engine = started(make)
    names = [request.request_id for request in engine.running]
    left = {names[0]: list(engine.running[0].output_ids)}
    engine.cancel(names[1])
    run(engine, left)
    truth = make("off", draft="none", dtype="float64").generate(
        PROMPTS[:1], SamplingParams(max_new_tokens=20, ignore_eos=True)
    )
    assert tuple(left[names[0]]) == truth[0].token_ids
    assert is_clean(engine)


# what goes wrong between steps that nobody has heard of


def step_until_it_stops(engine: Engine) -> tuple[list, KVCorruptionError]:
    events: list = []
    with pytest.raises(KVCorruptionError) as caught:
        collect(engine, events)
    return events, caught.value


def collect(engine: Engine, events: list) -> None:
    while engine.has_work:
        events += engine.step()


@pytest.mark.parametrize("by", [1, -1])
def test_a_length_that_the_device_has_wrong(make, by) -> None:
    """R10 in the very step, though the host does not know the length: truth goes on by what was accepted."""
    engine = started(make)
    request = engine.running[1]
    engine.relay.lens[request.row] += by
    step = engine.canary.step + 1
    _, error = step_until_it_stops(engine)
    reported = {(finding.code, finding.step, finding.reader) for finding in error.findings}
    assert ("R10", step, request.request_id) in reported


def test_accepted_entries_of_another_path(make, monkeypatch) -> None:
    """R6 where the row ends, in the very next step: a whole, consistent row, but not that of the accepted tokens.

    A sibling of the accepted node is moved to the front in its place; nothing but the row's own chain can tell.
    """
    engine, struck = started(make), []
    compact = drafting.compact

    def of_a_sibling(pool, windows, accepted, is_decided):
        nodes, parents = accepted.nodes.clone(), engine.runner._bucket.step._tree.parents
        for row in range(2):
            siblings = [n for n in range(1, parents.shape[1]) if parents[row, n] == 0 and n != nodes[row, 1]]
            if not struck and accepted.lens[row] == 2 and siblings:
                nodes[row, 1] = siblings[0]
                struck.append((engine.canary.step, int(windows[row, 1]), engine.running[row].request_id))
        return compact(pool, windows, replace(accepted, nodes=nodes), is_decided)

    monkeypatch.setattr(drafting, "compact", of_a_sibling)
    _, error = step_until_it_stops(engine)
    step, slot, reader = struck[0]
    reported = {(one.code, one.pool, one.slot, one.step, one.reader) for one in error.findings if one.pool == "target"}
    assert reported == {("R6", "target", slot, step + 1, reader)}


def test_no_token_leaves_of_a_step_that_read_damage(make) -> None:
    """Tokens of steps before it do, and of no step behind it, though that was launched by then."""
    engine = started(make)
    request = engine.running[1]
    sampled = int(engine.relay.lens[request.row]) + 1 - request.prompt_len
    left = list(request.output_ids)
    engine.canary.session.state.by_name["target"].records[request.pages[0] * 4 + 1, CHAIN] ^= 1 << 40
    events, error = step_until_it_stops(engine)
    left += [token for event in events if event.request_id == request.request_id for token in event.token_ids]
    assert len(left) == sampled
    assert error.findings[0].code == "R3"


@pytest.mark.parametrize("mode", ["off", "raise"])
def test_the_host_hears_other_tokens_than_were_accepted(make, monkeypatch, mode) -> None:
    """What goes out to the client is not what was accepted, or not what the device goes on with: no token leaves."""
    engine = started(make, mode=mode)
    send = engine.results.send

    def changed(result, sums):
        landing = send(result, sums)
        engine.results._streams.collected(landing.event)
        landing.staging.tensor[1] ^= 1
        monkeypatch.setattr(engine.results, "send", send)
        return landing

    monkeypatch.setattr(engine.results, "send", changed)
    step, name = engine._step_number, engine.running[0].request_id
    with pytest.raises(AcceptanceError, match=f"{name}: (its tree was drafted behind|. nodes accepted)"):
        run(engine, {})
    assert engine._step_number <= step + 3


def test_a_length_that_the_host_hears_wrong(make) -> None:
    """H1: the canary was told by the device how far entries are final."""
    engine = started(make, mode="log")
    commit, request = engine.canary.commit_all, engine.running[0]
    engine.canary.commit_all = lambda names, lens: commit(
        names, [length + (name == request.request_id) for name, length in zip(names, lens, strict=True)]
    )
    engine.step()
    engine.canary.commit_all = commit
    engine.step()
    found = [finding for finding in engine.canary.findings if finding.code == "H1"]
    assert [finding.reader for finding in found] == [request.request_id]
    assert found[0].found["committed_len"] == found[0].expected["committed_len"] + 1


def test_an_extend_that_writes_less_than_was_accepted(make, monkeypatch) -> None:
    """H1: how much it has to write is known from what was accepted, when the host hears."""
    engine = started(make, mode="log")
    bucket = engine.runner._buckets[-1]
    path = bucket.extend._path
    monkeypatch.setattr(bucket.extend, "_path", lambda: path()._replace(counts=(path().counts - 1).clamp_min(0)))
    record = bucket.extend._acceptance.record
    monkeypatch.setattr(
        bucket.extend._acceptance, "record", lambda rows, counts, tokens: record(rows, path().counts, tokens)
    )
    step = engine.canary.step + 1
    for _ in range(2):
        engine.step()
    assert ("H1", "extend", step) in {(one.code, one.site[0], one.step) for one in engine.canary.findings}


def test_a_path_that_is_none_of_its_tree(make, monkeypatch) -> None:
    """What the host checks of a tree that it waits for it checks of one that it hears of later."""
    engine = started(make, mode="off")
    send = engine.results.send

    def changed(result, sums):
        result.drafted.parents[0, 1] = 5
        return send(result, sums)

    monkeypatch.setattr(engine.results, "send", changed)
    with pytest.raises(TreeShapeError, match="has parent 5"):
        run(engine, {})


@pytest.mark.parametrize("mode", ["raise", "abort"])
def test_the_canary_is_collected_before_a_tree_is_checked(make, monkeypatch, mode) -> None:
    """Damage and a tree that is none in one step: the report comes first, and who ends by it has no tree to check."""
    engine = started(make, mode=mode)
    send, request = engine.results.send, engine.running[0]

    def changed(result, sums):
        if engine.canary.step >= step and result.drafted is not None:
            result.drafted.parents[:, 1] = 5
        return send(result, sums)

    monkeypatch.setattr(engine.results, "send", changed)
    step = engine.canary.step + 1
    for one in engine.running:
        slot = int(engine.request_table.table[one.row, 2])
        engine.canary.session.state.by_name["target"].records[slot, CHAIN] ^= 1 << 40
    events: list = []
    error = KVCorruptionError if mode == "raise" else None
    with pytest.raises(error) if error else nullcontext():
        while engine.has_work and request in engine.running:
            events += engine.step()
    assert engine.canary.findings[0].code == "R3"


def test_pages_reach_as_far_as_an_uncollected_step_may(make, monkeypatch) -> None:
    """The window of the next step begins behind the longest chain that the last one may have accepted."""
    engine = started(make, mode="off", **CHAINS)
    request, most = engine.running[0], CHAINS["num_steps"] + 1
    monkeypatch.setattr(engine.memory, "grow", lambda *_: 0)
    monkeypatch.setattr(engine.scheduler, "decode_estimate", lambda _: 0)
    del request.pages[request.committed_len + 2 * most - 1 :]
    with torch.inference_mode(), pytest.raises(BranchLayoutError, match=f"{request.request_id}: verify window"):
        engine._decode(engine.running)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_the_longest_of_several_lengths_is_among_those_asked(page_size, topk) -> None:
    """Whatever the last step accepted, no branch ends further than those of the lengths that are looked at."""
    for num_steps in (1, 3, 6):
        for least in range(1, 40):
            for most in range(least, least + 8):
                ends = {s: s + (topk - 1) * branch_stride(s % page_size, num_steps, page_size) for s in range(50)}
                asked = longest_starts(least, most, page_size)
                assert all(least <= start <= most for start in asked)
                assert max(ends[s] for s in asked) == max(ends[s] for s in range(least, most + 1))
