"""Owners of blocks in a vLLM worker, over the stand-in: told by the scheduler's pool, or by the worker's ledger."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary import KVCorruptionError
from kvcanary.adapters import vllm as plugin
from kvcanary.adapters.observed.owners import place_of
from kvcanary.adapters.vllm.owners import BY_SCHEDULER, BY_WORKER, FED_BY, UNHEARD

from .served import BLOCK, Served, go_on, load, without

pytestmark = pytest.mark.usefixtures("release", "host")
RELEASES = ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
FEEDS = {BY_SCHEDULER: {}, BY_WORKER: {"is_heard": False}}
SCENES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pickled": {"is_pickled": True},
    "drafts": {"settings": {"drafts": ("d0",)}, "layers": ("l0", "l1", "d0"), "num_blocks": 18},
    "windows": {"window": 12, "frees_windows": True, "num_blocks": 12},
    "two groups": {"groups": (("l0",), ("w0",)), "window": 20, "zeroes": True},
    "v1": {"settings": {"runner": "v1"}},
    "v1 windows": {"settings": {"runner": "v1"}, "window": 12, "frees_windows": True, "num_blocks": 12},
}


@pytest.fixture
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which release the stand-in is of; the newest that it knows where a test does not say."""
    chosen = getattr(request, "param", RELEASES[-1])
    monkeypatch.setenv("STANDIN_RELEASE", chosen)
    return chosen


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("scene", SCENES)
def test_a_sound_worker_has_no_finding(serve, scene: str, feed: str) -> None:
    """Shared prefixes, chunks, preemption, drafts, windows that give blocks back: silent, tokens as without."""
    drafts = 3 if scene == "drafts" else 0
    bare = without(**SCENES[scene])
    load(bare, drafts)
    expected = bare.run()
    plugin.register()
    served = serve(**SCENES[scene], **FEEDS[feed])
    load(served, drafts)
    assert served.run() == expected
    report = served.wrapper.kvcanary_report()
    assert (report["findings"], report["fired"], report["unchecked"]) == ([], {}, {})
    assert report["owners"] == feed
    assert FED_BY[feed] <= set(report["classes"])
    assert not (FED_BY[BY_SCHEDULER] - FED_BY[feed]) & set(report["classes"])
    assert served.preemptions > 0
    owners = served.wrapper.worker.kvcanary.canary.groups[0].owners.slots
    assert not (owners > 0).any()  # nobody runs
    assert (owners == 0).sum() >= 4 * BLOCK


@pytest.mark.parametrize("release", RELEASES, indirect=True)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_every_release_tells(serve, runner: str) -> None:
    """Silent, and by the scheduler's pool, in each release that the stand-in knows."""
    served = serve(settings={"runner": runner}, zeroes=True)
    load(served)
    served.run()
    report = served.wrapper.kvcanary_report()
    assert (report["findings"], report["fired"], report["owners"]) == ([], {}, BY_SCHEDULER)


def running(serve: Any, **settings: Any) -> Served:
    """Two requests that decode: `a` has four full blocks, `b` has one."""
    served = serve(**settings)
    served.ask("a", [(3 * n) % 97 for n in range(30)], 60)
    served.ask("b", [5, 6, 7, 8, 9], 60)
    go_on(served, 6)
    return served


def raised(served: Served, steps: int = 12) -> Any:
    with pytest.raises(KVCorruptionError) as error:
        go_on(served, steps)
    return error.value.findings[0]


def request_of(served: Served, name: str) -> Any:
    [found] = [request for request in served.running if request.name == name]
    return found


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_block_that_is_granted_twice_is_told(serve, runner: str, feed: str) -> None:
    """R8 for who had it, in the step of the second grant: position, the new owner, and the steps of both grants."""
    served = running(serve, settings={"runner": runner}, **FEEDS[feed])
    block = request_of(served, "a").blocks[1]
    served.free.insert(0, block)
    served.ask("c", [40 + n for n in range(6)], 20)
    step = served.wrapper.worker.kvcanary.canary.step + 1
    found = raised(served)
    assert (found.code, found.reader, found.position, found.first_bad_step) == ("R8", "a", BLOCK, step)
    assert "the slot was granted to 'c'" in found.evidence
    assert f"block {block} was granted to 'c' in step {step}" in found.evidence
    assert f"block {block} was granted to 'a' in step 1" in found.evidence


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_freed_block_that_is_still_read_is_told(serve, runner: str) -> None:
    """R7 before anybody else is given it: who had it, when it was granted and when given back."""
    served = running(serve, settings={"runner": runner})
    block = request_of(served, "a").blocks[1]
    served.pool.free_blocks([served.pool.blocks[block]])
    step = served.wrapper.worker.kvcanary.canary.step + 1
    found = raised(served, 1)
    assert (found.code, found.reader, found.position, found.first_bad_step) == ("R7", "a", BLOCK, step)
    assert "the slot is free" in found.evidence
    assert f"block {block} was given back in step {step}" in found.evidence
    assert f"block {block} was granted to 'a' in step 1" in found.evidence


