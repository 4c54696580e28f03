"""Pages that went to the host come back as they were, and the canary tells where they did not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary.invariants import HostBlockError, HostCapacityError
from spec_engine.memory.cache.host_rows import slots_of
from spec_engine.memory.cache.host_tier import HostTier, LoadFailedError
from spec_engine.memory.pools.pool import KVPool
from spec_engine.step.streams import Streams


def offloaded(rig, length: int = 10):
    """A request that is retracted to the host, while another one takes its pages."""
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    row = rig.start("one", length)
    block = tier.offload(row.pages, row.committed)
    rig.streams.host.wait(block.event)
    rig.free("one")
    rig.start("two", 9)
    return tier, block


def reserve(rig, block) -> list[int]:
    """Pages for a block that comes back."""
    row = rig.rows["one"]
    row.pages = rig.allocator.allocate(len(block.places))
    rig.canary.on_alloc("one", row.pages, for_load=True)
    return row.pages


def restored(rig, tier, block) -> None:
    """The whole way back, and a forward that reads the row."""
    tier.finish(tier.restore(block, "one", reserve(rig, block)))
    rig.commit("one", block.length)
    rig.decode("one")


def finish_all(rig) -> None:
    for name in rig.rows:
        rig.canary.release(name)
        rig.free(name)


@pytest.mark.parametrize("content", ["rolling", "full", "write"])
def test_a_retracted_request_goes_on_where_it_was(make_rig, content):
    """Its bytes lie in other pages, the canary reads them and has nothing to say."""
    rig = make_rig(content=content)
    tier, block = offloaded(rig)
    restored(rig, tier, block)
    rig.decode("one")
    finish_all(rig)
    assert rig.codes() == []
    tier.drop(block)
    tier.check_accounting()


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("slides", ["before", "after"])
def test_a_window_pool_comes_back_through_its_map(make_rig, slides, is_damaged):
    """What lies in the window travels too, from its own slots and to its own slots; damage there is T1."""
    rig = make_rig(window=6)
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary, {"window": rig.allocator.slot_map})
    rig.allocator.start("zero")
    rig.start("zero", 12)
    rig.slide("zero")
    rig.allocator.start("one")
    row = rig.start("one", 14)
    if slides == "before":
        rig.slide("one")
    block = tier.offload(row.pages, row.committed)
    rig.streams.host.wait(block.event)
    rig.free("one")
    rig.allocator.forget("one")
    if is_damaged:
        tier._rows[2].parts[0][block.places[3] * 4 + 1, 0, 0, 0, 0] += 1
    rig.allocator.start("two")
    rig.start("two", 7)
    rig.allocator.start("one")
    pages = reserve(rig, block)
    row.committed = block.length
    rig.slide("one")
    tier.finish(tier.restore(block, "one", pages))
    rig.commit("one", block.length)
    rig.decode("one")
    rig.decode("one")
    assert rig.codes()[:1] == (["T1"] if is_damaged else [])
    assert {(finding.pool, finding.position) for finding in rig.canary.findings} == (
        {("window", 13)} if is_damaged else set()
    )


def test_bytes_come_back_as_they_were(make_rig):
    """All layers of all pools, in row order."""
    rig = make_rig()
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    row = rig.start("one", 10)
    before = [pool.kv[:, slots_of(row.pages, 4)].clone() for pool in rig.pools]
    block = tier.offload(row.pages, row.committed)
    rig.streams.host.wait(block.event)
    rig.free("one")
    rig.start("two", 17)
    pages = reserve(rig, block)
    tier.finish(tier.restore(block, "one", pages))
    after = [pool.kv[:, slots_of(pages, 4)] for pool in rig.pools]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_cached_page_comes_back_behind_another(make_rig):
    """A prefix cache has given up the second page of two; a request that begins with both takes it from the host."""
    rig = make_rig()
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    row = rig.start("old", 8)
    tokens, (kept, given_up) = list(row.tokens), row.pages
    rig.canary.on_share("old", [kept, given_up])
    rig.canary.release("old")
    rig.canary.on_free("old", [kept, given_up])
    block = tier.offload([given_up], 8)
    rig.streams.host.wait(block.event)
    rig.canary.on_evict([given_up])
    rig.allocator.free([given_up])
    rig.start("two", 9)
    rig.canary.admit("one", tokens)
    rig.canary.on_acquire("one", [kept])
    [fresh] = rig.allocator.allocate(1)
    rig.canary.on_alloc("one", [fresh], for_load=True)
    tier.finish(tier.restore(block, "one", [fresh]))
    rig.rows["one"] = type(row)(tokens, [kept, fresh])
    rig.commit("one", block.length)
    rig.decode("one")
    rig.canary.on_share("one", [fresh])
    assert rig.codes() == []


def test_what_was_not_final_does_not_come_back(make_rig):
    """Entries behind the final ones, such as rejected nodes of a tree, are unwritten afterwards."""
    rig = make_rig()
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    row = rig.start("one", 7)
    rig.read("one", 7)
    tail = row.pages[1:]
    block = tier.offload(tail, 7)
    rig.streams.host.wait(block.event)
    rig.canary.on_free("one", tail)
    rig.canary.on_alloc("one", tail, for_load=True)
    tier.finish(tier.restore(block, "one", tail))
    rig.read("one", 8)
    assert rig.codes() == ["R12"]
    assert {finding.position for finding in rig.canary.findings} == {7}


def test_what_an_earlier_owner_wrote_does_not_come_back(make_rig):
    """A draft pool that had not caught up holds nothing of this request, though its slots had other records."""
    rig = make_rig()
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    rig.start("old", 8)
    rig.canary.release("old")
    rig.free("old")
    row = rig.rows["one"] = type(rig.rows.pop("old"))(list(range(1, 10)))
    rig.canary.admit("one", row.tokens)
    rig.grow("one", 8)
    rig.forward("one", "prefill", 0, 8, "target")
    block = tier.offload(row.pages, 8)
    rig.streams.host.wait(block.event)
    rig.free("one")
    tier.finish(tier.restore(block, "one", reserve(rig, block)))
    rig.commit("one", 8)
    rig.read("one", 8)
    assert {finding.pool for finding in rig.canary.findings} == {"draft"}
    assert set(rig.codes()) == {"R12"}


def test_a_record_that_was_damaged_before_it_left_stays_damaged(make_rig):
    """The way over the host mends nothing."""
    rig = make_rig()
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    row = rig.start("one", 10)
    rig.canary.drain()
    rig.canary.session.state.by_name["target"].records[row.pages[1] * 4, 1] ^= 1 << 7
    block = tier.offload(row.pages, row.committed)
    rig.streams.host.wait(block.event)
    rig.free("one")
    restored(rig, tier, block)
    rig.canary.drain()
    found = [(finding.code, finding.slot) for finding in rig.canary.findings]
    assert ("R3", rig.rows["one"].pages[1] * 4) in found


def test_a_copy_to_the_host_waits_for_the_forwards(make_rig):
    """What the forwards still write is copied behind them."""
    rig = make_rig()
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    row = rig.start("one", 10)
    rig.streams.main.submit("forward", lambda: None, writes=row.pages)
    tier.offload(row.pages, row.committed)
    assert rig.codes() == []


@pytest.mark.parametrize("part", ["target", "draft"])
def test_a_bit_that_flips_in_host_memory_is_told_when_it_comes_back(make_rig, part):
    """T1 names the pool, the slot, the position and the layer."""
    rig = make_rig()
    tier, block = offloaded(rig)
    pool = [pool.name for pool in rig.pools].index(part)
    layer = len(rig.pools[pool].kv) - 1
    damaged = tier._rows[pool].parts[0][block.places[1] * 4 + 2, layer, 1]
    damaged.view(torch.int32)[0, 3] ^= 1
    pages = reserve(rig, block)
    tier.finish(tier.restore(block, "one", pages))
    assert rig.codes() == ["T1"]
    finding = rig.canary.findings[0]
    assert (finding.pool, finding.slot, finding.position, finding.layer) == (part, pages[1] * 4 + 2, 6, layer)
    assert "one" in finding.readers


def test_pages_that_come_back_in_another_order_are_told(make_rig):
    """T1: two pages have changed places on their way."""
    rig = make_rig()
    tier, block = offloaded(rig)
    first, second = (tier._rows[0].parts[0][slots_of([place], 4)] for place in block.places[:2])
    tier._rows[0].parts[0][slots_of(block.places[:2], 4)] = torch.cat([second, first])
    pages = reserve(rig, block)
    tier.finish(tier.restore(block, "one", pages))
    assert rig.codes() == ["T1"]
    [finding] = rig.canary.findings
    assert (finding.slot, finding.bytes_of[0].slot) == (pages[0] * 4, pages[1] * 4)


def test_another_requests_block_is_told(make_rig):
    """The bytes are whole and in order, but they are somebody else's: the next reader finds its row wrong."""
    rig = make_rig()
    tier, _ = offloaded(rig)
    other = rig.rows["two"]
    block = tier.offload(other.pages, other.committed)
    tier.finish(tier.restore(block, "one", reserve(rig, block)))
    rig.commit("one", block.length)
    rig.decode("one")
    assert set(rig.codes()) & {"R5", "R6"}


