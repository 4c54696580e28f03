"""The table of what was shown inside vLLM: that of the records, and what counts as found."""

from __future__ import annotations

import json

import pytest

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.vllm import page as vllm_page


def test_the_page_quotes_the_records() -> None:
    """Its table is that of the records as they are, and every record of vLLM has a line."""
    page = vllm_page.PAGE.read_text(encoding="utf-8")
    assert "\n".join((vllm_page.BEGIN, *vllm_page.lines(), vllm_page.END)) in page
    shown = {*vllm_page.SETTINGS, vllm_page.PARALLEL, *vllm_page.FIRST_NAN}
    told = {name for name in ("vllm_loads", "cpu_vllm_loads", "vllm_floor") if f"`{name}.json`" in page}
    assert {path.stem for path in RESULTS.glob("vllm*.json")} <= shown | told


def test_the_page_quotes_the_record_of_a_hybrid() -> None:
    """States were watched, nothing was found, and no token differed."""
    compared = json.loads((RESULTS / "gpu_vllm_hybrid.json").read_text(encoding="utf-8"))["compared"]
    certificate, page = compared["certificate"], vllm_page.PAGE.read_text(encoding="utf-8")
    assert (compared["findings"], certificate["not_watched"]) == (0, [])
    assert min(pair["share"] for pair in compared["on_off"]) == 1
    assert f"judged {certificate['states_checked']:,} states" in page
    flat = " ".join(page.split())
    for values, said in (
        (compared["ratios"], "pairs of runs was {:.3f} and {:.3f} of that without"),
        (sorted(compared["off_over_off"]), "two runs without it were {:.3f} and {:.3f} of one another"),
        ([compared["by_step"]["quiet_ratio"]], "in which nobody arrives were {:.3f} as fast"),
    ):
        assert said.format(*values) in flat


def test_the_page_quotes_the_record_of_a_hybrid_with_drafts() -> None:
    """The same with drafts, and how long hooks are."""
    compared = json.loads((RESULTS / "gpu_vllm_hybrid_ngram.json").read_text(encoding="utf-8"))["compared"]
    certificate, page = compared["certificate"], " ".join(vllm_page.PAGE.read_text(encoding="utf-8").split())
    assert (compared["findings"], certificate["not_watched"], compared["on_off"][0]["share"]) == (0, [], 1)
    [ratio], step, hooks = compared["ratios"], compared["by_step"]["ms"][0], min(compared["hooks_us"]) / 1000
    [noise] = compared["off_over_off"]
    for said in (
        f"a run judged {certificate['states_checked']:,} states with 0 findings and equal tokens",
        f"In one pair of runs throughput was {ratio:.3f} of that without",
        f"where two runs without it were {noise:.3f} of one another. A step",
        f"A step took {step:.1f} ms without it, and hooks {hooks:.1f} ms",
    ):
        assert said in page


def test_the_page_quotes_the_records_of_hooks() -> None:
    """By device, the last record of it."""
    page = " ".join(vllm_page.PAGE.read_text(encoding="utf-8").split())
    gpus = json.loads((RESULTS / "gpu_vllm_hooks.json").read_text(encoding="utf-8"))
    [cpu] = json.loads((RESULTS / "cpu_vllm_hooks.json").read_text(encoding="utf-8"))
    (h100, *h200), here = (
        [[round(own["hooks"][kind]["median_us"]) for kind in ("quiet", "arriving")] for own in records]
        for records in (gpus, [cpu])
    )
    quiet, arriving = (f"{min(took)} to {max(took)} us" for took in zip(*h200, strict=True))
    said = f"a quiet step took {quiet} and one with an arrival {arriving} (`gpu_vllm_hooks.json`)"
    assert f"In five runs beside an H200 {said}" in page
    steps = [own["hooks"]["quiet"] for own in gpus[1:]]
    bare = sorted(round(own["step_without_us"]) for own in steps)
    shares = sorted(own["median_us"] / own["step_without_us"] for own in steps)
    assert len(steps) == 5
    assert f"took {bare[0]} to {bare[-1]} us for its own step" in page
    assert f"hooks are {shares[0]:.1f} to {shares[-1]:.1f} of that" in page
    assert "One H100 had {} and {} us".format(*h100) in page
    assert "on a slow CPU: {} us of a quiet step and {} us of one in which a request comes".format(*here[0]) in page
    assert f"The runner itself takes {cpu['hooks']['quiet']['step_without_us']:.0f} us there" in page


def test_the_page_quotes_the_floor_of_hooks() -> None:
    """Of the same runs, and inside vLLM, where it is above the goal."""
    page = " ".join(vllm_page.PAGE.read_text(encoding="utf-8").split())
    runs = [own["floor"] for own in json.loads((RESULTS / "gpu_vllm_hooks.json").read_text(encoding="utf-8"))[1:]]
    floors = sorted(round(own["quiet"]["median_us"]) for own in runs)
    assert f"They took {floors[0]} to {floors[-1]} us of a quiet step in the same five runs" in page
    compared = vllm_page.read("vllm_floor")["compared"]
    took, steps = min(compared["hooks_us"]), compared["by_step"]
    assert took > 60
    assert f"they took {took:.0f} us in the mean" in page
    assert (
        f"Throughput was {compared['throughput_ratio']:.3f} of that without, and {steps['ratio']:.3f} in equal" in page
    )
    assert "between {:.3f} and {:.3f} (`vllm_floor.json`".format(*steps["range"]) in page


