"""A window pool holds what is seen and nothing else; its map is right, or the report says where it is not."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvcanary import CanaryConfig, CanaryManager
from kvcanary.invariants import (
    DoubleFreeError,
    PageLeakError,
    PagesQuarantinedError,
    PoolExhaustedError,
    WindowMapError,
)
from kvcanary.pools.slot_maps import first_visible, window_start
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.prefix_cache import PrefixCache
from spec_engine.memory.cache.prefix_tree import PrefixTree
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.pools.window_pool import WindowPool, WindowRow
from spec_engine.memory.pools.window_report import WindowReports
from spec_engine.memory.request_table import RequestTable

CPU = torch.device("cpu")
P = 4


def make_pool(full: int = 12, own: int = 8, window: int = 6) -> WindowPool:
    return WindowPool(PageAllocator(full), PageAllocator(own), window=window, page_size=P, device=CPU)


def make_kv(name: str, num_pages: int) -> KVPool:
    shape = {"num_layers": 1, "page_size": P, "kv_heads": 1, "head_dim": 2, "token_offset": 0}
    return KVPool(name, num_pages=num_pages, dtype=torch.float32, device=CPU, **shape)


def slots(pages, first: int = 0) -> torch.Tensor:
    return torch.tensor([page * P + o for page in pages for o in range(P)], dtype=torch.int64)[first:]


def test_every_page_takes_one_of_both_pools():
    """All slots of a page are mapped in order; nobody's slots are not, and -1 stays -1."""
    pool = make_pool()
    pool.allocate(1)
    assert pool.allocate(2) == [2, 3]
    assert pool.translate(torch.tensor([2 * P, 3 * P + 1, 0, 4 * P, -1])).tolist() == [8, 13, 0, 0, -1]
    assert pool.num_free == 5


@pytest.mark.parametrize(
    ("full", "own", "words"), [(3, 9, "4 pages needed, 3 of 3"), (9, 3, "4 window pages needed, 3 of 3")]
)
def test_the_smaller_pool_is_the_capacity(full, own, words):
    """Too many pages are refused by the pool that lacks them, and none is taken from the other."""
    pool = make_pool(full, own)
    assert pool.num_free == 3
    with pytest.raises(PoolExhaustedError, match=words):
        pool.allocate(4)
    pool.check_accounting(0)


def test_window_pages_that_wait_are_not_handed_out_in_their_step():
    """A quarantine of the window pool refuses the grant as a whole, and gives it a step later."""
    pool = WindowPool(PageAllocator(9), PageAllocator(3, quarantine=4), window=6, page_size=P, device=CPU)
    pool.evict(pool.allocate(2))
    with pytest.raises(PagesQuarantinedError):
        pool.allocate(2)
    pool.check_accounting(2)
    pool.begin_step(1)
    assert pool.allocate(2) == [3, 4]
    pool.check_accounting(4)


def test_pages_before_the_window_are_given_back():
    """With a window of 6, a reader at position 13 sees from 8 on: two pages of four leave, the row keeps its slots."""
    pool = make_pool()
    pages = pool.allocate(5)
    pool.start("one")
    assert pool.slide(WindowRow("one", pages, 12)) == 1
    assert pool.slide(WindowRow("one", pages, 13)) == 1
    assert pool.slide(WindowRow("one", pages, 13)) == 0
    assert pool.translate(slots(pages))[: 2 * P].tolist() == [0] * 2 * P
    assert pool.translate(slots(pages))[2 * P :].all()
    assert pool.num_free == 5
    pool.check_accounting(5)
    pool.free(pages)
    pool.check_accounting(0)


def test_what_a_prefix_cache_holds_stays():
    """The cursor begins behind the protected pages, which the cache gives up itself."""
    pool = make_pool()
    pages = pool.allocate(5)
    pool.start("one", protected_len=4)
    assert pool.slide(WindowRow("one", pages, 13)) == 1
    pool.evict(pages[:1])
    pool.check_accounting(5)
    with pytest.raises(WindowMapError, match="protected length 6 must be whole pages of 4 slots"):
        pool.start("two", protected_len=6)


@pytest.mark.parametrize(
    ("evicted", "usable"), [([], 5), ([0], 5), ([0, 1, 2], 5), ([3], 3), ([0, 3], 3), ([0, 1, 3], 0)]
)
def test_a_cached_prefix_is_used_as_far_as_its_window_reaches(evicted, usable):
    """With a window of 6, who goes on from page n sees the two pages before it: they must not have left."""
    pool = make_pool()
    pages = pool.allocate(5)
    pool.evict([pages[place] for place in evicted])
    assert pool.usable_pages(pages) == usable