def test_pages_that_are_read_before_they_have_arrived_are_told(make_rig):
    """O1 for the forward that did not wait; R12, since nothing is known to lie there."""
    rig = make_rig()
    tier, block = offloaded(rig, 8)
    tier.restore(block, "one", reserve(rig, block))
    rig.read("one", 8)
    assert rig.codes() == ["O1"]
    assert any(line.startswith("R12 unwritten slot: target") for line in rig.canary.findings[0].evidence)


def test_pages_that_are_freed_before_they_were_copied_are_told(make_rig):
    """O1: somebody else's bytes would go to the host."""
    rig = make_rig()
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    row = rig.start("one", 10)
    tier.offload(row.pages, row.committed)
    rig.free("one")
    assert set(rig.codes()) == {"O1"}


def test_bytes_that_were_damaged_before_they_left_are_told_when_they_are_freed(make_rig):
    """What leaves is compared with what was written, not with what happened to lie there."""
    rig = make_rig()
    tier = HostTier(rig.pools, 16, rig.streams, rig.canary)
    row = rig.start("one", 10)
    rig.pools[0].kv[1, row.pages[0] * 4 + 1, 0, 0, 0] += 1
    block = tier.offload(row.pages, row.committed)
    rig.streams.host.wait(block.event)
    rig.free("one")
    assert rig.codes() == ["R9"]
    tier.finish(tier.restore(block, "one", reserve(rig, block)))
    assert rig.codes() == ["R9", "T1"]


