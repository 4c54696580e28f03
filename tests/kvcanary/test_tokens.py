"""W6: tokens that the host knows, tokens that an oracle knows, and ids that are no tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcanary import Finding, KVCorruptionError, PlanError

VOCABULARY = 1000


def found(run: Callable[..., object], *arguments: object) -> list[Finding]:
    """The findings with which a call is stopped."""
    with pytest.raises(KVCorruptionError) as caught:
        run(*arguments)
    return list(caught.value.findings)


def wrong_at(engine, kind: str, pool: str, entry: int, change: Callable[[int], int]) -> None:
    """One entry of this kind of forward is fed another token."""

    def changed(k, index, p, plan):
        if (k, p) != (kind, pool):
            return plan
        tokens = plan.tokens.clone()
        tokens[entry] = change(int(tokens[entry]))
        return replace(plan, tokens=tokens)

    engine.change_write = changed


def lags(engine) -> dict[str, list[int]]:
    """From now on the engine emits tokens that the canary is not told; they are all here."""
    engine.canary.append = lambda name, tokens: None
    return {name: row.tokens for name, row in engine.rows.items()}


def oracle_of(tokens: dict[str, list[int]]) -> Callable[[str, int], int | None]:
    return lambda name, position: tokens[name][position] if position < len(tokens[name]) else None


@pytest.fixture
def engine(make_engine):
    """Two requests behind their prompts, in pools that know their vocabulary."""
    engine = make_engine(content="full", num_pages=64, vocab_size=VOCABULARY)
    engine.start("first", 13)
    engine.start("second", 9)
    return engine


@pytest.mark.parametrize("token", [-1, VOCABULARY, 1 << 31])
@pytest.mark.parametrize(
    ("kind", "pool", "entry"), [("draft", "draft", 1), ("verify", "target", 4), ("extend", "draft", 0)]
)
def test_an_id_that_is_no_token_is_found(engine, kind, pool, entry, token):
    """Also where the host has no truth: draft guesses, tree nodes, and what is fed for the first time."""
    wrong_at(engine, kind, pool, entry, lambda old: token)

    def two_steps():
        engine.step()
        engine.step()

    finding = found(two_steps)[0]
    assert (finding.code, finding.pool, finding.site[0]) == ("W6", pool, kind)
    assert finding.causes[0].family == "uninitialised"


@pytest.mark.parametrize("vocab_size", [None, VOCABULARY])
def test_the_largest_token_is_one(make_engine, vocab_size):
    """Without a vocabulary nothing is out of it, and its last id is in it."""
    engine = make_engine(num_pages=64, vocab_size=vocab_size)
    engine.start("only", 9)
    wrong_at(engine, "draft", "draft", 0, lambda old: VOCABULARY - 1 if vocab_size else 1 << 31)
    engine.step()
    engine.canary.drain()
    assert engine.canary.findings == []


def test_a_vocabulary_has_a_size(make_fake_pool):
    """An empty one is a mistake."""
    with pytest.raises(PlanError, match="vocab_size must be at least 1, got 0"):
        make_fake_pool("nhd", vocab_size=0)


@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_an_oracle_judges_what_the_host_does_not_know(engine, kind):
    """The input of a forward is judged though nobody has told the canary of it; the clean twin passes."""
    tokens = lags(engine)
    engine.canary.set_oracle(oracle_of(tokens))
    run = engine.decode if kind == "decode" else engine.step
    for _ in range(3):
        run()
    assert engine.canary.findings == []
    wrong_at(engine, kind, "target", 0, lambda old: old % (VOCABULARY - 1) + 1)
    (finding,) = found(run)
    assert (finding.code, finding.site[0], finding.writer) == ("W6", kind, "first")
    assert finding.position == engine.rows["first"].committed


def test_an_oracle_judges_what_a_draft_extend_is_fed(engine):
    """Entries of accepted tokens have a truth, the padding behind them has none."""
    tokens = lags(engine)
    engine.canary.set_oracle(oracle_of(tokens))
    wrong_at(engine, "extend", "draft", 0, lambda old: old % (VOCABULARY - 1) + 1)
    engine.step()
    finding = found(engine.step)[0]
    assert (finding.code, finding.pool, finding.site[0]) == ("W6", "draft", "extend")


@pytest.mark.parametrize("how", ["no oracle", "withdrawn", "disabled", "knows nothing"])
def test_without_an_oracle_nobody_judges_them(make_engine, how):
    """The same fault passes this check where no oracle is asked, or the check is off."""
    engine = make_engine(num_pages=64, mode="log", disable={"W6"} if how == "disabled" else set())
    engine.start("first", 13)
    tokens = lags(engine)
    if how != "no oracle":
        engine.canary.set_oracle((lambda *_: None) if how == "knows nothing" else oracle_of(tokens))
    if how == "withdrawn":
        engine.canary.set_oracle(None)
    engine.decode()
    wrong_at(engine, "decode", "target", 0, lambda old: old % (VOCABULARY - 1) + 1)
    engine.decode()
    assert "W6" not in {finding.code for finding in engine.canary.findings}


@pytest.mark.parametrize("judges", [False, True])
def test_guesses_are_judged_only_where_asked(engine, judges):
    """An oracle of what the model will say contradicts a random guess; by default guesses are free."""
    engine.canary.set_oracle(lambda name, position: 7, judges_guesses=judges)
    if judges:
        assert {finding.site[0] for finding in found(engine.step)} >= {"draft"}
    else:
        engine.step("first")
        engine.canary.drain()
        assert engine.canary.findings == []