def test_a_prefix_cache_runs_over_a_window_pool():
    """The allocator of both pools serves a prefix cache as one pool's does: shared pages, eviction, accounting."""
    pool, tree = make_pool(), PrefixTree(P, bigram=False)
    cache, tokens = PrefixCache(pool, tree, RequestTable(2, 32, P, CPU)), list(range(13))
    one = SimpleNamespace(request_id="one", row=cache.table.acquire(), pages=pool.allocate(4), num_shared=0, node=None)
    one.generations = pool.generations_of(one.pages)
    cache.table.append_pages(one.row, 0, one.pages)
    pool.start("one")
    pool.slide(WindowRow("one", one.pages, 12))
    cache.retire(one, tokens[:12], 12)
    pool.forget("one")
    pool.check_accounting(0, tree.num_evictable, tree.num_protected)
    assert pool.usable_pages(tree.match(tokens, "", "").pages) == 3
    cache.make_room(pool.num_pages)
    pool.check_accounting(0)
    assert (pool.num_free, pool.references) == (8, {})


def test_a_request_that_comes_back_begins_anew():
    """After a retraction no cursor of the first life is left."""
    pool = make_pool()
    pages = pool.allocate(5)
    pool.start("one")
    pool.slide(WindowRow("one", pages, 13))
    pool.free(pages)
    pool.forget("one")
    assert pool._evicted_lens == {}
    pages = pool.allocate(2)
    pool.start("one")
    assert pool.slide(WindowRow("one", pages, 8)) == 0
    pool.check_mapped(WindowRow("one", pages, 8))


@pytest.mark.parametrize("committed_len", [3, 21])
def test_eviction_never_crosses_into_the_reserve(committed_len):
    """A length that the row does not have, or that lies before the cursor, is refused with all numbers."""
    pool = make_pool()
    pages = pool.allocate(5)
    pool.start("one")
    pool.slide(WindowRow("one", pages, 13))
    with pytest.raises(WindowMapError, match=f"evicted [0-9]+ <= committed {committed_len} <= allocated 20 is broken"):
        pool.slide(WindowRow("one", pages, committed_len))


def test_a_page_that_is_seen_and_has_left_is_refused():
    """The always-on check before a forward names the page, its positions and the window."""
    pool = make_pool()
    pages = pool.allocate(4)
    pool.evict(pages[1:2])
    with pytest.raises(WindowMapError, match=r"page 2 of positions \[4, 8\) has no window page, but .* from 7 on"):
        pool.check_mapped(WindowRow("one", pages, 12))
    pool.check_mapped(WindowRow("one", pages, 13))
    with pytest.raises(WindowMapError, match="evict: page 2"):
        pool.evict(pages[1:2])


def test_accounting_closes_for_both_pools():
    """A window page that was lost, or a page of the full pool that nobody owns, is a leak."""
    pool = make_pool()
    pages = pool.allocate(3)
    with pytest.raises(PageLeakError):
        pool.check_accounting(2)
    pool._pages.allocate(1)
    with pytest.raises(PageLeakError):
        pool.check_accounting(3)
    with pytest.raises(DoubleFreeError):
        pool.free([*pages, 9])


@pytest.mark.parametrize("position", range(0, 40, 3))
def test_the_canary_and_the_pool_mean_the_same_window(position):
    """One formula on each side, and they agree."""
    pool = make_pool()
    assert first_visible(position, 6) == window_start(pool.view(make_kv("window", 8)), position)


def have_slots_of_their_own(pool: WindowPool, seen: torch.Tensor) -> bool:
    """Whether the map leads from each of these slots of the full group to one that holds nothing else."""
    places = pool.translate(seen).tolist()
    return len(set(places)) == len(places) and all(place >= pool.page_size for place in places)


def test_what_is_seen_has_a_slot_of_its_own():
    """The canary takes the view, and no two entries of a window share a slot or lie in the null page."""
    pool = make_pool()
    CanaryManager(CanaryConfig(seed=1), [make_kv("target", 12).view(), pool.view(make_kv("window", 8))]).detach()
    pages = pool.allocate(5)
    pool.start("one")
    pool.slide(WindowRow("one", pages, 13))
    assert have_slots_of_their_own(pool, slots(pages, 8))
    assert not have_slots_of_their_own(pool, slots(pages, 4))  # the first of them has left


def slid(rig) -> None:
    """Two requests whose windows have slid, and a third that took over the pages that left."""
    for name, length in (("one", 12), ("two", 8)):
        rig.allocator.start(name)
        rig.start(name, length)
        rig.slide(name)
    for _ in range(6):
        for name in ("one", "two"):
            rig.decode(name)
            rig.slide(name)
    rig.allocator.start("three")
    rig.start("three", 8)
    for name in rig.rows:
        rig.decode(name)


@pytest.mark.parametrize("content", ["rolling", "full"])
def test_the_canary_is_silent_while_windows_slide(make_rig, content):
    """What left the window was given to others, and every reader finds its own tokens through the map."""
    rig = make_rig(window=6, content=content)
    slid(rig)
    assert rig.codes() == []
    for name, row in rig.rows.items():
        rig.canary.release(name)
        rig.free(name)
        rig.allocator.forget(name)
        assert row.pages == []
    assert rig.codes() == []
    rig.allocator.check_accounting(0)