def test_a_load_that_fails_leaves_pages_that_may_be_freed(make_rig, monkeypatch):
    """LoadFailedError says what to do, nothing of it is read, and the request is computed again."""
    rig = make_rig()
    tier, block = offloaded(rig)

    def fail(*_: object) -> None:
        raise OSError("device is gone")

    monkeypatch.setattr(tier._rows[1], "load", fail)
    pages = reserve(rig, block)
    load = tier.restore(block, "one", pages)
    with pytest.raises(
        LoadFailedError, match=r"host block 1 for 'one' did not arrive in pages .*, device is gone: free"
    ):
        tier.finish(load)
    rig.free("one")
    rig.grow("one", 10)
    rig.forward("one", "prefill", 0, 10)
    rig.commit("one", 10)
    rig.decode("one")
    assert rig.codes() == []


def test_a_load_that_nobody_wants_any_more_is_cancelled(make_rig):
    """An aborted request gives back pages that were still loading."""
    rig = make_rig()
    tier, block = offloaded(rig)
    load = tier.restore(block, "one", reserve(rig, block))
    tier.cancel(load)
    rig.canary.release("one")
    rig.free("one")
    assert rig.codes() == []


def test_the_least_recently_used_block_makes_room(make_rig):
    """A block that was restored lately stays; the evicted one is refused in words."""
    rig = make_rig()
    tier = HostTier(rig.pools, 4, rig.streams)
    first, second = tier.offload([1, 2], 8), tier.offload([3, 4], 8)
    tier.finish(tier.restore(first, "one", [5, 6]))
    third = tier.offload([7], 4)
    assert [tier.holds(block) for block in (first, second, third)] == [True, False, True]
    with pytest.raises(HostBlockError, match="host block 2 restored, but it was dropped or evicted: ask holds"):
        tier.restore(second, "one", [5, 6])
    tier.check_accounting()


