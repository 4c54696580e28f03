"""`kvcanary bench`: every benchmark has its line, and its JSON goes where the user says."""

from __future__ import annotations

import json
from importlib import import_module
from pkgutil import walk_packages

import pytest
import structlog

from kvcanary_tools import bench
from kvcanary_tools.bench import common
from kvcanary_tools.bench.embedded import retractions
from kvcanary_tools.bench.gpu import prefill
from kvcanary_tools.commands.bench import TABLES


def test_every_benchmark_is_listed(kvcanary) -> None:
    """What has a main() is a table, and every table has one; without a name all of them are shown."""
    modules = {module.name for module in walk_packages(bench.__path__, f"{bench.__name__}.") if not module.ispkg}
    scripts = {name.removeprefix(f"{bench.__name__}.") for name in modules if hasattr(import_module(name), "main")}
    assert {module for module, _ in TABLES.values()} == scripts
    lines = kvcanary("bench").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(TABLES)


def test_json_goes_into_the_folder(kvcanary, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into --out, made if need be, and never into the package."""
    monkeypatch.setattr(common, "RESULTS", common.RESULTS)
    monkeypatch.setattr(retractions, "main", lambda: common.save("retractions", {"rows": 1}))
    assert kvcanary("bench", "retractions", "--out", str(tmp_path / "new")).exit_code == 0
    assert json.loads((tmp_path / "new" / "retractions.json").read_text()) == {"rows": 1}


@pytest.mark.parametrize("name", [name for name, (_, what) in TABLES.items() if "needs a GPU" in what])
def test_a_table_without_its_device_is_a_sentence(kvcanary, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, nothing on stdout."""
    monkeypatch.setattr(common, "RESULTS", common.RESULTS)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = kvcanary("bench", name)
    assert result.exit_code == 1
    assert result.stdout == ""


def test_recorded_kernels_keep_up_with_a_copy() -> None:
    """Nine tenths of a device copy for one lane and for the check, whatever the rows and the order of their pages."""
    shapes = json.loads((common.RESULTS / "gpu_kernels.json").read_text(encoding="utf-8"))["shapes"]
    assert {shape["row_bytes"] for shape in shapes} == {512, 1024, 2048, 4096}
    rates = [rate for shape in shapes for rate in shape["rates"].values()]
    assert len(rates) == 4 * 4
    assert min(rate[what]["of_copy"] for rate in rates for what in ("one lane", "check")) >= 0.9


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("gpu_step", {"batch": 1}),
        ("gpu_step", {"batch": 64}),
        ("gpu_prefill", {"requests": 1, "tokens": 4032}),
        ("gpu_prefill", {"requests": 1, "tokens": 8192}),
        ("gpu_prefill", {"requests": 64, "tokens": 4032}),
    ],
    ids=str,
)
def test_recorded_workloads_of_an_8b_model_cost_at_most_five_percent(name: str, workload: dict[str, int]) -> None:
    """One request and many, decoding and prefilling, with the default canary: the median on over off."""
    rows = json.loads((common.RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    (row,) = (row for row in rows if workload.items() <= row.items())
    assert 0.9 < row["over_off"]["rolling"]["median"] <= 1.05
    assert row["certificates"]["rolling"]["findings"] == []
    assert row["certificates"]["rolling"]["bytes_checked"] > 0


def test_prefills_that_were_not_measured_again_stay(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other cases, from the same machine alone, by requests and tokens."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    long, short, again = ({"requests": 1, "tokens": tokens, "off_ms": off} for tokens, off in ((8, 2), (4, 1), (4, 3)))
    first = {"machine": {"device": "one"}, "rows": [long, short]}
    assert prefill.joined(first) == [short, long]
    common.save(prefill.NAME, first)
    assert prefill.joined(first | {"rows": [again]}) == [again, long]
    assert prefill.joined({"machine": {"device": "other"}, "rows": [again]}) == [again]


def test_an_unknown_table_is_refused(kvcanary) -> None:
    """With the ones that there are."""
    result = kvcanary("bench", "speed")
    assert result.exit_code == 2
    assert "'kernels'" in result.stderr


def test_ratios_are_told_as_they_are_kept() -> None:
    """Median, least and largest of pairs, by name."""
    spreads = {"write": common.spread([2.0, 3.0, 9.0], [1.0, 2.0, 3.0])}
    assert spreads == {"write": {"median": 2.0, "min": 1.5, "max": 3.0}}
    assert common.reported(spreads) == "   write x2.0000 (1.5000 to 3.0000)"


def test_events_of_what_is_measured_go_to_stderr(kvcanary, tmp_path, monkeypatch) -> None:
    """stdout has the table alone, also where a canary tells of its counters meanwhile."""
    monkeypatch.setattr(common, "RESULTS", common.RESULTS)
    monkeypatch.setattr(retractions, "main", lambda: structlog.get_logger().info("kvcanary.stats"))
    result = kvcanary("bench", "retractions", "--out", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "kvcanary.stats" in result.stderr


def test_a_case_is_recorded_before_the_next_one_runs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those that were there: a run that ends in the middle leaves what it has measured."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(prefill.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prefill, "random_decoder", lambda config: None)
    monkeypatch.setattr(prefill, "device", dict)

    def measured(size: int, tokens: int, model: None, rounds: int | None) -> dict:
        if tokens > 8:
            raise RuntimeError("out of time")
        return {"requests": size, "tokens": tokens, "off_ms": 1.0, "over_off": {}}

    monkeypatch.setattr(prefill, "_one_case", measured)
    prefill.main([(1, 8)])
    with pytest.raises(RuntimeError):
        prefill.main([(1, 4), (2, 16)])
    record = json.loads((tmp_path / f"{prefill.NAME}.json").read_text(encoding="utf-8"))
    assert [(row["requests"], row["tokens"]) for row in record["rows"]] == [(1, 4), (1, 8)]