def test_the_canary_tells_a_page_that_left_too_early(make_rig):
    """R2: a position inside the window leads to a null slot."""
    rig = make_rig(window=6)
    slid(rig)
    row = rig.rows["one"]
    rig.allocator.evict([row.pages[(row.committed - 4) // P]])
    rig.read("one", row.committed)
    assert set(rig.codes()) == {"R2"}


def test_the_canary_tells_a_map_that_leads_to_somebody_elses_slot(make_rig):
    """Two entries have changed places: their readers find whole records of other positions."""
    rig = make_rig(window=6)
    slid(rig)
    first = slots(rig.rows["one"].pages, rig.rows["one"].committed - 2)[0]
    second = slots(rig.rows["two"].pages, rig.rows["two"].committed - 2)[0]
    rig.allocator.slot_map[torch.stack([first, second])] = rig.allocator.slot_map[torch.stack([second, first])]
    rig.decode("one")
    assert set(rig.codes()) & {"R4", "R5", "R6", "R8"}
    assert {finding.pool for finding in rig.canary.findings} == {"window"}


def test_a_page_that_others_hold_stays_in_the_window_pool():
    """A request slides past a page that another one shares, and that one still sees it."""
    pool = make_pool()
    pages = pool.allocate(5)
    pool.share(pages[:1])
    pool.start("one")
    assert pool.slide(WindowRow("one", pages, 13)) == 1
    pool.free(pages)
    pool.check_mapped(WindowRow("two", pages[:1], 2))
    pool.check_accounting(1)
    pool.free(pages[:1])
    pool.check_accounting(0)


def test_a_clean_report_has_the_windows_and_no_event():
    """By row the slots through the map, from the first position seen to the end of the reserve."""
    pool = make_pool()
    pages = pool.allocate(3)
    with capture_logs() as events:
        [row] = WindowReports(pool).compare([WindowRow("one", pages, 8)])
    assert row.is_clean
    assert (row.first_position, row.window_slots, row.agreed_len) == (3, tuple(range(7, 16)), 12)
    assert events == []


def test_a_report_names_what_diverges_and_when_it_last_agreed():
    """Unmapped, evicted and wrong entries by position, as plain JSON and as an event."""
    pool = make_pool()
    reports = WindowReports(pool)
    pool.begin_step(3)
    pages = pool.allocate(4)
    row = WindowRow("one", pages, 8)
    reports.compare([row])
    pool.begin_step(4)
    pool.evict(pages[2:3])
    where = slots(pages)
    pool.slot_map[where[5]], pool.slot_map[where[6]] = 0, 30
    with capture_logs() as events:
        [found] = reports.compare([row])
    assert (found.unmapped, found.wrong, found.evicted) == ((5,), (6,), (8, 9, 10, 11))
    assert (found.agreed_len, found.last_agreed_step, found.is_clean) == (5, 3, False)
    assert [(event["event"], event["step"], event["unmapped"]) for event in events] == [
        ("spec_engine.window_divergence", 4, [5])
    ]
    assert json.loads(json.dumps(found.to_json()))["window_slots"] == [7, 8, 0, 30, 11, 0, 0, 0, 0, 16, 17, 18, 19]
    reports.compare([])
    assert reports.compare([row])[0].last_agreed_step is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["start", "grow", "commit", "end"]), st.integers(0, 50)), max_size=40))
def test_any_traffic_keeps_what_is_seen(calls):
    """Against a dictionary of what each row wrote: everything in a window is read back, and both pools add up."""
    pool, kv, value = make_pool(), make_kv("window", 8), 0
    rows: dict[str, tuple[list[int], int, dict[int, int]]] = {}  # pages, committed, position -> value
    for number, (kind, choice) in enumerate(calls):
        name = sorted(rows)[choice % len(rows)] if rows else None
        if kind == "start" or name is None:
            rows[f"r{number}"] = [], 0, {}
            pool.start(f"r{number}")
            continue
        pages, committed, written = rows[name]
        if kind == "grow" and pool.num_free:
            pages += pool.allocate(min(1 + choice % 2, pool.num_free))
        elif kind == "commit":
            end = min(committed + 1 + choice % 5, len(pages) * P)
            for position in range(committed, end):
                value += 1
                where = pool.translate(slots(pages)[position : position + 1])
                kv.kv[0, where] = float(value)
                written[position] = value
            rows[name] = pages, end, written
            pool.slide(WindowRow(name, pages, end))
        elif kind == "end":
            pool.free(pages)
            pool.forget(name)
            del rows[name]
        live = []
        for request_id, (own, length, values) in rows.items():
            row = WindowRow(request_id, own, length)
            pool.check_mapped(row)
            seen = slots(own, first_visible(length, 6))
            live += seen.tolist()
            held = kv.kv[0, pool.translate(seen)].flatten(1)[:, 0].tolist()
            expected = [values.get(first_visible(length, 6) + n) for n in range(len(seen))]
            assert all(want is None or have == want for have, want in zip(held, expected, strict=True))
        assert have_slots_of_their_own(pool, torch.tensor(live, dtype=torch.int64))
        pool.check_accounting(sum(len(own) for own, *_ in rows.values()))
