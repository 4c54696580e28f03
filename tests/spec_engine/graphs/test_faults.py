"""Faults between replays: what changes under a captured step is found in the very replay that reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary_kernels.record.layout import CHAIN
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.graphs import forward as forward_module

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = ["def f(a):", "class A:", "import os"]
CAPTURED = {"graphs": "on", "graph_buckets": [4]}
FIRST = 4  # entries of rows that have been in a committed page since their prefill


@pytest.fixture(params=DEVICES)
def start(request) -> Callable[..., Engine]:
    """Three requests in a bucket of four, in the midst of drafting; the canary logs, and reads all bytes each step."""
    return partial(run_on, request.param)


def run_on(device: str, disable: frozenset[str] = frozenset(), **graphs: object) -> Engine:
    settings = {"dtype": "float32", "device": device, "page_size": 4, "topk": 2, "num_steps": 3} | graphs
    settings |= {"max_total_tokens": 512, "context_length": 64, "max_running_requests": 4, "prefix_cache": False}
    canary = CanaryConfig(mode="log", seed=5, budget=1 << 30, disable=disable)
    engine = Engine(EngineConfig(canary=canary, **settings))
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True))
    while min((request.committed_len for request in engine.running), default=0) < 2 * FIRST:
        engine.step()
    assert engine.canary.findings == []
    return engine


@pytest.fixture
def running(start) -> Engine:
    return start(**CAPTURED)


def found(engine: Engine) -> set[tuple[str, str, int, str | None]]:
    """(code, kind of forward, slot, reader) of each incident that the next step finds."""
    before = len(engine.canary.findings)
    engine.step()
    new = engine.canary.findings[before:]
    assert {finding.step for finding in new} <= {engine.canary.step}
    return {(finding.code, finding.site[0], finding.slot, finding.reader) for finding in new}


def slot_of(engine: Engine, number: int, position: int) -> int:
    return int(engine.request_table.table[engine.running[number].row, position])


def test_nothing_without_a_fault(running):
    """The clean twin of all below."""
    for _ in range(3):
        assert found(running) == set()


def flip_record(engine: Engine) -> int:
    """One bit of the record of req-1's slot."""
    slot = slot_of(engine, 1, 3)
    engine.canary.session.state.by_name["target"].records[slot, CHAIN] ^= 1 << 40
    return slot


def flip_bytes(engine: Engine) -> int:
    """One number of a layer's V in req-2's slot."""
    slot = slot_of(engine, 2, 1)
    engine.pools["target"].kv[2, slot, 1, 0].view(dtype=engine.pools["target"].kv.dtype)[3] += 1.0
    return slot


def name_another_slot(engine: Engine) -> int:
    """req-1's row of the request table names a slot of req-0."""
    stolen = slot_of(engine, 0, 2)
    engine.request_table.table[engine.running[1].row, 2] = stolen
    return stolen


def reuse_page(engine: Engine) -> int:
    """The first page of req-0, whose row still names it, becomes req-1's."""
    one, other = engine.running[0], engine.running[1]
    page = one.pages[0]
    engine.canary.on_free(one.request_id, [page])
    engine.canary.session.ledger.leave_quarantine(engine.canary.step, 0, 1)
    engine.canary.on_alloc(other.request_id, [page])
    return 4 * page


def test_a_flipped_bit_of_a_record(running):
    """R3 by the verify that reads the slot."""
    slot = flip_record(running)
    assert found(running) == {("R3", "verify", slot, "req-1")}


def test_a_flipped_bit_of_the_bytes(running):
    """R9 by the rolling check of the same step, whose budget is all bytes; no forward sees it."""
    slot = flip_bytes(running)
    assert found(running) == {("R9", "sweep", slot, "req-2")}


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_all_bytes_of_captured_rows_under_content_full(schedule):
    """The step whose rows read the bytes says so before its tokens leave, whatever the budget's turn."""
    settings = {"dtype": "float32", "page_size": 4, "draft": "none", "context_length": 64, "prefix_cache": False}
    canary = CanaryConfig(mode="raise", seed=5, content="full")
    engine = Engine(EngineConfig(graphs="on", schedule=schedule, max_total_tokens=512, canary=canary, **settings))
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=40, ignore_eos=True))
    while not engine.running or engine.running[0].output_len < 3:
        engine.step()
    engine.pools["target"].kv[2, slot_of(engine, 0, 1), 1, 0][3] += 1.0
    step = engine.canary.step
    if schedule == "overlap":
        engine.step()  # clean tokens leave, the damaged step is launched
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    assert [(finding.code, finding.step) for finding in caught.value.findings] == [("R9", step + 1)]


