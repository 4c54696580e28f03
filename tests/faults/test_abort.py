"""Mode abort: the request that a finding touches ends as corrupted, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.models.embedded import load_excerpts

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
Fault = Callable[[Engine], None]


def flip_a_bit(engine: Engine) -> None:
    """One bit of a committed V element of the second request."""
    engine.pools["target"].kv.view(torch.int32)[11, slot_of(engine, 20), 1, 0, 5] ^= 1 << 9


def exchange_two_entries(engine: Engine) -> None:
    """Two entries of the second request's page table."""
    row = engine.request_table.table[engine.running[1].row]
    row[8:12], row[40:44] = row[40:44].clone(), row[8:12].clone()


def damage_a_record(engine: Engine) -> None:
    """A record of the second request in the draft pool."""
    engine.canary.session.state.by_name["draft"].records[slot_of(engine, 9), 1] ^= 1 << 40


def slot_of(engine: Engine, position: int) -> int:
    return int(engine.request_table.table[engine.running[1].row, position])


def run(canary: CanaryConfig, fault: Fault | None = None, steps: int = 4) -> tuple[Engine, dict[str, list]]:
    """Three requests to their end, a fault after so many steps; by request the events that left."""
    engine = Engine(EngineConfig(page_size=4, topk=2, num_draft_tokens=6, max_total_tokens=2048, canary=canary))
    names = [engine.submit(excerpt.prompt, PARAMS) for excerpt in load_excerpts()[:3]]
    events: dict[str, list] = {name: [] for name in names}
    for number in range(200):
        if number == steps and fault is not None:
            fault(engine)
        for event in engine.step():
            events[event.request_id].append(event)
        if not engine.has_work:
            return engine, events
    raise RuntimeError("the requests did not end")


def tokens(events: list) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.fixture(scope="module")
def clean() -> dict[str, list]:
    """What a run without a canary gives."""
    return run(CanaryConfig(mode="off"))[1]


@pytest.mark.parametrize("content", ["full", "rolling"])
@pytest.mark.parametrize("fault", [flip_a_bit, exchange_two_entries, damage_a_record])
def test_only_the_touched_request_ends(fault: Fault, content: str, clean: dict[str, list]) -> None:
    """It ends with `kv_corruption`; the outputs of the others are those of a run without a fault."""
    engine, events = run(CanaryConfig(mode="abort", content=content), fault)
    first, second, third = events
    assert events[second][-1].finish_reason == "kv_corruption"
    assert [events[name][-1].finish_reason for name in (first, third)] == ["length", "length"]
    assert [tokens(events[name]) for name in (first, third)] == [tokens(clean[name]) for name in (first, third)]
    assert tokens(events[second]) == tokens(clean[second])[: len(tokens(events[second]))]
    engine.memory.check_accounting([])
    assert {finding.code for finding in engine.canary.findings} & {"R9", "R4", "R3"}


@pytest.mark.parametrize("fault", [exchange_two_entries, damage_a_record])
def test_no_token_leaves_in_the_step_of_the_finding(fault: Fault) -> None:
    """What identity checks find is found before a token of that step leaves: the last event has none."""
    engine, events = run(CanaryConfig(mode="abort"), fault)
    corrupted = next(own for own in events.values() if own[-1].finish_reason == "kv_corruption")
    assert corrupted[-1].token_ids == ()
    assert engine.canary.findings[0].step == 5


def test_a_finding_of_the_last_look_replaces_the_finish_reason() -> None:
    """Damage that the rotation has not come to is found when the request ends, and its last tokens stay."""
    requests = {}

    def flip(engine: Engine) -> None:
        requests.update({request.request_id: request for request in engine.running})
        flip_a_bit(engine)

    engine, events = run(CanaryConfig(mode="abort", budget=1), flip)
    corrupted = next(own for own in events.values() if own[-1].finish_reason == "kv_corruption")
    assert corrupted[-1].token_ids == ()
    assert [finding.site[0] for finding in engine.canary.findings] == ["release"]
    assert requests[corrupted[-1].request_id].output_ids == tokens(corrupted)


def test_clean_requests_never_end_as_corrupted(clean: dict[str, list]) -> None:
    """Mode abort without a fault gives the tokens of a run without a canary."""
    _, events = run(CanaryConfig(mode="abort", content="full"))
    assert {name: tokens(own) for name, own in events.items()} == {name: tokens(own) for name, own in clean.items()}