@pytest.mark.parametrize("count", [0, 5])
def test_more_than_the_tier_holds_is_refused(make_rig, count):
    """Nothing is evicted for pages that never fit."""
    rig = make_rig()
    tier = HostTier(rig.pools, 4, rig.streams)
    block = tier.offload([1, 2], 8)
    with pytest.raises(
        HostCapacityError, match=f"{count} pages offloaded at once, the host tier has 4: raise its size"
    ):
        tier.offload(range(1, count + 1), 4 * count)
    assert tier.holds(block)


def test_a_block_comes_back_whole(make_rig):
    """Another number of pages is refused by the tier, and by the canary where an engine has its own tier."""
    rig = make_rig()
    tier, block = offloaded(rig)
    with pytest.raises(HostBlockError, match="host block 1 of 3 pages restored into 2: allocate as many"):
        tier.restore(block, "one", [7, 8])
    pages = reserve(rig, block)
    rig.canary.on_load_begin("one", pages)
    rig.canary.on_load_end("one", pages[:2], 8, block.snapshot)
    rig.canary.collect(rig.canary.end_step())
    [finding] = rig.canary.findings
    assert (finding.code, finding.reader) == ("L1", "one")
    assert "as many pages as it left, got 2 for 3" in finding.sentence


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["off", "on", "drop", "write"]), st.integers(0, 99)), max_size=25))
def test_any_traffic_agrees_with_a_dictionary(calls):
    """A held block always comes back with the bytes of its time, whatever was written, evicted and waited for since."""
    cpu = torch.device("cpu")
    shape = {"num_layers": 2, "num_pages": 8, "page_size": 2, "kv_heads": 1, "head_dim": 2, "token_offset": 0}
    pool, streams = KVPool("target", dtype=torch.float32, device=cpu, **shape), Streams(cpu)
    tier = HostTier([pool], 5, streams)
    pool.kv.copy_(torch.randn(pool.kv.shape))
    model: list[tuple] = []  # (block, its bytes), least recently used first
    for kind, number in calls:
        pages = [1 + (number + i) % 8 for i in range(1 + number % 3)]
        slots = slots_of(pages, 2)
        if kind == "write":
            streams.synchronize()
            pool.kv[:, slots] = torch.randn(2, len(slots), 2, 1, 2)
        elif kind == "off":
            new = tier.offload(pages, len(slots)), pool.kv[:, slots].clone()
            while sum(len(block.places) for block, _ in model) + len(pages) > 5:
                assert not tier.holds(model.pop(0)[0])
            model.append(new)
        elif model:
            block, value = model.pop(number % len(model))
            if kind == "drop":
                tier.drop(block)
                continue
            model.append((block, value))
            back = slots_of(range(1, 1 + len(block.places)), 2)
            tier.finish(tier.restore(block, "one", list(range(1, 1 + len(block.places)))))
            assert torch.equal(pool.kv[:, back], value)
        assert all(tier.holds(block) for block, _ in model)
        tier.check_accounting()
        assert tier.num_free == 5 - sum(len(block.places) for block, _ in model)
