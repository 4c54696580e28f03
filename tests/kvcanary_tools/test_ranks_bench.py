"""What docs/ranks.md says of two GPUs is what the benchmark has written."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.gpu import ranks

PAGE = Path(__file__).parents[2] / "docs" / "ranks.md"
RECORD = json.loads((RESULTS / f"{ranks.NAME}.json").read_text(encoding="utf-8"))


def test_the_page_shows_the_record() -> None:
    """Row by row; what X1 and X2 add is within the bar."""
    assert "\n".join(ranks.table(RECORD)) in PAGE.read_text(encoding="utf-8")
    assert all(row["ranks_over_canary"]["median"] <= 1 + RECORD["bar"] for row in RECORD["rows"])


def test_tokens_were_those_of_one_gpu_and_each_fault_was_found() -> None:
    """In every setting, with slots that were judged and nothing found; then a rank that goes wrong."""
    assert len(RECORD["tokens"]) == 2 * len(ranks.SETTINGS)
    for told in RECORD["tokens"].values():
        assert told["equal"]
        assert told["slots_checked"] > 0
        assert told["findings"] == []
    assert RECORD["faults"].keys() == ranks.FAULTS.keys()
    assert all(told["found"] for told in RECORD["faults"].values())


def test_two_workers_of_a_real_vllm_were_compared() -> None:
    """The record that the page tells of: sound, then another token, then bits in one worker and in both."""
    told = json.loads((RESULTS / "cpu_vllm_ranks.json").read_text(encoding="utf-8"))
    assert told["clean"]["findings"] == []
    assert all(own["compares_ranks"] and own["forwards"] > 70 for own in told["clean"]["workers"])
    gpu = json.loads((RESULTS / "vllm_parallel.json").read_text(encoding="utf-8"))
    for record in (told, gpu):
        assert f"{record['clean']['workers'][0]['forwards']:,} sound forwards" in " ".join(PAGE.read_text().split())
    [found] = told["token"]["found"]
    assert (found["code"], found["found"]["level"]) == ("X1", "tokens")
    assert found["found"]["resource"].endswith(", number 0")
    for record in (told, gpu):
        assert [own["ranks"] for kind in ("one", "all") for own in record[kind]["found"]] == [[1], [0, 1]]
    assert shares_of_throughput(gpu) in " ".join(PAGE.read_text(encoding="utf-8").split())


def shares_of_throughput(told) -> str:
    """The page's words: of the first turns each mode warms up."""
    off, alone, compares = (median(told["seconds"][name][1:]) for name in ("off", "alone", "compares"))
    return f"had {off / alone:.2f} of the throughput without it, and {off / compares:.2f} where ranks were compared"


@pytest.mark.parametrize(("kind", "layer"), [("one head", 1), ("mla", 2)])
def test_what_two_workers_of_a_real_vllm_hold_alike_was_compared(kind: str, layer: int) -> None:
    """The record that the page tells of: sound, then a worker that computes otherwise."""
    name = f"cpu_vllm_copies_{kind.replace(' ', '_')}.json"
    told = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
    assert (told["kind"], told["clean"]["findings"]) == (kind, [])
    assert all(own["compares_copies"] and own["forwards"] > 70 for own in told["clean"]["workers"])
    [found] = told["computed"]["found"]
    assert (found["code"], found["layer"], found["ranks"]) == ("X2", layer, [0, 1])
    assert None not in (found["reader"], found["position"])
    assert found["slot"] >= 0


def test_two_workers_with_latent_rows_were_compared_on_gpus() -> None:
    """Sound, then another value and another token; and the shares of throughput that the page gives, from turns."""
    told, page = json.loads((RESULTS / "gpu_vllm_copies_mla.json").read_text(encoding="utf-8")), PAGE.read_text()
    assert (told["kind"], told["clean"]["findings"], told["vllm"]) == ("mla", [], "0.26.0")
    assert all(own["compares_copies"] for own in told["clean"]["workers"])
    assert f"nothing was found in {told['clean']['workers'][0]['forwards']:,} sound forwards" in " ".join(page.split())
    assert [own["code"] for kind in ("computed", "token") for own in told[kind]["found"]] == ["X2", "X1"]
    assert shares_of_throughput(told) in " ".join(page.split())
