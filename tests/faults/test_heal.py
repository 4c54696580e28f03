"""Mode heal: damage is made good and no token differs; what is no damage, or comes again, ends as in abort."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import structlog
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.replay.replayer import replay
from kvcanary_tools.bench.embedded import heal
from kvcanary_tools.bench.embedded.heal import PAGE_SIZE, PROMPT_LENS, SETTINGS, Setting, make_engine, play, texts
from spec_engine import Engine, SamplingParams

SYNC, OVERLAP = Setting("sync", False, 0.0), Setting("overlap", True, 0.0)
IDS = ["-".join([s.schedule, "drafts" if s.drafts else "plain", str(s.temperature)]) for s in SETTINGS]
Strike = Callable[[Engine, random.Random], bool]


def struck(setting: Setting, strike: Strike | None, at: int = 3, **settings: object) -> tuple[Engine, list]:
    engine = make_engine(setting, False, **settings)
    return engine, play(engine, setting, strike, at, random.Random(5))


def expected(setting: Setting) -> list:
    """Of an engine without a canary."""
    return struck(setting, None, canary=CanaryConfig(mode="off"))[1]


def second(engine: Engine, position: int = 10) -> int:
    """The slot of a final entry of the second request."""
    return int(engine.request_table.table[engine.running[1].row, position])


def exchange_two_pages(engine: Engine, draw: random.Random) -> bool:
    row = engine.request_table.table[engine.running[1].row]
    row[4:8], row[12:16] = row[12:16].clone(), row[4:8].clone()
    return True


def store_nan(engine: Engine, draw: random.Random) -> bool:
    engine.pools["target"].kv[0, second(engine), 1, 0, 3] = float("nan")
    return True


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
@pytest.mark.parametrize("kind", heal.KINDS)
def test_tokens_are_those_of_a_run_without_the_fault(kind: str, setting: Setting) -> None:
    """A sample of `kvcanary bench heal`: found, healed once, and the finding, the event and the certificate say so."""
    clean, run = heal.clean(setting, kind == "bad load"), heal.run(setting, kind, 8 + SETTINGS.index(setting))
    assert run.outputs == clean.outputs
    assert set(run.codes) & {"R9", "R3", "T1"}
    assert run.healed == len(run.heals) == 1
    assert "computed req-" in run.heals[0]["healed"]
    assert ("put back one word" in run.heals[0]["healed"]) >= (kind == "cached word")


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
def test_nothing_is_healed_in_a_clean_run(setting: Setting) -> None:
    """And its tokens are those of a run without a canary."""
    for is_pressed in (False, True):
        run = heal.clean(setting, is_pressed)
        assert (run.codes, run.heals, run.healed) == ([], [], 0)
    assert heal.clean(setting).outputs == expected(setting)


@pytest.mark.parametrize("setting", [SYNC, OVERLAP], ids=str)
def test_a_wrong_plan_ends_its_request_and_says_why(setting: Setting) -> None:
    """Computed again it would come again: kv_corruption, and the others have their tokens."""
    engine, outputs = struck(setting, exchange_two_pages)
    assert [reason for _, reason in outputs] == ["length", "kv_corruption", "length", "length"]
    clean = expected(setting)
    assert [outputs[number] for number in (0, 2, 3)] == [clean[number] for number in (0, 2, 3)]
    [finding] = engine.canary.findings
    assert finding.action == "ended req-1; the others go on; R4 is no damage: computed again it would come again"
    assert (finding.healed, engine.canary.certificate()["healed"]) == ("", 0)


@pytest.mark.parametrize("setting", [SYNC, OVERLAP], ids=str)
def test_nan_that_spreads_from_damage_is_healed_too(setting: Setting) -> None:
    """What was computed from it (N1) is computed again."""
    engine, outputs = struck(setting, store_nan)
    assert outputs == expected(setting)
    assert "R9" in {finding.code for finding in engine.canary.findings}
    assert engine.canary.certificate()["healed"] >= 1


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("kind", ["flipped word", "damaged page", "damaged record"])
def test_captured_forwards_are_healed_as_eager_ones(kind: str, schedule: str) -> None:
    """Where the device judges, and the host knows of it a step later."""
    setting = Setting(schedule, True, 0.0)
    engine, outputs = struck(setting, heal.KINDS[kind], graphs="on", graph_buckets=[4])
    assert outputs == expected(setting)
    assert engine.canary.certificate()["healed"] == 1


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
def test_damage_of_the_last_look_brings_the_last_tokens_back(setting: Setting) -> None:
    """Found when the request ends: its last tokens are withdrawn, computed again, and leave once."""
    canary = CanaryConfig(mode="heal", budget=1)

    def overwrite_late(engine: Engine, draw: random.Random) -> bool:
        ending = [own for own in engine.running if own.output_len >= heal.NEW_TOKENS - 4]
        if ending:
            slot = int(engine.request_table.table[ending[0].row, 0])
            engine.pools["target"].kv[:, slot] += 1e-9  # next to nothing: what was computed since is the same token
        return bool(ending)

    engine, outputs = struck(setting, overwrite_late, 0, canary=canary)
    assert outputs == expected(setting)
    assert {finding.site[0] for finding in engine.canary.findings} == {"release"}
    assert engine.canary.certificate()["healed"] == 1


def test_a_third_finding_of_one_page_ends_the_request_and_the_next_one_stops_the_engine() -> None:
    """Two heals, then abort, then raise; each finding says which page or cause it was."""
    engine = make_engine(SYNC, False, prefix_cache=False)
    clean = expected(SYNC)[0][0]
    done = []
    for _ in range(3):
        done += _one(engine, damage=True)
    assert [tuple(tokens) for tokens, _ in done[:2]] == [clean, clean]
    assert [reason for _, reason in done] == ["length", "length", "kv_corruption"]
    actions = [finding.action for finding in engine.canary.findings]
    assert actions[0].startswith("heals: computes req-0 again")
    assert "ended req-2; the others go on; finding 3 of " in actions[2]
    assert [bool(finding.healed) for finding in engine.canary.findings] == [True, True, False]
    with pytest.raises(KVCorruptionError, match=r"raised KVCorruptionError; .*; finding 4 of .* does not last"):
        _one(engine, damage=True)


def _one(engine: Engine, damage: bool) -> list[tuple[list[int], str]]:
    """The first prompt alone, with a changed word in its second page."""
    engine.submit(texts()[0].tokens[: PROMPT_LENS[0]], SamplingParams(max_new_tokens=12, ignore_eos=True))
    tokens: list[int] = []
    reason = ""
    for number in range(60):
        if number == 4 and damage:
            slot = int(engine.request_table.table[engine.running[0].row, 5])
            engine.pools["target"].kv[1, slot, 0, 0, 2] += 1
        for event in engine.step():
            tokens += event.token_ids
            reason = event.finish_reason or ""
        if not engine.has_work:
            return [(tokens, reason)]
    raise RuntimeError("the request did not end")


@pytest.mark.parametrize("is_word", [True, False], ids=["word", "page"])
def test_a_page_that_only_the_cache_has_is_put_back_or_given_up(is_word: bool) -> None:
    """One changed word is put back bit for bit, and the page stays; a page of others leaves the cache."""
    engine, _ = struck(SYNC, None)
    prompt = texts()[2].tokens[: PROMPT_LENS[2]]
    pages = engine.memory.cache.tree.match(prompt, "", "").pages
    rows = engine.pools["target"].kv[:, pages[1] * PAGE_SIZE : (pages[1] + 1) * PAGE_SIZE]
    before = rows.clone()
    if is_word:
        rows[1, 2, 0, 0, 0] *= -1
    else:
        rows += 1
    with structlog.testing.capture_logs() as events:
        engine.canary.begin_step(engine._step_number + 1)
        engine.canary.sweep_cached(pages)
        engine.memory.drop_damaged()
    [finding] = engine.canary.findings
    assert [event["event"] for event in events] == ["kvcanary.finding", "kvcanary.healed"]
    assert engine.canary.certificate()["healed"] == 1
    assert torch.equal(rows, before) == is_word
    left = engine.memory.cache.tree.match(prompt, "", "").pages
    assert left == (pages if is_word else pages[:1])
    words = "put back one word of slot" if is_word else f"evicted page {pages[1]} from the prefix cache"
    assert finding.healed.startswith(words)


@pytest.mark.parametrize("setting", [SYNC, OVERLAP], ids=str)
def test_text_and_stop_strings_are_those_of_a_clean_run(setting: Setting) -> None:
    """Text that was held back, or shown already, comes once; the request ends at the same stop string."""
    prompt, words = texts()[0].tokens[: PROMPT_LENS[0]], [f"{token} " for token in expected(setting)[0][0]]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, stop=("".join(words[8:10]),))
    shown = []
    for strike in (None, heal.overwrite_page):
        engine, text = make_engine(setting, False), ""
        engine.submit(prompt, params)
        while engine.has_work:
            if (
                strike is not None
                and engine.running
                and engine.running[0].output_len
                and strike(engine, random.Random(1))
            ):
                strike = None
            for event in engine.step():
                text, reason = text + event.text, event.finish_reason
        shown.append((text, reason, strike))
        healed = engine.canary.certificate()["healed"]
    assert shown == [("".join(words[:8]), "stop", None)] * 2
    assert healed == 1


@pytest.mark.parametrize("when", ["waiting", "running"])
@pytest.mark.parametrize("setting", [SYNC, OVERLAP], ids=str)
def test_who_is_cancelled_before_it_is_computed_again_is_not_healed(setting: Setting, when: str) -> None:
    """Everything comes back, nothing says healed, and the others have their tokens."""
    engine, outputs = make_engine(setting, False, prefill_chunk_tokens=4, prefix_cache=False), {}
    for number, length in enumerate(PROMPT_LENS):
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=7 + number)
        outputs[engine.submit(texts()[number].tokens[:length], params)] = []
    cancelled, overwritten, names = None, False, set()
    for _ in range(120):
        overwritten = overwritten or heal.overwrite_page(engine, random.Random(2))
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
        names |= {own.request_id for own in engine.scheduler.waiting if own.begins_anew}
        for request in [own for own in getattr(engine.scheduler, when) if own.request_id in names]:
            cancelled = engine.cancel(request.request_id)
    assert cancelled is not None
    assert cancelled.finish_reason == "cancelled"
    assert engine.canary.certificate()["healed"] == 0
    assert not engine.canary.reporting.healing._open or when == "waiting"
    clean = {f"req-{number}": list(tokens) for number, (tokens, _) in enumerate(expected(setting)[:3])}
    left = outputs.pop(cancelled.request_id)
    assert left == clean.pop(cancelled.request_id)[: len(left)]
    assert outputs == clean
    engine.memory.check_accounting([])
    engine.memory.cache.check_references([])


def test_who_begins_anew_is_not_kept_out_of_the_steps_that_come() -> None:
    """What a runner knows of requests that were to end does not name it any more."""
    engine = make_engine(OVERLAP, False)
    inner, seen = engine.step, []

    def step() -> list:
        events = inner()
        seen.extend(own.request_id in engine.runner.aborted for own in engine.scheduler.waiting if own.begins_anew)
        return events

    engine.step = step
    play(engine, OVERLAP, heal.overwrite_page, 3, random.Random(5))
    assert seen
    assert not any(seen)


def test_a_dump_of_a_healed_run_is_replayed(tmp_path) -> None:
    """To the same finding."""
    canary = CanaryConfig(mode="heal", content="full", dump_content=True, seed=3)
    engine, _ = struck(OVERLAP, heal.change_word, canary=canary)
    outcome = replay(read_dump(engine.canary.dump(tmp_path / "heal.kvdump")))
    assert [finding.code for finding in outcome.findings] == [finding.code for finding in engine.canary.findings]
    assert outcome.errors == []
