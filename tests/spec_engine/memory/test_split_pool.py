"""A split pool has what runs on the device and the rest on the host, and what comes back is what left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary import CanaryConfig, CanaryManager
from kvcanary.faults import arm
from kvcanary.invariants import PageLeakError, PoolExhaustedError, ResidencyError
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.extend import alloc_extend
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.pools.split_pool import SplitPool, SplitRow
from spec_engine.step.streams import Stream, Streams

CPU = torch.device("cpu")
P, ON_DEVICE, FULL = 4, 3, 8


class Rig:
    """Three pages on the device for eight full ones; a forward writes one number a token."""

    def __init__(self, canary: bool = False) -> None:
        shape = {"num_layers": 2, "page_size": P, "kv_heads": 1, "head_dim": 2, "token_offset": 0}
        self.kv = KVPool("target", num_pages=ON_DEVICE, dtype=torch.float32, device=CPU, **shape)
        self.pool = SplitPool(FULL, ON_DEVICE, page_size=P, device=CPU)
        self.canary = None
        if canary:
            self.canary = CanaryManager(CanaryConfig(mode="log", seed=1), [self.pool.view(self.kv)])
            self.canary.arm()
        self.streams = Streams(CPU, None if self.canary is None else self.canary.async_tracker)
        self.pool.serve(self.kv, self.streams, self.canary)

    def start(self, length: int) -> list[int]:
        """The pages of a new row."""
        return alloc_extend(self.pool, 0, length, P)

    def bring(self, *rows: list[int], first_new: int = 0) -> None:
        self.pool.bring("decode", [SplitRow(f"row {n}", pages, first_new) for n, pages in enumerate(rows)])

    def slots(self, pages: list[int]) -> torch.Tensor:
        return self.pool.translate(torch.tensor([page * P + o for page in pages for o in range(P)]))

    def write(self, pages: list[int], value: float) -> None:
        """Token n of these pages is value + n."""
        slots = self.slots(pages)
        self.kv.kv[:, slots] = (value + torch.arange(len(slots)))[:, None, None, None]

    def read(self, pages: list[int]) -> list[float]:
        held = self.kv.kv[:, self.slots(pages)].flatten(2)
        assert torch.equal(held, held[:1, :, :1].expand_as(held))
        return held[0, :, 0].tolist()


def test_pages_come_back_as_they_were():
    """Two rows of two pages on a device of three: each finds its own when its turn comes, wherever it lies then."""
    rig = Rig()
    one, two = rig.start(8), rig.start(8)
    for pages, value in ((one, 100.0), (two, 200.0)):
        rig.bring(pages)
        rig.write(pages, value)
    assert (rig.pool.num_on_device, rig.pool.num_swapped_out, rig.pool.num_swapped_in) == (3, 1, 0)
    for pages, value in ((one, 100.0), (two, 200.0), (one, 100.0)):
        rig.bring(pages, first_new=8)
        assert rig.read(pages) == [value + n for n in range(8)]
        rig.pool.check_accounting(4)


def test_what_is_final_is_copied_to_the_host_once():
    """A page that is behind what a forward writes keeps its bytes on the host; one that is written is copied again."""
    rig = Rig()
    one, two = rig.start(8), rig.start(12)
    copies = []
    for pages, first_new in ((one, 0), (two, 0), (one, 4), (two, 8), (one, 4)):
        before = rig.pool.num_swapped_out
        rig.bring(pages, first_new=first_new)
        copies.append(rig.pool.num_swapped_out - before)
    assert copies == [0, 2, 2, 1, 0]


def test_what_is_written_again_is_copied_again():
    """The host's bytes of a page that a forward has written since are old ones."""
    rig = Rig()
    one, two = rig.start(4), rig.start(12)
    rig.bring(one)
    rig.write(one, 1.0)
    rig.bring(two)
    rig.bring(one, first_new=3)
    rig.write(one, 5.0)
    rig.bring(two)
    rig.bring(one, first_new=4)
    assert rig.read(one) == [5.0, 6.0, 7.0, 8.0]


def test_what_was_used_longest_ago_makes_room():
    """And what the forward wants never leaves, however long ago it was used."""
    rig = Rig()
    one, two, three, four = (rig.start(4) for _ in range(4))
    for pages in (one, two, three, one):
        rig.bring(pages)
    rig.bring(four)
    assert rig.slots([*one, *two, *three, *four]).view(4, P).min(1).values.gt(0).tolist() == [True, False, True, True]
    rig.bring(three, two, four)
    assert int(rig.slots(one).max()) == 0


def test_a_forward_wants_no_more_than_the_device_holds():
    """Refused before anything moves, with what is wanted and what there is."""
    rig = Rig()
    one, two = rig.start(8), rig.start(8)
    rig.bring(one)
    with pytest.raises(ResidencyError, match="decode: 4 pages wanted on the device at once, it has 3"):
        rig.bring(one, two)
    assert rig.pool.num_on_device == 2


def test_missing_room_is_counted_in_full_pages():
    """Two rows of five tokens take four of them; the device has no say in that."""
    rig = Rig()
    rows = [rig.start(5) for _ in range(4)]
    assert rig.pool.num_free == 0
    with pytest.raises(PoolExhaustedError, match="1 pages needed, 0 of 8 free"):
        alloc_extend(rig.pool, 2, 9, P)
    rig.pool.free(rows[0])
    assert alloc_extend(rig.pool, 2, 9, P) == rows[0][:1]