@pytest.mark.parametrize(
    ("mode", "poison", "schedule"),
    [("abort", "finite", "overlap"), ("abort", "nan", "sync"), ("abort", "off", "sync"), ("log", "finite", "overlap")],
)
def test_what_was_computed_from_damage_meets_nobody(mode: str, poison: str, schedule: str) -> None:
    """NaN in the first layer is NaN in all that is stored after it; whoever gets those pages next is served as ever."""
    prompt, other = (excerpt.prompt[-200:] for excerpt in load_excerpts()[:2])
    canary = CanaryConfig(mode=mode, content="full", poison=poison, quarantine=2)
    settings = {"page_size": 16, "max_total_tokens": 288, "max_running_requests": 1, "prefix_cache": False}
    engine = Engine(EngineConfig(canary=canary, schedule=schedule, **settings))
    [clean] = engine.generate([other], PARAMS)
    first, second = engine.submit(prompt, PARAMS), engine.submit(other, PARAMS)
    outputs: dict[str, list[int]] = {first: [], second: []}
    reasons = {}
    for number in range(200):
        if number == 4:
            slot = int(engine.request_table.table[engine.running[0].row, 20])
            engine.pools["target"].kv[0, slot, 1, 0, 5] = float("nan")
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
            reasons[event.request_id] = event.finish_reason
        if not engine.has_work:
            break
    assert reasons == {first: "kv_corruption" if mode == "abort" else "length", second: "length"}
    assert outputs[second] == list(clean.token_ids)
    assert {name for finding in engine.canary.findings for name in finding.readers} == {first}


def flip_a_cached_bit(engine: Engine, pages: list[int]) -> None:
    """In the second page of these, which the prefix cache holds."""
    engine.pools["target"].kv.view(torch.int32)[11, 16 * pages[1], 1, 0, 5] ^= 1 << 9


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("is_read", [True, False])
def test_a_damaged_page_leaves_the_prefix_cache(is_read: bool, schedule: str, monkeypatch) -> None:
    """Who reads it ends, or nobody where the cache alone holds it; the next one computes it and all behind it again."""
    prompt, other = (excerpt.prompt[-200:] for excerpt in load_excerpts()[:2])
    monkeypatch.setattr("kvcanary.config.ROTATION_STEPS", 8)
    settings = {"page_size": 16, "max_total_tokens": 2048, "max_running_requests": 2}
    engine = Engine(EngineConfig(canary=CanaryConfig(mode="abort", budget=1 << 40), schedule=schedule, **settings))
    [clean, _] = engine.generate([prompt, other], PARAMS)
    pages = engine.memory.cache.tree.match(engine.tokenizer.encode(prompt)).pages
    names = [engine.submit(prompt if is_read else other, PARAMS), engine.submit(other, PARAMS)]
    reasons = {}
    for number in range(200):
        if number == 3:
            flip_a_cached_bit(engine, pages)
        reasons.update({event.request_id: event.finish_reason for event in engine.step()})
        if not engine.has_work:
            break
    assert [reasons[name] for name in names] == ["kv_corruption" if is_read else "length", "length"]
    assert [finding.page for finding in engine.canary.findings] == [pages[1]]
    assert engine.memory.cache.tree.match(engine.tokenizer.encode(prompt)).pages == pages[:1]
    assert not engine.canary.damaged_pages
    engine.memory.cache.check_references([])
    [again] = engine.generate([prompt], PARAMS)
    assert (again.finish_reason, again.token_ids) == ("length", clean.token_ids)
    assert len(engine.canary.findings) == 1


@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_nothing_is_moved_for_a_request_that_has_ended(steps: int) -> None:
    """Its pages are free already: compaction writes only into rows that go on."""
    strays = []

    def watch(engine: Engine) -> None:
        exchange_two_entries(engine)
        pool = engine.pools["target"]
        move = pool.move

        def watched(src: torch.Tensor, dst: torch.Tensor) -> None:
            owned = {page for request in engine.running for page in request.pages}
            strays.extend(slot for slot in dst.tolist() if slot // 4 not in owned)
            move(src, dst)

        pool.move = watched

    _, events = run(CanaryConfig(mode="abort"), watch, steps)
    assert "kv_corruption" in {own[-1].finish_reason for own in events.values()}
    assert strays == []


def test_a_full_pool_takes_pages_out_of_quarantine() -> None:
    """Requests one after the other through a pool that holds one: each gets pages that went back a step ago."""
    prompt = load_excerpts()[0].prompt
    outputs = []
    for mode in ("off", "raise"):
        settings = {"page_size": 16, "max_total_tokens": 496, "max_running_requests": 1}
        engine = Engine(EngineConfig(canary=CanaryConfig(mode=mode, quarantine=50), **settings))
        outputs.append([output.token_ids for output in engine.generate([prompt] * 4, PARAMS)])
    assert outputs[0] == outputs[1]
    assert engine.allocator.num_quarantined > 0
