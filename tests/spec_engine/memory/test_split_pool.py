"""A split pool has every token on the host, the hot ones on the device too, and reads no other there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary import CanaryConfig, CanaryManager
from kvcanary.groups import map_faults
from kvcanary.invariants import PageLeakError, PoolExhaustedError, ResidencyError
from spec_engine.memory.pool import KVPool
from spec_engine.memory.split_pool import SplitPool
from spec_engine.streams import Streams

CPU = torch.device("cpu")
P, HOT = 4, 2


def make_kv(name: str = "device", num_pages: int = 9) -> KVPool:
    shape = {"num_layers": 2, "page_size": P, "kv_heads": 1, "head_dim": 2, "token_offset": 0}
    return KVPool(name, num_pages=num_pages, dtype=torch.float32, device=CPU, **shape)


class Rig:
    """A split pool of 16 logical pages, and a forward that writes one number a token."""

    def __init__(self, desk=None) -> None:
        self.kv, self.streams = make_kv(), Streams(CPU, desk)
        self.pool = SplitPool(self.kv, 16, HOT, self.streams)

    def write(self, slots: list[int], values: list[float]) -> None:
        self.kv.kv[:, self.pool.translate(torch.tensor(slots))] = torch.tensor(values)[:, None, None, None]

    def read(self, slots: list[int]) -> list[float]:
        held = self.kv.kv[:, self.pool.translate(torch.tensor(slots))].flatten(2)
        assert torch.equal(held, held[:1, :, :1].expand_as(held))
        return held[0, :, 0].tolist()

    def start(self, name: str, length: int) -> list[int]:
        """A request of so many entries, written and saved by hot regions; its logical slots."""
        self.pool.start(name)
        slots = [page * P + o for page in self.pool.alloc_extend(name, length) for o in range(P)][:length]
        for first in range(0, length, HOT * P):
            chunk = slots[first : first + HOT * P]
            self.pool.bind(name, chunk)
            self.write(chunk, [float(slot) for slot in chunk])
            self.pool.save(name, chunk)
        return slots


def test_tokens_come_back_as_they_were():
    """Twelve tokens in eight hot slots: the first four went to the host, and come back in the place of others."""
    rig = Rig()
    slots = rig.start("one", 12)
    assert rig.pool.translate(torch.tensor([*slots[:8], -1])).tolist()[:4] == [0] * 4
    rig.streams.main.wait(rig.pool.swap_in("one", [slots[0], slots[9]]))
    assert rig.read([slots[0], slots[9]]) == [slots[0], slots[9]]
    rig.pool.check_accounting()


def test_a_swap_that_nobody_waits_for_gives_old_bytes():
    """The slot is translated at once, its bytes come with the event."""
    rig = Rig()
    slots = rig.start("one", 12)
    event = rig.pool.swap_in("one", slots[:1])
    assert rig.read(slots[:1]) != [slots[0]]
    rig.streams.main.wait(event)
    assert rig.read(slots[:1]) == [slots[0]]
    assert rig.pool.swap_in("one", slots[:1]) is None


@pytest.mark.parametrize("waits", [False, True])
def test_the_canary_tells_a_swap_that_nobody_waits_for(waits):
    """O1 names the logical page; the clean twin is silent, and so is everything that the pool does by itself."""
    canary = CanaryManager(CanaryConfig(mode="log", seed=1), [make_kv("full", 16).view()])
    canary.arm()
    canary.admit("one", range(1, 13))
    canary.on_alloc("one", [1, 2, 3])
    rig = Rig(canary.tickets)
    slots = rig.start("one", 12)
    event = rig.pool.swap_in("one", slots[:1])
    if waits:
        rig.streams.main.wait(event)
    rig.streams.main.use("verify", [1])
    rig.pool.bind_verify("one", [16, 17])
    rig.pool.settle_verify("one", [16])
    rig.pool.release("one")
    canary.release("one")
    canary.on_free("one", [1, 2, 3])
    canary.drain()
    assert [finding.found["access"].split(" (")[0] for finding in canary.findings] == (
        [] if waits else ["'verify' on stream main touches page 1 without waiting for 'swap in'"]
    )


def test_the_canary_reads_through_the_map():
    """Resident tokens have a slot each; one that is not on the device is R2 for whoever would read it."""
    rig = Rig()
    slots = rig.start("one", 12)
    view = rig.pool.view()
    CanaryManager(CanaryConfig(seed=1), [make_kv("full", 16).view(), view]).detach()
    assert map_faults(view, torch.tensor(slots[8:])) == []
    [fault] = map_faults(view, torch.tensor(slots[:1]))
    assert (fault.code, fault.full_slots) == ("R2", (slots[0],))


def test_extend_counts_pages_not_tokens():
    """Two rows of five tokens need four pages: three are not enough, though they have twelve slots."""
    rig = Rig()
    rig.pool = SplitPool(rig.kv, 3, HOT, rig.streams)
    for name in ("one", "two"):
        rig.pool.start(name)
    assert rig.pool.alloc_extend("one", 5) == [1, 2]
    assert rig.pool.alloc_extend("one", 8) == []
    with pytest.raises(PoolExhaustedError, match="2 pages needed, 1 of 3 free"):
        rig.pool.alloc_extend("two", 5)
    assert rig.pool.num_free == 1
    rig.pool.check_accounting()


def test_a_forward_uses_only_what_is_on_the_device():
    """The always-on check counts what is missing and names the first."""
    rig = Rig()
    slots = rig.start("one", 12)
    with pytest.raises(ResidencyError, match=f"one: 4 of 12 tokens are not on the device, .* logical slot {slots[0]}"):
        rig.pool.use("one", slots)
    rig.pool.use("one", slots[8:])


def test_what_was_used_longest_ago_makes_room():
    """A use makes a token young again, and so does a swap that finds it there; what is wanted now never leaves."""
    rig = Rig()
    slots = rig.start("one", 12)
    rig.pool.use("one", slots[4:5])
    assert rig.pool.swap_in("one", slots[5:6]) is None
    rig.pool.swap_in("one", [*slots[:2], slots[6]])
    resident = rig.pool.translate(torch.tensor(slots)) > 0
    assert resident.nonzero().flatten().tolist() == [0, 1, 4, 5, 6, 9, 10, 11]


def test_what_is_written_again_is_saved_again():
    """The host's copy of a token that was bound anew is an old one."""
    rig = Rig()
    slots = rig.start("one", 5)
    rig.pool.bind("one", slots[:1])
    rig.write(slots[:1], [9.0])
    rig.pool.swap_out("one", slots[:1])
    rig.streams.main.wait(rig.pool.swap_in("one", slots[:1]))
    assert rig.read(slots[:1]) == [9.0]


