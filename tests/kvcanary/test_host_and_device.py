"""Rules that stand twice, on the host and on the device, say the same of everything that both can be asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcanary import ReadPlan, WritePlan
from kvcanary.calls.forward import Forward
from kvcanary.checks.lengths import judge_lengths
from kvcanary.ledger.ledger import Ledger
from kvcanary.ledger.page_states import STATE_NAMES
from kvcanary.records.state import CanaryState
from kvcanary_kernels.record.layout import CODE_BITS, NO_OWNER, SHARED_OWNER

PAGE_SIZE = 4
PRIVATE = ("RESERVED", "WRITTEN", "COMMITTED", "NEVER_WRITTEN", "LOADING", "LOAD_FAILED")
WRITABLE = ("RESERVED", "WRITTEN", "LOAD_FAILED")


def ints(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def new_ledger(state: CanaryState) -> Ledger:
    ledger = Ledger(len(state.generations), PAGE_SIZE, 1, state.keys, [("target", 0)])
    for name in ("mine", "other"):
        ledger.admit(name, range(40), 1)
    return ledger


def live_every_life(ledger: Ledger) -> dict[tuple[str, str], int]:
    """One page for every state and owner that the ledger knows, by its own events."""
    pages, page = {}, iter(range(1, 24))
    for name in ("mine", "other"):
        for state in ("COMMITTED", "SHARED", *PRIVATE):
            if (state, name) in pages:
                continue
            number = pages[state, name] = next(page)
            ledger.grant(name, [number], 1, for_load=state in ("NEVER_WRITTEN", "LOADING", "LOAD_FAILED"))
            if state in ("WRITTEN", "COMMITTED", "SHARED"):
                ledger.pages.wrote(np.array([number]))
            if state in ("LOADING", "LOAD_FAILED"):
                ledger.load_begin(name, [number], 1)
            if state == "LOAD_FAILED":
                ledger.load_fail(name, [number], 1)
            if state in ("COMMITTED", "SHARED"):
                ledger.commit(name, PAGE_SIZE * len(ledger.request(name).pages), 1)
            if state == "SHARED":
                ledger.share(name, [number], 1)
        for state in ("FREE", "QUARANTINED"):
            number = pages[state, name] = next(page)
            ledger.grant(name, [number], 1)
            ledger.free(name, [number], 1)
            if state == "QUARANTINED":
                ledger.quarantine([number], 1)
    pages["FREE", "never granted"] = next(page)
    return pages


def device_codes(rig, row_of, pages: list[int], uid: int) -> dict[int, int]:
    """By page, the bits that the plan of a static forward sets where a request writes its first slot."""
    substep = rig.add("decode", rows=len(pages), entries=len(pages))
    rows = [row_of(uid, [page * PAGE_SIZE], [5]) for page in pages]
    rig.registry.begin_step(1)
    rig.registry.load(substep, rig.batch(rows))
    substep.open()
    codes = substep.work.planned.codes[: len(pages)].tolist()
    substep.abandon()
    return dict(zip(pages, codes, strict=True))


@pytest.fixture
def rig(make_static):
    return make_static()


def test_who_may_write_a_page_is_one_rule(rig, static_row):
    """Every state with every owner: W2, W3, W7 and W8 on both sides, or on neither."""
    ledger = new_ledger(rig.state)
    pages = live_every_life(ledger)
    assert {state for state, _ in pages} == set(STATE_NAMES.values())
    for (state, _), page in pages.items():
        assert STATE_NAMES[int(ledger.states[page])] == state
    assert {int(owner) for owner in ledger.owners} >= {
        NO_OWNER,
        SHARED_OWNER,
        *(r.uid for r in ledger.requests.values()),
    }
    numbers, uid = np.array(list(pages.values())), ledger.request("mine").uid
    rig.state.publish(ledger.pages)
    host = ledger.pages.write_codes(numbers, np.int64(uid))
    device = device_codes(rig, static_row, numbers.tolist(), uid)
    for entry, ((state, name), page) in enumerate(pages.items()):
        code = host.get(entry)
        expected = 0 if code is None else CODE_BITS[code]
        assert device[page] == expected, (state, name, code)
        if name == "mine" and state in PRIVATE:
            assert code == (None if state in WRITABLE else "W8")


@pytest.mark.parametrize("ancestors", [0, 1, 2])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_how_long_a_row_must_be_is_one_rule(rig, static_row, ancestors, written):
    """Every committed length with every length of a row: it is told on both sides, or on neither.

    Where all rows are those of a draft forward of another number, the host says so (H1) and the device says R10.
    """
    ledger = new_ledger(rig.state)
    request, pool = ledger.request("mine"), rig.pool
    kind = "draft" if ancestors else "decode"
    substep = rig.add(kind, ancestors, rows=1, entries=2, ancestors=ancestors)
    for committed in range(4):
        for before in range(6):
            request.committed_len, request.row_lens = committed, [committed]
            slots = list(range(4, 4 + before + written))
            rig.registry.begin_step(1 + 10 * committed + before)
            row = static_row(request.uid, slots, [5] * written, prefix_len=committed)
            rig.registry.load(substep, rig.batch([row]))
            substep.open()
            on_device = bool(substep.work.planned.codes[substep.forward.num_entries] & CODE_BITS["R10"])
            substep.abandon()
            read = ReadPlan(ints([0, len(slots)]), ints(slots), ("mine",), 1, ints([committed]), written)
            write = WritePlan(ints(slots[before:]), ints([5] * written), ints(range(before, before + written)))
            forward = Forward(kind, ancestors, pool, 1, [request], read, write)
            forward.read_rows()
            codes = [violation.code for violation in judge_lengths(forward)]
            assert codes in ([], ["R10"], ["H1"])
            on_host = bool(codes)
            assert on_host == on_device == (before != committed + ancestors), (committed, before)
