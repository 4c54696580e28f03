"""Forwards of the engine that run without the canary's hooks are named in their step, before a token of it leaves."""

from __future__ import annotations

import pytest

from kvcanary import CanaryConfig, HookOrderError, KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.invariants import MissingHooksError
from kvcanary.manager.substep import SubstepCanary, WarmupSubstep
from kvcanary.records.state import CanaryState
from kvcanary.replay.replayer import replay
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.graphs import hooks
from spec_engine.mock import MockDraft, MockModel, MockTokenizer, TokenOracle

ORACLE = TokenOracle(3, 997)
PROMPTS = [[11, 4, 8, 15, 16, 23, 42], [12, 4, 9], [13, *range(50, 70)]]
GREEDY = SamplingParams(max_new_tokens=9, ignore_eos=True)
TREE = {"topk": 2, "num_steps": 4, "num_draft_tokens": 8}
CHAIN = {"topk": 1, "num_steps": 4}
PAGED = TREE | {"attention_backend": "paged", "page_size": 4}
PLAIN = {"draft": "none"}


def make(mode="raise", content="full", **settings) -> Engine:
    """An engine on a mock model; drafts are right up to the third token."""
    target = MockModel(ORACLE)
    drafts = settings.get("draft") != "none"
    common = {"dtype": "float64", "max_total_tokens": 2048, "context_length": 128, "prefill_chunk_tokens": 8}
    config = EngineConfig(**common | settings, canary=CanaryConfig(mode=mode, content=content, seed=3))
    draft = MockDraft(target, lambda request, at: 1 + at % 3) if drafts else None
    return Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())


def lose_hooks(engine: Engine, forward: tuple[str, int, str], times: int = 1) -> list[int]:
    """The next ones of this kind, index and pool run without hooks; in which steps they did."""
    own, steps = engine.canary.forward, []

    def substep(kind, index, pool, puts=False):
        if (kind, index, pool) == forward and len(steps) < times:
            steps.append(engine.canary.step)
            return WarmupSubstep()
        return own(kind, index, pool, puts=puts)

    engine.canary.forward = substep
    return steps


