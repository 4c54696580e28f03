"""The measurement of misses: a sample of it finds everything, and a blind canary would show."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from kvcanary import CanaryConfig
from kvcanary_tools.bench.toy import misses
from kvcanary_tools.bench.toy.corruptions import FROM_OTHER_ROWS, INTEGERS, KINDS, as_elements

SAMPLE, POOL_SAMPLE = 10**4, 200


def rows_of(dtype: torch.dtype, num_rows: int = 6) -> torch.Tensor:
    """[n, 2, 2, 8] integers: rows with zeros in them."""
    values = torch.randn(num_rows, 2, 2, 8, generator=torch.Generator().manual_seed(1))
    return as_elements((values * (values.abs() > 0.5)).to(dtype))


@pytest.fixture(scope="module")
def sample() -> dict:
    return misses.measure(SAMPLE, POOL_SAMPLE)


def test_every_word_times_every_delta_is_found_by_both_fingerprints(sample):
    """64 changes of each word of each layer's row, in every shape: fingerprint a alone finds them, and fingerprint b
    does too.
    """
    assert list(sample["words"]) == [str(shape) for shape in misses.SHAPES]
    for shape, row in zip(misses.SHAPES, sample["words"].values(), strict=True):
        assert row["tried"] == row["found"] == row["found_by_lane_a"] == 64 * shape.words * misses.LAYERS


def test_every_corruption_of_rows_is_found(sample):
    """At least the number asked for, as many of each kind, in every shape; none is missed."""
    assert sample["rows"]["all"]["tried"] >= SAMPLE
    assert [kind for kind, row in sample["rows"].items() if row["missed"]] == []
    assert min(row["tried"] for row in sample["rows"].values()) >= SAMPLE // len(KINDS)


def test_every_corruption_of_a_live_pool_is_found_at_its_slot(sample):
    """The manager names exactly the corrupted slots, with pool and layer, for every kind."""
    assert sample["pool"]["all"]["tried"] >= POOL_SAMPLE
    assert [kind for kind, row in sample["pool"].items() if row["missed"] or not row["tried"]] == []


@pytest.mark.slow
def test_the_whole_measurement_misses_nothing(tmp_path):
    """10^6 corruptions of rows and 10^4 of a live pool, as the committed run counts them."""
    path = tmp_path / "misses.json"
    misses.main(["--json", str(path)])
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["rows"]["all"]["tried"] >= 10**6
    assert result["pool"]["all"]["tried"] >= 10**4
    assert result["rows"]["all"]["missed"] == result["pool"]["all"]["missed"] == 0


def test_a_check_that_sees_nothing_shows_as_misses(monkeypatch):
    """With a content check that never fires every corruption of a row counts as missed."""
    monkeypatch.setattr(misses, "check_content_torch", lambda *_, mismatch: mismatch.zero_())
    counts = misses.corrupt_rows(misses.SHAPES[0], 100, seed=0)
    assert sum(count for (_, what), count in counts.items() if what == "tried") >= 100
    assert not any(what == "found" and count for (_, what), count in counts.items())


def test_a_manager_that_sees_nothing_shows_as_misses(monkeypatch):
    """With R9 switched off every corruption of the live pool counts as missed."""
    monkeypatch.setattr(misses, "CanaryConfig", partial(CanaryConfig, disable=frozenset({"R9"})))
    counts = misses.corrupt_pool(torch.float32, 20, seed=0)
    assert sum(count for (_, what), count in counts.items() if what == "tried") >= 20
    assert not any(what == "found" and count for (_, what), count in counts.items())


def test_misses_end_with_exit_code_1(monkeypatch, tmp_path, capsys):
    """One miss in any of the three tables fails the run, which has written its JSON all the same."""
    table = {"all": {"tried": 2, "found": 1, "missed": 1}}
    monkeypatch.setattr(misses, "measure", lambda *_: {"words": {}, "rows": {}, "pool": table})
    with pytest.raises(SystemExit) as caught:
        misses.main(["--json", str(tmp_path / "misses.json")])
    assert caught.value.code == 1
    assert json.loads((tmp_path / "misses.json").read_text(encoding="utf-8"))["pool"] == table
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "2", "1", "1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_changes_most_rows_and_keeps_their_shape(kind, dtype):
    """Rows of any element size come back in their type, changed, and the given ones are untouched."""
    rows = rows_of(dtype)
    before = rows.clone()
    struck = KINDS[kind](rows, torch.Generator().manual_seed(2))
    assert (struck.shape, struck.dtype) == (rows.shape, INTEGERS[dtype.itemsize])
    assert torch.equal(rows, before)
    assert int((struck != rows).flatten(1).any(1).sum()) > len(rows) // 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FROM_OTHER_ROWS])
def test_a_kind_takes_a_single_row(kind):
    """A live pool is struck at one slot at a time."""
    rows = rows_of(torch.float32, 1)
    assert KINDS[kind](rows, torch.Generator().manual_seed(2)).shape == rows.shape


def test_two_top_bits_leave_an_unkeyed_sum_as_it_was():
    """The two kinds that a 32-bit sum cannot see are what their names say."""
    rows = rows_of(torch.float32)
    for kind in ("two top bits", "opposite changes"):
        struck = KINDS[kind](rows, torch.Generator().manual_seed(2))
        assert torch.equal(struck.flatten(1).long().sum(1) % 2**32, rows.flatten(1).long().sum(1) % 2**32)
        assert (struck != rows).flatten(1).sum(1).tolist() == [2] * len(rows)