def test_attention_was_asked_within_graphs() -> None:
    """Of every backend and cache on the page: silent as it is, and what is wrong in graphs alone is named so."""
    records = json.loads((RESULTS / "gpu_vllm_reader.json").read_text(encoding="utf-8"))
    asked = {(own["kind"], *own["attention"]) for own in records}
    assert asked == {
        ("dense", "FlashAttentionImpl"),
        ("fp8", "FlashAttentionImpl"),
        ("windows", "FlashAttentionImpl"),
        ("dense", "TritonAttentionImpl"),
    }
    for own in records:
        groups = own["probes_at_start"] // 2
        assert "FULL" in own["graphs"]
        assert (own["findings_at_start"], own["without"]["findings"], own["not_probed"]) == (0, [], "")
        assert len(own["harms"]) == 3
        for harm in own["harms"].values():
            found = [(finding["code"], finding["in_a_graph_alone"]) for finding in harm["findings"]]
            assert found == [("R8", harm["of_graphs"])] * groups


@pytest.mark.parametrize("record", vllm_page.FIRST_NAN)
def test_the_first_place_of_nan_was_always_named(record: str) -> None:
    """A hundred tries in captured steps; layer, request, position and step, and that it is N1 of a decode."""
    held = json.loads((RESULTS / f"{record}.json").read_text(encoding="utf-8"))
    assert "FULL" in held["graphs"]
    assert len(held["tries"]) == held["all_right"] == 100
    assert {(one["found"]["code"], one["found"]["phase"]) for one in held["tries"]} == {("N1", "decode")}


@pytest.mark.parametrize("record", [name for name in vllm_page.SETTINGS if (RESULTS / f"{name}.json").exists()])
def test_no_run_had_a_finding_or_another_token(record: str) -> None:
    """What is sound is silent; with the plug-in tokens agree as often as without; whatever was broken was found."""
    held = json.loads((RESULTS / f"{record}.json").read_text(encoding="utf-8"))
    compared, faults = held["compared"], held.get("faults", {})
    assert compared["findings"] == 0
    assert compared["preemptions"] > 0
    least = {name: min((pair["share"] for pair in compared[name]), default=1.0) for name in ("on_off", "off_off")}
    assert least["on_off"] >= least["off_off"]
    assert compared["largest_gap_where_different"] < 1e-2
    assert [name for name, own in faults.items() if vllm_page.is_found(own) == (name in vllm_page.HARMLESS)] == []


@pytest.mark.parametrize(
    ("fault", "is_found"),
    [
        ({"found": [{"reader": None, "writer": "a"}]}, True),
        ({"found": [{"reader": None, "writer": None}]}, False),
        ({"found": []}, False),
        ({"found": [["T1", "a", 3, "logged"]]}, True),
        ({"raised": "KVCorruptionError", "message": "ERROR\n  reader    'a', position 8"}, True),
        ({"raised": "KVCorruptionError", "message": "ERROR"}, False),
        ({"raised": "RuntimeError", "message": "reader    'a'"}, False),
    ],
)
def test_a_fault_is_found_when_a_request_is_named(fault: dict[str, object], is_found: bool) -> None:
    """As reader or as writer; an engine that ended otherwise found nothing."""
    assert vllm_page.is_found(fault) is is_found


def test_workers_that_share_a_model_are_told_of() -> None:
    """What each judged, and by which ranks every fault was found."""
    found = {"code": "R9", "reader": "7", "ranks": [0, 1]}
    struck = {"one": {"struck": [1], "found": []}, "all": {"struck": [0, 1], "found": [found]}}
    drawn = {"code": "X1", "found": {"resource": "tokens of '8', number 0"}}
    struck |= {"token": {"struck": [1], "found": [drawn]}}
    clean = {"findings": [], "workers": [{"slots_checked": 1200}, {"slots_checked": 1201}]}
    seconds = {"compares": [9.0, 1.0, 3.0, 2.0], "alone": [9.0, 2.0, 2.0, 1.0], "off": [9.0, 1.0, 1.0, 2.0]}
    assert list(vllm_page.shared({"ranks": 2, "clean": clean, "seconds": seconds, **struck})) == [
        "2 workers that share a model judged 1,200 and 1,201 entries with 0 findings;",
        "a bit flipped in rank 1: not found;",
        "a bit flipped in ranks 0 and 1: R9 of request 7 by ranks 0 and 1;",
        "another token drawn by rank 1: X1, tokens of '8', number 0.",
        "Runs take 2.00 s with ranks compared (1.00 to 3.00) and",
        "2.00 s without that (1.00 to 2.00);",
        "1.00 s without a canary (1.00 to 2.00);",
        "in `vllm_parallel.json`.",
    ]


def test_a_soak_with_owners_judged_ten_million_entries() -> None:
    """Without a finding, with the scheduler heard, and the page says how many."""
    soak = vllm_page.read("cpu_vllm_soak_owners")
    clean = soak["clean"]
    assert (soak["success"], clean["owners"], clean["findings"], clean["fired"]) == (
        True,
        "the scheduler's block pool",
        0,
        {},
    )
    assert clean["slots_checked"] >= 10**7
    assert f"{clean['slots_checked']:,}" in vllm_page.PAGE.read_text(encoding="utf-8")