def test_pages_of_the_last_holder_lie_nowhere():
    """A page that is shared keeps its place and its bytes; what is free has neither, on the device or on the host."""
    rig = Rig()
    one, two = rig.start(8), rig.start(8)
    for pages, value in ((one, 1.0), (two, 2.0)):
        rig.bring(pages)
        rig.write(pages, value)
    rig.pool.share(one[:1])
    rig.pool.free(one)
    rig.pool.check_accounting(3)
    rig.bring(one[:1], first_new=4)
    assert rig.read(one[:1]) == [1.0, 2.0, 3.0, 4.0]
    rig.pool.free(one[:1])
    rig.pool.free(two)
    rig.pool.check_accounting(0)
    assert not rig.pool.slot_map.any()
    again = rig.start(8)
    rig.bring(again)
    assert (rig.pool.num_swapped_in, again) == (1, one)


def test_a_page_that_is_granted_again_does_not_get_old_bytes():
    """What lay on the host is of the page's last grant."""
    rig = Rig()
    one, two = rig.start(4), rig.start(12)
    rig.bring(one)
    rig.bring(two)
    rig.pool.free(one)
    rig.bring(again := rig.start(4))
    assert again == one
    assert rig.pool.num_swapped_in == 0


@pytest.mark.parametrize("waits", [True, False])
def test_the_canary_tells_a_forward_that_does_not_wait(monkeypatch, waits):
    """O1 names the page and the copy; the clean twin, and all that the pool does by itself, is silent."""
    rig = Rig(canary=True)
    rig.canary.admit("one", range(1, 9))
    rig.canary.admit("two", range(1, 13))
    rows = {name: rig.start(length) for name, length in (("one", 8), ("two", 12))}
    for name, pages in rows.items():
        rig.canary.on_alloc(name, pages)
        rig.bring(pages)
    inner = Stream.wait

    def wait(stream, event):
        if waits or stream.name != "main":
            inner(stream, event)

    monkeypatch.setattr(Stream, "wait", wait)
    rig.bring(rows["one"])
    rig.canary.drain()
    reported = [finding.found["access"].split(" (")[0] for finding in rig.canary.findings if finding.code == "O1"]
    late = [f"'decode' on stream main touches page {page} without waiting for 'swap in'" for page in rows["one"]]
    assert reported == ([] if waits else late)


@pytest.mark.parametrize("fault", ["split.swap_in_skipped", "split.swap_in_elsewhere"])
def test_only_a_copy_that_is_missed_is_a_fault(fault):
    """Where the bytes lie already an armed fault does nothing; where others lie it strikes, and they stay."""
    rig = Rig()
    one, two = rig.start(8), rig.start(8)
    rig.kv.kv.fill_(1.0)
    for pages in (one, two):
        rig.bring(pages)
    with arm(fault) as armed:
        for value in (1.0, 2.0):
            rig.kv.kv.fill_(value)
            for pages in (one, two):
                rig.bring(pages, first_new=8)
            assert armed.num_asked
            assert (armed.num_strikes > 0) == (value == 2.0)
            assert rig.read(one if value == 1.0 else two)[0] == value


def test_pages_are_free_when_nothing_is_on_its_way_to_them():
    """The host waits for copies before it gives pages back: else that is O1."""
    rig = Rig(canary=True)
    rows = {}
    for name, length in (("one", 8), ("two", 12)):
        rig.canary.admit(name, range(1, length + 1))
        rows[name] = rig.start(length)
        rig.canary.on_alloc(name, rows[name])
        rig.bring(rows[name])
    rig.bring(rows["one"])
    for name, pages in rows.items():
        rig.canary.release(name)
        rig.pool.free(pages)
        rig.canary.on_free(name, pages)
    rig.canary.drain()
    assert rig.canary.findings == []


def test_a_lost_place_is_a_leak():
    """Pages of both kinds are accounted for, and nothing of a page that is free is kept."""
    rig = Rig()
    one = rig.start(8)
    rig.bring(one)
    with pytest.raises(PageLeakError):
        rig.pool.check_accounting(1)
    place = rig.pool._places.pop(one[0])
    with pytest.raises(PageLeakError):
        rig.pool.check_accounting(2)
    rig.pool._places[one[0]] = place
    rig.pool.check_accounting(2)
    PageAllocator.free(rig.pool, one)
    with pytest.raises(ResidencyError, match="2 pages lie on the device and 0 on the host, 0 are held"):
        rig.pool.check_accounting(0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "end", "write", "write", "read", "read"]), st.integers(0, 99)), max_size=40
    )
)
def test_any_traffic_agrees_with_a_dictionary(calls):
    """Whatever came and went in whatever order: rows that are brought have the bytes that were written for them."""
    rig = Rig()
    model: dict[str, tuple[list[int], float]] = {}
    for number, (kind, choice) in enumerate(calls):
        name = sorted(model)[choice % len(model)] if model else None
        if kind == "start" and rig.pool.num_free >= ON_DEVICE:
            pages = rig.start(1 + choice % (ON_DEVICE * P))
            rig.bring(pages)
            rig.write(pages, value := 100.0 * number)
            model[f"r{number}"] = pages, value
        elif name is None:
            continue
        elif kind == "end":
            rig.pool.free(model.pop(name)[0])
        else:
            pages, value = model[name]
            rig.bring(pages, first_new=0 if kind == "write" else len(pages) * P)
            assert rig.read(pages) == [value + n for n in range(len(pages) * P)]
            if kind == "write":
                rig.write(pages, value := 100.0 * number)
                model[name] = pages, value
        rig.pool.check_accounting(sum(len(pages) for pages, _ in model.values()))