def test_states_hear_of_freed_blocks_before_they_are_given_anew(serve, monkeypatch) -> None:
    """In the step that gives them, so that who begins there takes nobody's state."""
    served = running(serve)
    handle, block, told = served.wrapper.worker.kvcanary, request_of(served, "a").blocks[1], list[Any]()
    states = SimpleNamespace(given=lambda given: told.append("given"), left=lambda: None, copied=None, described=[])
    handle._states = states
    handle._ledger.freed = lambda blocks: told.append(list(blocks))
    served.pool.free_blocks([served.pool.blocks[block]])
    with pytest.raises(KVCorruptionError):
        go_on(served, 1)
    assert told[:2] == [[block], "given"]


def test_a_row_that_names_a_block_of_a_request_that_has_ended_is_told_by_the_worker_alone(serve) -> None:
    """Its own ledger knows who runs: R7 where a table leads to what nobody who runs was given."""
    served = running(serve, is_heard=False)
    served.ask("c", [40 + n for n in range(20)], 22)
    go_on(served, 1)
    block = request_of(served, "c").blocks[1]
    while any(request.name == "c" for request in served.running):
        served.step()
    number = served.runner.req_states.req_id_to_index["a"]
    served.runner.block_tables.block_tables[0].gpu[number, 1] = block
    found = raised(served, 1)
    assert (found.code, found.reader, found.position) == ("R7", "a", BLOCK)
    assert "the slot is free" in found.evidence


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_write_into_another_requests_block_is_told(serve, monkeypatch, runner: str, feed: str) -> None:
    """A worker that puts another's block into a table: W2 before it is stored, whose block it is and since when."""
    served = running(serve, settings={"runner": runner}, **FEEDS[feed])
    place: Any = served.runner.block_tables if runner == "v2" else served.runner.input_batch.block_table
    block = 0

    def put(blocks: Any) -> list[int]:
        nonlocal block
        own = request_of(served, "b").blocks
        block = request_of(served, "a").blocks[-1]
        return [block if number == own[-1] and len(own) > 2 else number for number in blocks]

    if runner == "v2":
        right = place.append_block_ids
        monkeypatch.setattr(place, "append_block_ids", lambda row, new, overwrite: right(row, [put(new[0])], overwrite))
    else:
        fill = place.tables[0].fill_row
        monkeypatch.setattr(place.tables[0], "fill_row", lambda row, blocks: fill(row, put(blocks)))
    found = raised(served, 16)
    assert (found.code, found.writer, found.slot // BLOCK) == ("W2", "b", block)
    assert "the slot was granted to 'a'" in found.evidence
    assert any(line.startswith(f"block {block} was granted to 'a' in step ") for line in found.evidence)


def test_a_block_that_a_worker_was_told_twice_stays_its_owners(serve) -> None:
    """The pool granted it once: a second request that is told it is who is wrong, W2 at its first write."""
    served = running(serve)
    plan = served.scheduler.plan

    def wrong() -> Any:
        output = plan()
        cached = output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            if name == "b" and cached.new_block_ids[place]:
                cached.new_block_ids[place] = ([request_of(served, "a").blocks[-1]],)
        return output

    served.scheduler.plan = wrong
    found = raised(served, 16)
    assert (found.code, found.writer) == ("W2", "b")
    assert "the slot was granted to 'a'" in found.evidence


def test_a_block_that_two_hit_in_one_step_is_held_until_both_have_ended(serve) -> None:
    """Whichever ends first: the other goes on reading it in silence."""
    prompt = [(3 * n) % 97 for n in range(30)]
    for feed, first in itertools.product(FEEDS, ("b", "c")):
        served = serve(**FEEDS[feed])
        served.ask("a", prompt, 2)
        served.run()
        for name in ("b", "c"):
            served.ask(name, [*prompt, 5], 2 if name == first else 20)
        served.run()
        report = served.wrapper.kvcanary_report()
        assert (report["findings"], report["fired"], report["owners"]) == ([], {}, feed)


def test_a_write_into_a_full_block_is_told_from_the_next_step_on(serve) -> None:
    """A block in the prefix cache may be read by all; whoever writes it is W3."""
    served = running(serve)
    block, tables = request_of(served, "a").blocks[0], served.runner.block_tables
    owners = served.wrapper.worker.kvcanary.canary.groups[0].owners.slots
    assert int(owners[block * BLOCK]) == -1
    right = tables.compute_slot_mappings

    def shift(numbers: Any, starts: Any, *others: Any) -> Any:
        slots = right(numbers, starts, *others)
        slots[0, numbers.tolist().index(served.runner.req_states.req_id_to_index["b"])] = block * BLOCK
        return slots

    tables.compute_slot_mappings = shift
    with pytest.raises(KVCorruptionError) as error:
        served.step()
    [found] = [found for found in error.value.findings if found.code == "W3"]
    assert (found.writer, found.slot) == ("b", block * BLOCK)
    assert "the slot is in the prefix cache" in found.evidence


def test_a_prefix_that_is_written_in_the_step_that_shares_it_is_sound(serve) -> None:
    """Its block is full only behind this step: its owner writes it while another row reads it."""
    for settings in FEEDS.values():
        served = serve(**settings)
        served.budget = 80
        tokens = [(3 * n) % 97 for n in range(30)]
        served.ask("a", tokens, 45)
        served.ask("b", tokens, 40)
        served.step()
        assert served.violations == 3
        owners = served.wrapper.worker.kvcanary.canary.groups[0].owners.slots
        assert int(owners[request_of(served, "b").blocks[0] * BLOCK]) < -(1 << 32)
        served.run()
        assert served.wrapper.kvcanary_report()["findings"] == []


def test_a_block_is_given_away_while_a_step_in_flight_reads_it(serve) -> None:
    """Asynchronous scheduling: what is told with a step is done before its forward, not when it was said."""
    served = running(serve)
    canary, ledger = served.wrapper.worker.kvcanary.canary, served.wrapper.worker.kvcanary._ledger
    block = request_of(served, "a").blocks[1]
    served.pool.free_blocks([served.pool.blocks[block]])  # behind the step in flight: told with the next
    assert int(canary.groups[0].owners.slots[block * BLOCK]) != 0
    assert ledger.owners.owner(place_of(0, block)) != 0
    assert served.wrapper.kvcanary_report()["findings"] == []
    with pytest.raises(KVCorruptionError):
        served.step()


def test_steps_that_were_not_heard_are_counted_and_nothing_of_before_is_judged(serve) -> None:
    """A telling that never arrived: all blocks are unjudged, the certificate says so, and grants count again."""
    served = running(serve)
    block = request_of(served, "a").blocks[1]
    served.pool.free_blocks([served.pool.blocks[block]])
    served.pool.kvcanary_notes.told()  # and thrown away
    go_on(served, 3)
    report = served.wrapper.kvcanary_report()
    assert (report["findings"], report["unchecked"]) == ([], {UNHEARD: 1})
    served.ask("c", [40 + n for n in range(20)], 60)
    go_on(served, 3)
    served.pool.free_blocks([served.pool.blocks[request_of(served, "c").blocks[0]]])
    assert raised(served).code == "R7"


def test_a_pool_that_fails_to_note_ends_no_request(serve) -> None:
    """It tells nothing from then on, one event says so, and workers go on with a ledger of their own."""
    from structlog.testing import capture_logs

    served = running(serve)
    served.pool.kvcanary_notes.add = None
    with capture_logs() as events:
        served.ask("c", [40 + n for n in range(20)], 40)
        served.run()
    assert [e["event"] for e in events if e["log_level"] == "warning"] == ["kvcanary.block_pool_unheard"]
    report = served.wrapper.kvcanary_report()
    assert (report["findings"], report["owners"]) == ([], BY_WORKER)


def test_a_scheduler_of_other_names_is_not_followed(serve, monkeypatch) -> None:
    """Where a method of the pool is gone nothing is replaced there, and `closed_paths` names it."""
    from vllm.v1.core import block_pool

    from kvcanary.adapters.vllm.compatibility import OWNERS, check, closed_paths

    plugin.unregister()
    assert not hasattr(block_pool.BlockPool.touch, "kvcanary_method")
    monkeypatch.delattr(block_pool.BlockPool, "evict_blocks")
    plugin.register()
    assert not hasattr(block_pool.BlockPool.touch, "kvcanary_method")
    assert (list(closed_paths()), check()) == ([OWNERS], [])
    assert "evict_blocks is gone" in closed_paths()[OWNERS]
    served = running(serve)
    assert served.wrapper.kvcanary_report()["owners"] == BY_WORKER


def test_notes_survive_any_executor(serve) -> None:
    """They are one attribute of the output, as bytes; pools that nobody schedules from keep no notes."""
    from vllm.v1.core.block_pool import BlockPool

    served = running(serve)
    output = served.scheduler.schedule()
    assert pickle.loads(pickle.dumps(output)).kvcanary_blocks == output.kvcanary_blocks
    other = BlockPool(9)
    other.free_blocks(other.get_new_blocks(3))
    assert not hasattr(other, "kvcanary_notes")


def test_blocks_that_a_connector_could_not_load_are_unjudged(serve) -> None:
    """Somebody computes them anew, and nobody says who."""
    served = running(serve)
    block, rows = request_of(served, "a").blocks[0], served.runner.req_states.req_id_to_index
    served.pool.evict_blocks({block})
    served.step()
    owners = served.wrapper.worker.kvcanary.canary.groups[0].owners.slots
    assert int(owners[block * BLOCK]) == -(1 << 62)
    assert rows["a"] is not None
    assert served.wrapper.kvcanary_report()["findings"] == []


def test_copies_of_blocks_are_their_new_owners(serve) -> None:
    """Copy on write: the destination was granted to who reads it, the source stays whose it is."""
    served = running(serve)
    source = request_of(served, "a").blocks[1]
    [target] = served.pool.get_new_blocks(1)
    served.extra = {"kv_cache_block_copies": [(source, target.block_id)]}
    served.run()
    assert served.wrapper.kvcanary_report()["findings"] == []


def test_a_request_that_nobody_admitted_is_unjudged(serve) -> None:
    """Embeddings instead of tokens: its rows are not followed, and its blocks are nobody's fault."""
    served = serve()
    plan = served.scheduler.plan

    def embedded() -> Any:
        output = plan()
        for data in output.scheduled_new_reqs:
            data.prompt_embeds = SimpleNamespace()
        return output

    served.scheduler.plan = embedded
    load(served)
    served.run()
    assert served.wrapper.kvcanary_report()["findings"] == []
    assert isinstance(served.pool.blocks, list)
    assert torch.is_tensor(served.wrapper.worker.kvcanary.canary.groups[0].owners.slots)


def test_a_block_that_a_row_is_given_beside_an_arrival_is_its_own(serve) -> None:
    """The worker's ledger, in a step in which another request begins: the row that grows owns its new block."""
    served = running(serve, is_heard=False)
    owners, grown = served.wrapper.worker.kvcanary.canary.groups[0].owners.slots, 0
    for number in range(BLOCK):
        blocks = len(request_of(served, "a").blocks)
        served.ask(f"c{number}", [40 + number, 7, 9], 2)
        go_on(served, 1)
        if len(own := request_of(served, "a").blocks) > blocks:
            assert int(owners[own[-1] * BLOCK]) > 0
            grown += 1
    assert grown


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_write_into_a_free_block_is_told_when_it_is_granted(serve, runner: str) -> None:
    """P1: a block that nobody will find in the prefix cache is filled when it is free, and looked at, before it is
    zeroed or stored to.
    """
    served = running(serve, settings={"runner": runner}, zeroes=True)
    served.ask("c", [40, 41, 42], 2)
    go_on(served, 1)
    [block] = request_of(served, "c").blocks
    while any(request.name == "c" for request in served.running):
        served.step()
    served.free.remove(block)  # nobody is granted it meanwhile
    go_on(served, 2)
    cache, slot = served.caches["l0"], block * BLOCK + 3
    entry = cache[slot // cache.shape[2], :, slot % cache.shape[2]].view(torch.int32)
    assert served.wrapper.worker.kvcanary.canary.poison.filled[slot]
    entry[..., 0] ^= 1 << 5
    served.free.insert(0, block)
    served.ask("d", [60 + n for n in range(6)], 2)
    found = raised(served)
    assert (found.code, found.slot, found.layers) == ("P1", slot, (0,))
    assert "P1" in served.wrapper.kvcanary_report()["classes"]


@pytest.mark.parametrize(
    ("settings", "why"), [({"is_heard": False}, "ledger"), ({"groups": (("l0",), ("w0",))}, "groups")]
)
def test_free_blocks_are_left_alone_where_nobody_says_which_are(serve, settings: dict[str, Any], why: str) -> None:
    """By the worker's own ledger, and where groups share blocks: the certificate says that P1 is not fed."""
    served = running(serve, **settings)
    served.run()
    assert "P1" in served.wrapper.kvcanary_report()["inactive_classes"], why


def test_a_block_that_the_prefix_cache_keeps_is_not_filled(serve) -> None:
    """It is free, and its bytes are there for the next request with this prefix."""
    served = running(serve)
    block = request_of(served, "a").blocks[0]
    before = served.caches["l0"][block].clone()
    served.run()
    assert torch.equal(served.caches["l0"][block], before)
    served.ask("again", [(3 * n) % 97 for n in range(30)], 4)
    served.run()
    assert served.wrapper.kvcanary_report()["findings"] == []
