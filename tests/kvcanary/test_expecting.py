"""Which forwards must open their hooks: those that an engine announces, and those that the numbers of others imply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fake_engine import FakeEngine
from kvcanary import CanaryConfig, CanaryManager, KVCorruptionError, PlanError
from kvcanary.manager.substep import WarmupSubstep

DRAFTS = [("draft", index, "draft") for index in range(2)]
VERIFY = ("verify", 0, "target")


@pytest.fixture
def engine(make_engine) -> FakeEngine:
    """It announces nothing, and has made one step with drafts."""
    engine = make_engine(content="full", num_steps=4)
    for name in ("a", "b"):
        engine.start(name, 9)
    engine.step()
    return engine


def lose_hooks(engine: FakeEngine, *forwards: tuple[str, int]) -> None:
    """Those of this kind and index run without hooks."""
    own = engine.canary.forward
    engine.canary.forward = lambda kind, index, pool: (
        WarmupSubstep() if (kind, index) in forwards else own(kind, index, pool)
    )


def found(call, *arguments):
    """The only finding in which the call ends."""
    with pytest.raises(KVCorruptionError) as caught:
        call(*arguments)
    [finding] = caught.value.findings
    assert finding.causes[0].family == "hooks"
    return finding


@pytest.mark.parametrize("lost", [[0], [1], [0, 1]])
def test_a_draft_forward_that_the_next_one_follows_is_missed(engine, lost):
    """Nobody has announced it: the number of the next one tells of it; what that reads unwritten is evidence."""
    lose_hooks(engine, *(("draft", index) for index in lost))
    finding = found(engine.step)
    assert (finding.code, finding.pool, finding.site) == ("H1", "draft", ("draft", lost[0]))
    assert finding.step == engine.step_number
    assert any(line.startswith("R12") for line in finding.evidence)
    assert sum(line.startswith("H1") for line in finding.evidence) == len(lost) - 1


def test_requests_whose_loops_take_turns_are_not_missed(engine):
    """Each has its own numbers, and a loop that begins again begins with 0."""
    for _ in range(2):
        engine.step("a")
        engine.step("b")
    engine._begin()
    rows = {"a": engine.rows["a"]}
    for _ in range(2):
        rows["a"].branches = [[] for _ in range(engine.topk)]
        for index in range(2):
            engine._draft(index, rows)
    engine.canary.collect(engine.canary.end_step())
    assert engine.canary.certificate()["findings"] == []


@pytest.mark.parametrize("number", [0, 2])
def test_draft_forwards_of_one_number_are_named(engine, number):
    """By the rows and positions of each the canary knows which one it is."""
    own = engine.canary.forward
    engine.canary.forward = lambda kind, index, pool: own(kind, number if kind == "draft" else index, pool)
    finding = found(engine.step)
    first = 1 if number == 0 else 0  # that is opened as another
    assert (finding.code, finding.site, finding.expected) == ("H1", ("draft", number), {"number": first})
    assert "numbers of substeps repeat" in finding.causes[0].text
    assert not [line for line in finding.evidence if not line.startswith("H1")]


def test_rows_of_another_length_than_their_number_are_a_wrong_length(engine):
    """R10 as ever where positions are those of the number."""
    read = lambda kind, index, pool, plan: (  # noqa: E731
        plan if kind != "draft" else _shortened(plan, engine.topk)
    )
    engine.change_read = read
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert {"R10"} <= {finding.code for finding in caught.value.findings} | {
        line.split()[0] for finding in caught.value.findings for line in finding.evidence
    }
    assert "H1" not in {finding.code for finding in caught.value.findings}


def _shortened(plan, topk):
    """Without the entry in front of each row's own."""
    ends, parts = plan.indptr.tolist(), []
    for row in range(len(ends) - 1):
        own = plan.indices[ends[row] : ends[row + 1]]
        prefix = int(plan.prefix_lens[row // topk])
        parts.append(torch.cat((own[:prefix], own[-1:])))
    lens = torch.tensor([0, *(len(part) for part in parts)])
    return replace(plan, indices=torch.cat(parts), indptr=lens.cumsum(0))


@pytest.mark.parametrize(("kind", "content"), [("extend", "full"), ("extend", "rolling"), ("prefill", "full")])
def test_final_entries_of_a_draft_pool_that_nobody_wrote_are_due_when_they_are_read(make_engine, kind, content):
    """H1 leads, though bytes and chains of these entries do not fit either; the cause names the forwards to look at."""
    engine = make_engine(content=content, num_steps=2)
    engine.start("a", 9)
    engine.step()
    own = engine.canary.forward
    engine.canary.forward = lambda one, index, pool: (
        WarmupSubstep() if (one, pool) == (kind, "draft") else own(one, index, pool)
    )
    if kind == "prefill":
        engine.start("b", 7)
    else:
        engine.step()
    finding = found(engine.step)
    name, row = ("b", 0) if kind == "prefill" else ("a", finding.found["entries"])
    assert (finding.code, finding.pool, finding.reader, finding.site) == ("H1", "draft", name, ("commit", 0))
    assert (finding.expected, finding.found) == ({"entries": engine.rows[name].committed}, {"entries": row})
    assert finding.position == row
    assert finding.causes[0].text.startswith("the extend or prefill that wrote")


def test_an_extend_that_writes_too_few_entries_is_a_wrong_length(make_engine):
    """It had hooks: that is no forward without them."""
    engine = make_engine(content="full", topk=1, num_steps=2, num_nodes=3)
    engine.start("a", 9)
    chain = engine._chain

    def short(kind, pool, fed, starts):
        if kind == "extend":
            accepted = {name: engine.rows[name].committed - starts[name] for name in fed}
            fed = {name: tokens[: max(accepted[name] - 1, 1)] for name, tokens in fed.items()}
            engine.is_short = max(accepted.values()) > 1
        chain(kind, pool, fed, starts)

    engine._chain, engine.is_short = short, False
    while not engine.is_short:
        engine.step()
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    codes = {finding.code for finding in caught.value.findings}
    assert "H1" not in codes
    assert "hooks" not in {finding.causes[0].family for finding in caught.value.findings if finding.code == "R10"}


# announced


@pytest.mark.parametrize("lost", [*DRAFTS, VERIFY])
def test_what_was_announced_must_open(engine, lost):
    """Also the last forward of a loop, of which no other tells; the requests are those of the announcement."""
    lose_hooks(engine, lost[:2])
    begin = engine._begin

    def announce():
        begin()
        engine.canary.expect([*DRAFTS, ("draft", 2, "draft"), VERIFY], ("a", "b"))

    engine._begin = announce
    finding = found(engine.step)
    assert (finding.code, finding.site, finding.pool, finding.readers) == ("H1", lost[:2], lost[2], ("a", "b"))
    assert finding.expected == {"opened": f"{lost[0]}{[lost[1]] if lost[0] == 'draft' else ''} ({lost[2]})"}


def test_what_runs_behind_the_check_is_judged_by_check_forwards(engine):
    """Once; and where nobody asks, with the next step."""
    engine.canary.expect([("extend", 0, "draft")], ("a",))
    assert found(engine.canary.check_forwards).site == ("extend", 0)
    assert engine.canary.check_forwards() == frozenset()
    engine.canary.expect([VERIFY], ("b",))
    last = engine.step_number
    finding = found(engine.step)  # whose own verify is another
    assert (finding.site, finding.step, finding.reader) == (("verify", 0), last, "b")


def test_two_forwards_of_one_name_are_two(engine):
    """One of them has opened, the other is due."""
    engine.canary.expect([VERIFY, VERIFY], ("a", "b"))
    finding = found(engine.step)
    assert finding.site == ("verify", 0)


def test_a_draft_loop_that_is_announced_is_not_guessed_about(engine):
    """An engine that announces says which forwards there are: none is missed because of a number."""
    lose_hooks(engine, ("draft", 0))
    begin = engine._begin

    def announce():
        begin()
        engine.canary.expect([VERIFY], ("a", "b"))

    engine._begin = announce
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert {"H1"} & {finding.code for finding in caught.value.findings} == set()


def test_a_forward_whose_plan_is_refused_has_opened(make_engine):
    """In mode log it is an L1 and goes on; its hooks were there."""
    engine = make_engine(mode="log", num_steps=2)
    engine.start("a", 9)
    engine.change_read = lambda kind, index, pool, plan: (
        replace(plan, indptr=plan.indptr + 1) if kind == "verify" else plan
    )
    begin = engine._begin

    def announce():
        begin()
        engine.canary.expect([VERIFY])

    engine._begin = announce
    engine.step()
    assert {finding.code for finding in engine.canary.findings if finding.site == VERIFY[:2]} == {"L1"}


def test_an_announcement_of_what_there_is_not_is_refused(engine):
    """The kind and the pool must be of those that there are; before `arm` nothing is kept."""
    with pytest.raises(PlanError, match=r"kind must be one of prefill, .*, got 'vrify'"):
        engine.canary.expect([("vrify", 0, "target")])
    with pytest.raises(PlanError, match="pool must be one of target, draft, got 'drafts'"):
        engine.canary.expect([("draft", 0, "drafts")])
    assert engine.canary.forwards.expected.due == []


def test_before_arm_nothing_is_expected(make_fake_pool):
    """Warm-up opens nothing that counts."""
    pool = make_fake_pool("stacked", name="target", num_pages=4, page_size=4, heads=1, dim=4, layers=1)
    canary = CanaryManager(CanaryConfig(seed=1), [pool.view])
    canary.expect([VERIFY])
    canary.arm()
    canary.begin_step(1)
    assert canary.collect(canary.end_step()) == frozenset()


def test_the_certificate_says_whether_forwards_were_announced(engine):
    """How many; or that nobody did."""
    assert engine.canary.certificate()["announced"] == "forwards not announced by the engine"
    engine.canary.expect([], ("a",))
    for forward in DRAFTS:
        engine.canary.expect([forward], ("a",))
    assert engine.canary.certificate()["announced"] == len(DRAFTS)


def test_what_is_known_of_a_request_goes_with_it(engine):
    """Numbers of its drafts are forgotten when it is."""
    assert len(engine.canary.forwards.expected._drafted) == 2
    engine.finish("a")
    assert len(engine.canary.forwards.expected._drafted) == 1


def test_switched_off_nothing_is_said(make_engine):
    """Without H1 what follows of it speaks for itself."""
    engine = make_engine(num_steps=4, disable=frozenset({"H1"}))
    engine.start("a", 9)
    lose_hooks(engine, ("draft", 1))
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert "H1" not in {finding.code for finding in caught.value.findings}