def run(engine: Engine) -> dict[str, list[int]]:
    """Tokens that have left, by request, when all have ended."""
    left: dict[str, list[int]] = {}
    for prompt in PROMPTS:
        left[engine.submit(prompt, GREEDY)] = []
    while engine.has_work:
        for event in engine.step():
            left[event.request_id] += event.token_ids
    return left


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(
    ("settings", "kind", "index", "pool"),
    [
        (TREE, "prefill", 0, "target"),
        (TREE, "prefill", 0, "draft"),
        (TREE, "draft", 0, "draft"),
        (PAGED, "draft", 1, "draft"),
        (CHAIN, "draft", 2, "draft"),
        (TREE, "verify", 0, "target"),
        (CHAIN, "extend", 0, "draft"),
        (PLAIN, "decode", 0, "target"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_forward_without_hooks_stops_its_own_step(settings, kind, index, pool, schedule):
    """One finding, H1 with kind, index and pool; what follows is evidence, and nothing that the step sampled leaves."""
    engine = make(schedule=schedule, content="rolling" if schedule == "overlap" else "full", **settings)
    steps = lose_hooks(engine, (kind, index, pool))
    sampled: list[int] = []
    own = engine.results.send
    engine.results.send = lambda result, sums: sampled.append(engine.canary.step) or own(result, sums)
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    [finding] = caught.value.findings
    assert (finding.code, finding.site, finding.pool, [finding.step]) == ("H1", (kind, index), pool, steps)
    assert finding.step == engine.canary.step
    assert finding.step not in sampled
    assert finding.causes[0].family == "hooks"
    assert f"{pool} pool, {kind}" in str(caught.value)
    assert finding.reader in {f"req-{number}" for number in range(len(PROMPTS))}


@pytest.mark.parametrize(
    "forward", [("prefill", 0, "draft"), ("draft", 2, "draft"), ("verify", 0, "target"), ("extend", 0, "draft")]
)
def test_a_dump_is_replayed_up_to_it(forward, tmp_path):
    """The recording holds what was announced, and what has opened: the replay reaches the same finding."""
    engine = make(**CHAIN)
    lose_hooks(engine, forward)
    with pytest.raises(KVCorruptionError):
        run(engine)
    dump = read_dump(engine.canary.dump(tmp_path / "found.kvdump"))
    outcome = replay(dump)
    assert (outcome.missing, outcome.errors) == ([], [])
    assert [(one.code, one.site) for one in outcome.findings] == [("H1", forward[:2])]


@pytest.mark.parametrize("forward", [("verify", 0, "target"), ("extend", 0, "draft")])
def test_abort_ends_the_requests_of_the_forward(forward):
    """And no others: those that come later are served, and the engine goes on."""
    engine = make(mode="abort", **CHAIN)
    lose_hooks(engine, forward)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert {output.finish_reason for output in outputs} == {"kv_corruption"}
    assert [finding.code for finding in engine.canary.findings] == ["H1"]
    [output] = engine.generate(PROMPTS[:1], GREEDY)
    assert list(output.token_ids) == ORACLE.continuation(PROMPTS[0], 9)


@pytest.mark.parametrize("forward", [("draft", 1, "draft"), ("verify", 0, "target"), ("decode", 0, "target")])
def test_log_tells_it_once_and_goes_on(forward):
    """Entries that were left unwritten are no second finding, however often they are read."""
    engine = make(mode="log", **(PLAIN if forward[0] == "decode" else CHAIN))
    lose_hooks(engine, forward)
    assert list(run(engine).values()) == [ORACLE.continuation(prompt, 9) for prompt in PROMPTS]
    found = engine.canary.findings
    assert (found[0].code, found[0].site) == ("H1", forward[:2])
    assert not {"R10", "R12"} & {finding.code for finding in found}
    assert {finding.incident for finding in found} == {1}


def test_another_forward_without_hooks_is_another_incident():
    """Of the same requests and pool, and told too; the same one again is counted."""
    engine = make(mode="log", **CHAIN)
    lose_hooks(engine, ("draft", 2, "draft"), times=3)
    lose_hooks(engine, ("extend", 0, "draft"))
    run(engine)
    found = [finding for finding in engine.canary.findings if finding.code == "H1"]
    assert [(finding.site, finding.incident) for finding in found] == [(("draft", 2), 1), (("extend", 0), 2)]
    assert engine.canary.certificate()["fired"]["H1"] >= 4


@pytest.mark.parametrize("settings", [TREE, CHAIN])
def test_numbers_that_repeat_are_named(settings):
    """All draft forwards are opened as draft[0]: the second one is draft[1] by its rows, and R10 is no finding."""
    engine = make(**settings)
    own = engine.canary.forward
    engine.canary.forward = lambda kind, index, pool, puts=False: own(kind, 0, pool, puts=puts)
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    [finding] = caught.value.findings
    assert (finding.code, finding.site, finding.expected, finding.found) == (
        "H1",
        ("draft", 0),
        {"number": 1},
        {"number": 0},
    )
    assert (finding.causes[0].family, "repeat" in finding.causes[0].text) == ("hooks", True)
    assert [line for line in finding.evidence if "draft[1]" in line]


def test_a_forward_that_is_closed_by_nobody_is_refused_in_its_step(monkeypatch):
    """Also the last one of a step, which runs when that has been judged."""
    engine = make(**CHAIN)
    own = engine.canary.forward

    def substep(kind, index, pool, puts=False):
        opened = own(kind, index, pool, puts=puts)
        if kind == "extend":
            monkeypatch.setattr(SubstepCanary, "close", lambda hooks: None)
        return opened

    engine.canary.forward = substep
    with pytest.raises(HookOrderError, match=r"check_forwards\(\) must wait for close\(\) of extend of the dra"):
        run(engine)


def test_a_forward_that_judges_itself_must_open_too(monkeypatch, tmp_path):
    """A lagging host hears of it with the step, and no token of that step leaves; here the CPU plays the device."""
    monkeypatch.setattr(CanaryState, "judges_on_device", True)
    engine = make(schedule="overlap", content="rolling", **PLAIN)
    steps = lose_hooks(engine, ("decode", 0, "target"))
    with pytest.raises(KVCorruptionError) as caught:
        run(engine)
    [finding, *_] = caught.value.findings
    assert (finding.code, finding.site, [finding.step]) == ("H1", ("decode", 0), steps)
    assert engine.canary.step == finding.step
    outcome = replay(read_dump(engine.canary.dump(tmp_path / "found.kvdump")))
    assert (outcome.missing, len(outcome.findings)) == ([], 1)


@pytest.mark.parametrize(
    ("settings", "schedule"),
    [(TREE, "sync"), (CHAIN, "overlap"), (PAGED, "overlap"), (PLAIN, "overlap"), (TREE, "graphs")],
)
def test_clean_runs_say_nothing_and_count(settings, schedule):
    """The certificate has how many forwards were announced: all eager ones."""
    graphs = {"schedule": "overlap", "graphs": "on"} if schedule == "graphs" else {"schedule": schedule}
    engine = make(**settings | graphs)
    eager: list[str] = []
    own = engine.canary.forward
    engine.canary.forward = lambda kind, *where, **how: eager.append(kind) or own(kind, *where, **how)
    assert list(run(engine).values()) == [ORACLE.continuation(prompt, 9) for prompt in PROMPTS]
    certificate = engine.canary.certificate()
    assert (certificate["findings"], certificate["announced"]) == ([], len(eager))
    assert engine.canary.forwards.expected.due == []


def test_a_branch_of_a_captured_tree_without_hooks_is_refused_by_name(monkeypatch):
    """Before the hooks of the next forward, which build on it, are refused for want of it."""
    own = hooks.StaticForwards._hook

    def hook(self, forward, rows, is_deferred):
        made = own(self, forward, rows, is_deferred) if (forward.kind, forward.index) != ("draft", 1) else None
        return made or hooks.Hooked(forward, rows, forward.slots, None, None)

    monkeypatch.setattr(hooks.StaticForwards, "_hook", hook)
    with pytest.raises(
        MissingHooksError, match=r"^draft\[1\] of the draft pool has no hooks in the captured program for 2"
    ):
        make(graphs="on", graph_buckets=(2,), **TREE)


@pytest.mark.parametrize("mode", ["log", "raise", "abort"])
@pytest.mark.parametrize("lost", [("draft", 1), ("verify", 0), ("extend", 0), ("decode", 0)])
def test_a_program_without_hooks_in_one_forward_is_refused_at_start(lost, mode, monkeypatch):
    """The error names the forward, its pool and the size of the program; without a canary there is none."""
    own = hooks.StaticForwards.hook

    def hook(self, forward, rows, is_deferred=False):
        made = own(self, forward, rows, is_deferred)
        if (forward.kind, forward.index) == lost:
            object.__setattr__(made, "substep", None)
        return made

    monkeypatch.setattr(hooks.StaticForwards, "hook", hook)
    settings = {"graphs": "on", "graph_buckets": (2,), **(PLAIN if lost[0] == "decode" else CHAIN)}
    name = f"draft\\[{lost[1]}\\]" if lost[0] == "draft" else lost[0]
    pool = "target" if lost[0] in ("verify", "decode") else "draft"
    with pytest.raises(
        MissingHooksError, match=f"^{name} of the {pool} pool has no hooks in the captured program for 2"
    ):
        make(mode=mode, **settings)
    if mode == "raise":
        make(mode="off", **settings)
