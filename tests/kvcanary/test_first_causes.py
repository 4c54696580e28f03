"""The first cause of faults in the toy engine, and silence where the same is done rightly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fake_engine
from fake_engine import FakeEngine
from fake_pool import make_fake_pool
from kvcanary import KVCorruptionError

PAGE = 4
TWINS = pytest.mark.parametrize("is_broken", [True, False], ids=["broken", "clean"])


@pytest.fixture
def run(make_engine):
    """Run steps of an engine with page size 4; the first finding, or None."""

    def ran(act, **settings):
        engine = make_engine(**{"page_size": PAGE, "content": "full"} | settings)
        try:
            act(engine)
            engine.canary.drain()
        except KVCorruptionError as error:
            return error.report
        return None

    return ran


def expect(report, is_broken, code, family, *words):
    """The first finding and its first cause; nothing where nothing is broken."""
    if not is_broken:
        assert report is None, report.text()
        return
    for finding in report.findings:
        assert not finding.expected or not finding.expected.items() <= finding.found.items()
    finding = report.findings[0]
    cause = finding.causes[0]
    assert (finding.code, cause.family) == (code, family), report.text()
    reported = "; ".join((cause.text, *cause.evidence))
    assert [word for word in words if word not in reported] == []


@TWINS
def test_a_view_whose_offset_is_wrong_is_told_from_wrong_inputs(run, monkeypatch, is_broken):
    """W6 in every entry of every row: the view says 0 where the pool is fed the tokens of 1."""

    def wrong(*args, token_offset=0, **shape):
        return make_fake_pool(*args, token_offset=0 if is_broken else token_offset, **shape)

    monkeypatch.setattr(fake_engine, "make_fake_pool", wrong)
    report = run(lambda engine: engine.start("one", 10))
    expect(report, is_broken, "W6", "draft", "the view of the draft pool says token_offset 0, it should be 1")


@TWINS
def test_inputs_of_one_prompt_that_were_not_shifted(run, is_broken):
    """The view is right: another row of the pool is."""

    def act(engine):
        engine.start("one", 10)
        row = []

        def unshifted(kind, index, pool, plan):
            if pool == "draft" and is_broken:
                row[:] = engine.rows["two"].tokens[: len(plan.tokens)]
                return replace(plan, tokens=torch.tensor(row))
            return plan

        engine.change_write = unshifted
        engine.start("two", 10)

    expect(run(act), is_broken, "W6", "draft", "the inputs of this forward were shifted by -1", "other rows")


@TWINS
def test_accepted_tokens_in_reverse(run, is_broken):
    """No offset explains them: the extend was fed the right tokens in another order."""

    def act(engine):
        def reverse(kind, index, pool, plan):
            count = len(engine.rows["one"].tokens) - 1 - int(plan.positions[0])
            if kind != "extend" or count < 3 or not is_broken:
                return plan
            tokens = plan.tokens.clone()
            tokens[:count] = tokens[:count].flip(0)
            return replace(plan, tokens=tokens)

        engine.change_write = reverse
        engine.start("one", 10)
        for _ in range(8):
            engine.step()

    expect(run(act), is_broken, "W6", "draft", "accepted tokens were fed in reverse")


@TWINS
def test_numbers_of_substeps_that_repeat(run, is_broken):
    """H1: a draft forward that carries the number of the one whose entry it reads."""

    def act(engine):
        own = engine.canary.forward

        def substep(kind, index, pool, **more):
            return own(kind, 0 if is_broken else index, pool, **more)

        engine.canary.forward = substep
        engine.start("one", 10)
        engine.step()

    expect(run(act), is_broken, "H1", "hooks", "numbers of substeps repeat", "it was opened as draft[0]")


@pytest.mark.parametrize(
    ("chunks", "acquires", "words"),
    [
        (2, False, "the committed length was counted twice"),
        (1, True, "the cached prefix was counted twice"),
    ],
)
@TWINS
def test_positions_of_an_eager_forward_name_the_length_that_they_are_off_by(run, chunks, acquires, words, is_broken):
    """W5 is no replay's: found - expected is what was counted twice."""

    def act(engine):
        def twice(kind, index, pool, plan):
            start = int(plan.positions[0])
            return replace(plan, positions=plan.positions + start) if is_broken and pool == "target" else plan

        if acquires:
            cached = publish(engine, 2 * PAGE)
            engine.change_write = twice
            follow(engine, "two", cached, 2 * PAGE)
        else:
            engine.change_write = twice
            engine.start("one", 16, chunks=chunks)

    expect(run(act), is_broken, "W5", "lengths", words)


