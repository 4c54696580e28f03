"""content=full in captured steps: attention compares the bytes that it reads, and finds what reading again finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kvcanary.captured.registry
from kvcanary import CanaryConfig
from kvcanary.scrub.scrubber import Scrubber
from spec_engine import Engine, EngineConfig, SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = ["def f(a):", "class A:", "import os"]
FIRST = 4  # entries of rows that were written before anything is captured here
PLAIN, TREE, CHAIN = {"draft": "none"}, {"topk": 2, "num_steps": 3}, {"topk": 1, "num_steps": 2}
SAME = ("code", "pool", "page", "slot", "position", "layer", "layers", "part", "head", "dim", "byte", "bit", "step")
SAME += ("reader", "readers", "writer", "write_step", "owner", "expected", "found")


@pytest.fixture(params=DEVICES)
def start(request) -> Callable[..., Engine]:
    """Three requests in a bucket of four, in the midst of decoding; the canary logs."""

    def run(content: str = "full", **settings: object) -> Engine:
        own = {"dtype": "float32", "device": request.param, "page_size": 4, "graphs": "on", "graph_buckets": [4]}
        own |= {"max_total_tokens": 512, "context_length": 64, "max_running_requests": 4, "prefix_cache": False}
        canary = CanaryConfig(mode="log", seed=5, content=content)
        engine = Engine(EngineConfig(canary=canary, **own | settings))
        for prompt in PROMPTS:
            engine.submit(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True))
        while len(engine.running) < len(PROMPTS) or min(r.committed_len for r in engine.running) < 2 * FIRST:
            engine.step()
        assert engine.canary.findings == []
        return engine

    return run


@pytest.fixture
def reading_again(monkeypatch) -> Callable[[], None]:
    """From now on engines are made whose attention fingerprints nothing."""
    return lambda: monkeypatch.setattr(kvcanary.captured.registry, "reads_fit", lambda rows, kv_heads: False)


def slot_of(engine: Engine, number: int, position: int) -> int:
    return int(engine.request_table.table[engine.running[number].row, position])


def flip(engine: Engine, pool: str, layer: int, slot: int, part: int, place: int) -> None:
    """One bit of the first or the last byte of a row."""
    kv = engine.pools[pool].kv
    row = kv[layer, slot, part].view(torch.uint8).view(-1)
    assert row.data_ptr() >= kv.data_ptr()
    row[place] ^= 1


def new_findings(engine: Engine) -> list[dict]:
    """Of the next step, and under the overlap schedule of the one behind it, where it is heard."""
    before = len(engine.canary.findings)
    for _ in range(2):
        engine.step()
    return [finding.to_dict() for finding in engine.canary.findings[before:]]


@pytest.mark.parametrize("settings", [PLAIN, TREE], ids=["plain", "tree"])
@pytest.mark.parametrize(("layer", "part", "place"), [(0, 0, 0), (0, 1, -1), (-1, 0, -1), (-1, 1, 0)])
def test_a_flipped_bit_is_found_by_the_forward_that_reads_it(start, settings, layer, part, place):
    """In the first and the last layer, K and V, the first and the last byte of a row."""
    engine = start(schedule="sync", **settings)
    slot, step = slot_of(engine, 1, 3), engine.canary.step
    flip(engine, "target", layer, slot, part, place)
    (found,) = new_findings(engine)
    pool = engine.pools["target"].kv
    kind = "decode" if settings is PLAIN else "verify"
    assert (found["code"], found["site"], found["slot"], found["step"]) == ("R9", [kind, 0], slot, step + 1)
    assert (found["layer"], found["part"], found["reader"]) == (layer % len(pool), "KV"[part], "req-1")
    head, dim, byte = (0, 0, 0) if place == 0 else (pool.shape[3] - 1, pool.shape[4] - 1, 3)
    assert (found["head"], found["dim"], found["byte"], found["bit"]) == (head, dim, byte, 8 * byte)


@pytest.mark.parametrize("settings", [TREE, CHAIN], ids=["tree", "chain"])
def test_bytes_of_a_draft_are_found_by_its_own_forwards(start, settings):
    """The first draft forward of the step that reads them."""
    engine = start(schedule="sync", **settings)
    slot, step = slot_of(engine, 2, 2), engine.canary.step
    flip(engine, "draft", 0, slot, 1, 5)
    (found,) = new_findings(engine)
    assert (found["code"], found["site"][0], found["slot"], found["step"]) == ("R9", "draft", slot, step + 1)
    assert (found["layer"], found["part"], found["reader"]) == (0, "V", "req-2")


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("settings", "kv_dtype"), [(PLAIN, "fp8_e4m3"), (TREE, "auto")], ids=["plain", "tree"])
def test_findings_are_those_of_reading_again(start, reading_again, schedule, settings, kv_dtype):
    """All fields but the forward that found them; bytes were known good in a step that the host had heard of."""
    found, good = [], []
    for number in range(2):
        engine = start(schedule=schedule, kv_cache_dtype=kv_dtype, **settings)
        assert all(substep.judges_bytes == (number == 0) for substep in engine.canary.registry)
        for row, position, layer, part, place in ((0, 1, 1, 0, 9), (1, 5, 0, 1, -2), (2, 7, -1, 1, 0)):
            flip(engine, "target", layer, slot_of(engine, row, position), part, place)
        new = sorted(new_findings(engine), key=lambda one: one["slot"])
        found.append([{name: one[name] for name in SAME} for one in new])
        good.append([one["last_good_step"] for one in new])
        reading_again()
    assert len(found[0]) == 3
    assert found[0] == found[1]
    assert all(abs(again - fused) <= (schedule == "overlap") for fused, again in zip(*good, strict=True))


@pytest.mark.parametrize("settings", [PLAIN, TREE], ids=["plain", "tree"])
def test_rows_that_attention_compares_are_not_read_again(start, monkeypatch, settings):
    """The slice of a step leaves them out, and every byte counts as read in the step."""
    engine = start(schedule="sync", **settings)
    read, take = [], Scrubber._take

    def taken(*args) -> tuple:
        slots, ranges = take(*args)
        read.append(len(slots))
        return slots, ranges

    monkeypatch.setattr(Scrubber, "_take", taken)
    checked = engine.canary.certificate()["bytes_checked"]
    for _ in range(9):
        engine.step()
    assert len(read) >= 9 // engine.canary.session.checks.scrubber.stride >= 1
    assert not any(read)
    certificate = engine.canary.certificate()
    assert (
        certificate["bytes_checked"] - checked
        >= 9 * len(PROMPTS) * 2 * FIRST * engine.pools["target"].view().slot_bytes
    )
    assert certificate["max_unread_steps"] <= 2


@pytest.mark.parametrize("content", ["rolling", "write"])
def test_attention_fingerprints_nothing_unless_all_is_compared(start, content):
    """Its buffers are not there."""
    engine = start(content=content)
    assert not any(substep.judges_bytes or substep.work.sums.numel() for substep in engine.canary.registry)


def test_bytes_that_are_right_again_are_told_all_the_same(start, monkeypatch):
    """Between the forward that read them and a look at them nobody knows any more which layer it was."""
    engine = start(schedule="sync", **PLAIN)
    slot = slot_of(engine, 1, 3)
    flip(engine, "target", 0, slot, 0, 0)
    monkeypatch.setattr("kvcanary.captured.step.find_changed", lambda *_, **__: [])
    (found,) = new_findings(engine)
    assert (found["code"], found["slot"], found["layers"], found["reader"]) == ("R9", slot, [], "req-1")


def test_a_damaged_fingerprint_is_not_taken_for_damaged_bytes(start):
    """R3, as a look would say."""
    engine = start(schedule="sync", **PLAIN)
    slot = slot_of(engine, 1, 3)
    engine.canary.session.state.by_name["target"].content_a[1, slot] ^= 1 << 20
    (found,) = new_findings(engine)
    assert (found["code"], found["slot"], found["site"]) == ("R3", slot, ["decode", 0])