def test_what_is_not_saved_stays():
    """Unsaved tokens make no room, and cannot come back from a host that does not have them."""
    rig = Rig()
    rig.pool.start("one")
    slots = [page * P + o for page in rig.pool.alloc_extend("one", 9) for o in range(P)]
    rig.pool.bind("one", slots[:8])
    with pytest.raises(ResidencyError, match="1 tokens wanted on the device, its 8 hot slots have room for 0"):
        rig.pool.bind("one", slots[8:9])
    with pytest.raises(ResidencyError, match="not on the device"):
        rig.pool.swap_in("one", slots[8:9])
    rig.write(slots[:1], [7.0])
    rig.pool.swap_out("one", slots[:1])
    rig.pool.bind("one", slots[8:9])
    rig.write(slots[8:9], [5.0])
    rig.pool.save("one", slots[8:9])
    rig.streams.main.wait(rig.pool.swap_in("one", slots[:1]))
    assert rig.read(slots[:1]) == [7.0]


def test_accepted_nodes_of_a_verify_become_hot_and_the_others_vanish():
    """The nodes lie on the extra page until they are settled; accepted bytes are in a hot slot and on the host."""
    rig = Rig()
    slots = rig.start("one", 8)
    new = [page * P + o for page in rig.pool.alloc_extend("one", 12) for o in range(P)][:3]
    rig.pool.bind_verify("one", new)
    extra = rig.pool._rows["one"].device[-1]
    assert rig.pool.translate(torch.tensor(new)).tolist() == [extra * P, extra * P + 1, extra * P + 2]
    rig.write(new, [1.0, 2.0, 3.0])
    rig.pool.settle_verify("one", new[:2])
    assert rig.read(new[:2]) == [1.0, 2.0]
    assert rig.pool.translate(torch.tensor(new)).tolist()[2] == 0
    rig.pool.swap_out("one", new[:2])
    rig.streams.main.wait(rig.pool.swap_in("one", [new[0], slots[0]]))
    assert rig.read([new[0], slots[0]]) == [1.0, slots[0]]
    rig.pool.check_accounting()