def publish(engine: FakeEngine, length: int) -> list[int]:
    """Pages of a prompt that a cache takes."""
    engine.start("one", length + 1)
    pages = engine.rows["one"].pages[: length // PAGE]
    engine.canary.on_share("one", pages)
    return pages


def follow(engine: FakeEngine, name: str, pages: list[int], length: int, tokens=None, **identity) -> None:
    """A request that begins with pages of the cache, and whose next tokens are computed."""
    row = fake_engine.Row([*(engine.rows["one"].tokens[:length] if tokens is None else tokens), 5, 6, 7])
    engine.rows[name] = row
    engine.canary.admit(name, row.tokens, **identity)
    engine.canary.on_acquire(name, pages)
    row.pages, row.committed = list(pages), length
    engine.canary.commit(name, length)
    engine._begin()
    engine._reserve(name, length + 3)
    engine._chain("prefill", "target", {name: row.tokens[length:]}, {name: length})
    engine.canary.collect(engine.canary.end_step())


@TWINS
def test_the_same_tokens_under_another_salt(run, is_broken):
    """R5 at position 0 with the token and the position that are expected: the root is another."""

    def act(engine):
        follow(engine, "two", publish(engine, 8), 8, salt="new weights" if is_broken else "")

    expect(run(act), is_broken, "R5", "identity", "the salt differs", "written by 'one'")


@pytest.mark.parametrize("same_head", [0, 5])
def test_a_prefix_hit_of_another_prompt(run, same_head):
    """The acquired page, whose tokens it holds, and from where they differ."""

    def act(engine):
        cached = publish(engine, 8)
        follow(engine, "two", cached, 8, [*engine.rows["one"].tokens[:same_head], *range(60, 68 - same_head)])

    expect(run(act), True, "R6", "identity", "a page of another prompt", "'one'", f"from position {same_head} on")


def test_a_hit_of_two_pages_the_second_of_another_place(run):
    """R4: the page holds positions of its own, and is named with the request that wrote it."""

    def act(engine):
        pages = publish(engine, 12)
        follow(engine, "two", [pages[0], pages[2]], 8)

    expect(run(act), True, "R4", "identity", "a page of another prompt", "what 'one' has at position 8")


@TWINS
def test_a_page_that_was_copied_by_name_only(run, is_broken):
    """R12: on_copy without an on_move; clean where the move of what was written is told."""

    def act(engine):
        engine.start("one", 10)
        row = fake_engine.Row(list(engine.rows["one"].tokens))
        engine.canary.admit("child", row.tokens)
        pages = engine.rows["one"].pages[:3]
        engine.canary.on_fork("one", "child", pages)
        copy = engine.free_pages.pop()
        engine.canary.on_copy("child", pages[2], copy)
        if not is_broken:
            src, dst = (torch.arange(page * PAGE, page * PAGE + 2) for page in (pages[2], copy))
            for name, pool in engine.pools.items():
                pool.move(src, dst)
                engine.canary.on_move(name, src, dst)
        engine.rows["child"] = row
        row.pages, row.committed = [*pages[:2], copy], 10
        engine.decode("child")

    expect(run(act), is_broken, "R12", "transfer", "by name only", "no move into page")


@TWINS
def test_an_earlier_copy_of_a_page_that_comes_back(run, is_broken):
    """Bytes and records agree, and are those of a guess that was written over after the copy was made."""

    def act(engine):
        engine.start("one", 10)
        engine.step()
        row, before = engine.rows["one"], put_away(engine, "one")
        while row.committed < before[0] + 3:
            engine.step()
        bring_back(engine, "one", before if is_broken else put_away(engine, "one"))
        engine.decode("one")

    report = run(act)
    if is_broken:
        cause = report.findings[0].causes[0]
        assert (cause.family, cause.text[:6]) == ("transfer", "stale:"), report.text()
        assert "a load of step" in cause.evidence[0]
    else:
        assert report is None, report.text()


def put_away(engine: FakeEngine, name: str):
    """What an engine keeps of a row: how much is final, the snapshot of its pages, and their bytes by pool."""
    row = engine.rows[name]
    slots = [engine.slot(name, position) for position in range(len(row.pages) * PAGE)]
    kept = {name: pool.kv[:, slots].clone() for name, pool in engine.pools.items()}
    return row.committed, engine.canary.on_offload(row.pages), kept


def bring_back(engine: FakeEngine, name: str, away) -> None:
    """The row gives its pages back, and gets what was put away into others, for all that is final now."""
    row, (_, snapshot, kept) = engine.rows[name], away
    old, row.pages = row.pages, [engine.free_pages.pop() for _ in range(snapshot.num_pages)]
    engine.canary.on_free(name, old)
    engine._begin()
    engine.canary.on_alloc(name, row.pages)
    slots = [engine.slot(name, position) for position in range(len(row.pages) * PAGE)]
    for pool, held in kept.items():
        engine.pools[pool].kv[:, slots] = held
    engine.canary.on_restore(name, row.pages, row.committed, snapshot)
    engine.canary.commit(name, row.committed)


@TWINS
def test_a_move_from_another_request(run, is_broken):
    """R4 or R5 behind a declared move: its source continues another request's row."""

    def act(engine):
        engine.start("one", 9)
        engine.start("two", 14)
        accept = engine._accept

        def mixed(name, path):
            other = next(other for other in engine.rows if other != name)
            if is_broken and len(path) > 1:
                theirs = engine.slot(other, engine.rows[other].committed)
                path = [path[0], (theirs, path[1][1]), *path[2:]]
            return accept(name, path)

        engine._accept = mixed
        for _ in range(4):
            engine.step()

    report = run(act)
    if is_broken:
        assert report.findings[0].causes[0].text == "the move took its source from another request's row", report.text()
    else:
        assert report is None


def test_the_reader_is_among_those_who_gave_the_page_back(run):
    """R7 of a page that a cache has evicted, R8 of one that a fork's other row has alone: both are lifetime's."""

    def evicted(engine):
        pages = publish(engine, 8)
        engine.canary.on_free("one", pages[:1])
        engine.canary.on_evict(pages[:1])
        engine.decode()

    def released(engine):
        engine.start("one", 10)
        row = fake_engine.Row(list(engine.rows["one"].tokens))
        engine.canary.admit("child", row.tokens)
        pages = engine.rows["one"].pages[:2]
        engine.canary.on_fork("one", "child", pages)
        engine.canary.on_free("child", pages[:1])
        row.pages, row.committed = list(pages), 8
        engine.rows["child"] = row
        engine.decode("child")

    expect(run(evicted), True, "R7", "lifetime", "released by 'one'", "evicted at step", "the reader had it before")
    expect(run(released), True, "R8", "lifetime", "released by 'child'", "private to 'one' since")


@TWINS
def test_an_extend_that_writes_too_few(run, is_broken):
    """A guess lies at a final place, behind what the same extend wrote: a count, and no forward without hooks."""

    def act(engine):
        own = engine._padded

        def short(fed, rows):
            return {name: tokens[:-1] if len(tokens) > 2 else tokens for name, tokens in fed.items()}

        engine._padded = short if is_broken else own
        engine.start("one", 10)
        for _ in range(8):
            engine.step()

    words = "the extend wrote fewer entries of the row than were accepted"
    expect(run(act), is_broken, "R4", "lengths", words, "which ran with hooks")


def test_a_write_into_a_shared_page_touches_all_who_have_it(run):
    """W3 names the writer, and every row with the page."""

    def act(engine):
        engine.start("one", 10)
        engine.canary.admit("child", engine.rows["one"].tokens)
        engine.canary.on_fork("one", "child", engine.rows["one"].pages[:3])
        engine.decode("one")

    report = run(act)
    assert (report.findings[0].code, report.findings[0].readers) == ("W3", ("one", "child"))