def test_a_stale_index_row(running):
    """The request table names another request's slot: verify and drafts read it, and say whose it is."""
    stolen = name_another_slot(running)
    assert ("R8", "verify", stolen, "req-1") in found(running)


def test_a_page_that_was_freed_and_reused(running):
    """The row still names a page that is another request's by now, and holds nothing of that grant: R12, R8 behind."""
    slot = reuse_page(running)
    assert found(running) == {("R12", "verify", slot, "req-0")}


@pytest.mark.parametrize("fault", [flip_record, flip_bytes, name_another_slot, reuse_page])
def test_eager_steps_find_what_captured_ones_find(start, fault):
    """The same codes at the same slots for the same readers, in the first step that reads them."""
    judged = []
    for engine in (start(graphs="off"), start(**CAPTURED)):
        slot = fault(engine)
        judged.append({(code, at, reader) for code, _, at, reader in found(engine)})
        assert slot in {at for _, at, _ in judged[-1]}
    assert judged[0] == judged[1]


def test_a_padding_row_aimed_at_a_live_slot(running):
    """W9 at the slot: row 0 of the request table, which is padding's, names one that a request owns."""
    slot = slot_of(running, 1, 0)
    running.request_table.table[0, 0] = slot
    assert ("W9", slot) in {(code, at) for code, _, at, _ in found(running)}


def test_padding_is_not_judged_where_its_check_is_switched_off():
    """W9 disabled: what the padding row does is nobody's finding by that name."""
    engine = run_on("cpu", frozenset({"W9"}), **CAPTURED)
    engine.request_table.table[0, 0] = slot_of(engine, 1, 0)
    assert "W9" not in {code for code, *_ in found(engine)}
    assert engine.canary.certificate()["inactive_classes"]["W9"] == "disabled"


def test_a_slot_beyond_the_pool_is_read_as_the_null_slot(running):
    """R2: the index builder leaves no stray address in a captured step, however far the table is off."""
    running.request_table.table[running.running[1].row, 2] = 1 << 40
    assert ("R2", "verify", 0, "req-1") in found(running)
    assert running.step() != []


def test_a_write_beyond_the_pool_stores_nothing(start):
    """W1: the store refuses the slot, no byte of any pool but the forward's own changes, and the engine goes on."""
    running = start(draft="none", **CAPTURED)
    request, pool = running.running[1], running.pools["target"].kv
    before, places = pool.clone(), [other.committed_len for other in running.running]
    running.request_table.table[request.row, request.committed_len] = 1 << 40
    assert "W1" in {code for code, *_ in found(running)}
    own = {slot_of(running, number, place) for number, place in enumerate(places)}
    changed = (pool != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
    assert set(changed) <= own
    assert running.step() != []


def test_an_index_beyond_the_pool_does_not_stop_the_body(start, monkeypatch):
    """R1, with an index builder that lets a stray slot pass: attention reads the null slot in its place.

    The checks of what is read run beside the body, and the report comes when both are over.
    """
    strays: list[torch.Tensor] = []  # what the index array says in its third place; -1: what was built

    def leaky(build: Callable[..., None]) -> Callable[..., None]:
        def built(*args: torch.Tensor, kv_indices: torch.Tensor, **kwargs) -> None:
            build(*args, kv_indices=kv_indices, **kwargs)
            if not strays:  # before the capture
                with torch.inference_mode(False):
                    strays.append(torch.full((1,), -1, device=kv_indices.device))
            kv_indices[2:3] = torch.where(strays[0] < 0, kv_indices[2:3], strays[0])

        return built

    for name in ("index_rows", "index_rows_torch"):
        monkeypatch.setattr(forward_module, name, leaky(getattr(forward_module, name)))
    running = start(draft="none", **CAPTURED)
    strays[0].fill_(1 << 40)
    assert ("R1", "decode", 1 << 40, "req-0") in found(running)
    strays[0].fill_(-1)
    assert running.step() != []


def test_a_length_that_the_device_has_wrong(running):
    """R10: the relay holds one entry too many; truth is the host's, not the engine's own lengths."""
    running.relay.lens[running.running[2].row] += 1
    assert "R10" in {code for code, *_ in found(running)}