def test_a_verify_fits_on_one_page_and_is_settled_before_the_next():
    """More nodes than a page holds, a second verify on top, or a node that is resident, are refused."""
    rig = Rig()
    rig.start("one", 4)
    new = [page * P + o for page in rig.pool.alloc_extend("one", 12) for o in range(P)]
    with pytest.raises(ResidencyError, match="5 verify tokens for an extra page of 4 slots, 0 slots are taken"):
        rig.pool.bind_verify("one", new[:5])
    with pytest.raises(ResidencyError, match="2 verify tokens for an extra page of 4 slots, 1 slots are taken"):
        rig.pool.bind_verify("one", [P, new[0]])
    rig.pool.bind_verify("one", new[:2])
    with pytest.raises(ResidencyError, match="1 verify tokens for an extra page of 4 slots, 2 slots are taken"):
        rig.pool.bind_verify("one", new[2:3])
    assert rig.pool.settle_verify("one", []) is None
    rig.pool.bind_verify("one", new[2:3])


def test_released_pages_are_free_and_nothing_lands_in_them():
    """The host waits for copies in flight before the pages may be somebody else's."""
    rig = Rig()
    slots = rig.start("one", 12)
    event = rig.pool.swap_in("one", slots[:1])
    rig.pool.release("one")
    before = rig.kv.kv.clone()
    rig.streams.main.wait(event)
    assert torch.equal(rig.kv.kv, before)
    assert not rig.pool.slot_map.any()
    rig.pool.check_accounting()
    assert rig.pool.num_free == 16


def test_a_lost_page_is_a_leak():
    """Logical and device pages are each accounted for, and every hot slot."""
    rig = Rig()
    rig.start("one", 5)
    row = rig.pool._rows["one"]
    row.free.pop()
    with pytest.raises(ResidencyError, match="2 hot slots free \\+ 5 resident != 8 in all"):
        rig.pool.check_accounting()
    row.device.pop()
    with pytest.raises(PageLeakError):
        rig.pool.check_accounting()
    row.device.append(3)
    row.pages.pop()
    with pytest.raises(PageLeakError):
        rig.pool.check_accounting()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "end", "verify", "swap in", "swap out", "advance"]), st.integers(0, 99)),
        max_size=40,
    )
)
def test_any_traffic_agrees_with_a_dictionary(calls):
    """Whatever was swapped and settled: a token that was waited for has the bytes that were written for it."""
    rig = Rig()
    model: dict[str, dict[int, float]] = {}  # by request and logical slot, what was accepted there
    value = 0.0
    for number, (kind, choice) in enumerate(calls):
        name = sorted(model)[choice % len(model)] if model else None
        if kind == "start" and len(model) < 3:
            slots = rig.start(f"r{number}", 1 + choice % 8)
            model[f"r{number}"] = {slot: float(slot) for slot in slots}
        elif name is None or kind == "advance":
            rig.streams.side("split pool").advance(choice % 3)
        elif kind == "end":
            rig.pool.release(name)
            del model[name]
        elif kind == "verify" and rig.pool.num_free:
            pages = rig.pool._rows[name].pages
            rig.pool.alloc_extend(name, (len(pages) + 1) * P)
            nodes = [pages[-1] * P + o for o in range(1 + choice % P)]
            rig.pool.bind_verify(name, nodes)
            values = [value + n + 0.5 for n in range(len(nodes))]
            value += len(nodes)
            rig.write(nodes, values)
            accepted = nodes[: choice % (len(nodes) + 1)]
            rig.pool.settle_verify(name, accepted)
            model[name] |= dict(zip(accepted, values, strict=False))
        elif kind == "swap out":
            resident = list(rig.pool._rows[name].resident)
            rig.pool.swap_out(name, resident[: choice % 4])
        elif kind == "swap in":
            known = sorted(model[name])
            wanted = [known[(choice + 3 * n) % len(known)] for n in range(1 + choice % 5)]
            wanted = list(dict.fromkeys(wanted))
            if (event := rig.pool.swap_in(name, wanted)) is not None:
                rig.streams.main.wait(event)
            rig.pool.use(name, wanted)
            assert rig.read(wanted) == [model[name][slot] for slot in wanted]
        rig.pool.check_accounting()
