"""`kvcanary bench quick`, and benchmarks that take as many requests as a device has memory for."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from kvcanary_tools.bench import common, quick
from kvcanary_tools.bench.gpu import step
from kvcanary_tools.bench.gpu.fitting import SPARE, Fit, fit, slot_bytes

LLAMA = SimpleNamespace(num_layers=32, num_kv_heads=8, head_dim=128)
MODEL = SimpleNamespace(config=LLAMA, embed_weight=torch.empty(1, dtype=torch.bfloat16))


def test_requests_are_fitted_to_the_memory() -> None:
    """All that were asked for where they fit, else a multiple of eight, fewer than eight one by one."""
    assert slot_bytes(MODEL) == 131072
    assert fit(64, 3, 4320, MODEL, free=140 << 30).requests == 64
    h100 = fit(64, 3, 4320, MODEL, free=63 << 30)
    assert (h100.requests, h100.asked) == (32, 64)
    used = h100.requests * 3 * 4320 * 131072
    assert 0.5 * ((63 << 30) - SPARE) < used < (63 << 30) - SPARE
    assert fit(64, 3, 4320, MODEL, free=SPARE + (10 << 30)).requests == 5
    assert fit(2, 3, 4320, MODEL, free=63 << 30) == Fit(2, 2, 63 << 30)


def test_the_record_says_what_was_fitted() -> None:
    """How many were asked for, and into how much; nothing where all of them fit, or where it is a CPU's memory."""
    assert fit(64, 3, 4320, MODEL, free=63 << 30).as_dict() == {"asked": 64, "fitted_to_gb": 67.6}
    assert fit(64, 3, 4320, MODEL, free=140 << 30).as_dict() == {}
    assert fit(64, 3, 4320, MODEL) == Fit(64, 64)


def test_a_device_on_which_nothing_fits_is_a_sentence() -> None:
    """With what it needs and what it has."""
    with pytest.raises(SystemExit) as refused:
        fit(64, 3, 4320, MODEL, free=9 << 30)
    assert str(refused.value) == "one request in 3 engines needs 10 GB of device memory, 10 GB are free"


def test_a_row_is_of_the_requests_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are made for them, and the row has both numbers."""
    made = []
    times = {"off": [1.0], "write": [1.0], "rolling": [1.1]}
    monkeypatch.setattr(step, "fit", lambda asked, *_: Fit(8, asked, 60 * 10**9))
    monkeypatch.setattr(step, "_one_order", lambda size, *_: made.append(size) or (times, {"rolling": {}}))
    model = SimpleNamespace(**vars(MODEL), parameters=list)
    row = step.measure(64, model, 4.0, rounds=1, places=1)
    assert made == [8]
    assert (row["batch"], row["asked"], row["fitted_to_gb"]) == (8, 64, 60.0)
    assert row["over_off"]["rolling"]["median"] == 1.1


def test_quick_prints_device_overhead_and_accuracy(kvcanary, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Lines to paste, and the same as JSON; here of very little."""
    monkeypatch.setattr(common, "RESULTS", common.RESULTS)
    monkeypatch.setattr(quick, "has_room", lambda: False)
    small = {"SECONDS": 0.0, "ROUNDS": 1, "BATCHES": (1,), "PROMPTS": 1, "NEW_TOKENS": 3, "SLOT_CHECKS": 50}
    for name, value in {**small, "CORRUPTIONS": 4}.items():
        monkeypatch.setattr(quick, name, value)
    result = kvcanary("bench", "quick", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    device, overhead, accuracy, measured = result.stdout.splitlines()
    record = json.loads((tmp_path / "quick.json").read_text())
    assert device.startswith(f"device    {record['machine']['device']}; torch {torch.__version__}")
    [row] = record["overhead"]
    percent = f"{100 * (row['step']['median'] - 1):+.1f} %"
    assert overhead.startswith(f"overhead  the embedded model, float32, batch 1: {percent} a decode step (")
    own = record["accuracy"]
    assert own["corruptions"] == own["found"] >= 4
    assert (own["findings"], own["slots_checked"] >= 50) == (0, True)
    assert accuracy.startswith(f"accuracy  {own['found']} of {own['corruptions']} corruptions found at their place, 0 ")
    assert measured.endswith("s by kvcanary bench quick")


def test_quick_counts_a_corruption_that_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and not hidden in a mean."""
    counts = {("one bit", "tried"): 3, ("one bit", "found"): 2, ("zeros", "tried"): 1, ("zeros", "found"): 1}
    monkeypatch.setattr(quick, "SECONDS", 0.0)
    monkeypatch.setattr(quick.misses, "corrupt_pool", lambda *_: counts)
    monkeypatch.setattr(quick.false_alarms, "run_toy", lambda *_: {"slots_checked": 7, "findings": 0})
    assert quick.accuracy() == {"corruptions": 4, "found": 3, "slots_checked": 7, "findings": 0}
