"""The benchmark of handovers between two GPUs: all but the GPUs, in one process on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvcanary.transfers import PageSnapshot, Seal
from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.gpu import handover
from kvcanary_tools.bench.gpu.handover import FAULTS, Shape, Side, by_link, pieces, receive
from spec_engine.disagg.links import make_link


@pytest.fixture(scope="module")
def measured() -> dict:
    """What the receiver says of a small prompt that came over torch's link."""
    shape, cpu = Shape(layers=4, kv_heads=2, head_dim=16, tokens=64), torch.device("cpu")
    sender, receiver = Side(shape, cpu, 1), Side(shape, cpu, 1 + shape.pages)
    sender.fill()
    there, here = make_link("torch", "a"), make_link("torch", "b")
    peer = here.connect(there.expose([sender.pool.kv]))
    here.expose([receiver.pool.kv])
    seal = Seal.from_bytes(sender.seal().to_bytes())
    assert isinstance(seal, PageSnapshot)

    result = receive(receiver, seal, by_link(receiver, here, peer, pieces(sender)), rounds=2)
    here.close()
    return result


def test_a_clean_run_has_the_bytes_that_left(measured):
    """And no finding."""
    assert measured["clean"] == {"equal": True, "findings": []}


def test_its_faults_are_found_and_named(measured):
    """Each with its verdict and layers."""
    assert [fault["fault"] for fault in measured["faults"]] == list(FAULTS)
    assert [fault for fault in measured["faults"] if not fault["found"]] == []


def test_times_are_what_they_say(measured):
    """Shares are of the transfer, and a rate is of all bytes."""
    assert measured["compare_over_transfer"] == pytest.approx(measured["compare_ms"] / measured["transfer_ms"])
    assert 0 < measured["fingerprints_ms"] < 1e4
    assert 0 < measured["prepare_ms"] < measured["transfer_beside_it_ms"]
    assert measured["transfer_gb_s"] == pytest.approx(4 * 64 * 2 * 2 * 16 * 2 / measured["transfer_ms"] / 1e6)


def test_without_two_gpus_it_says_so(monkeypatch):
    """In a sentence."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="measures two CUDA devices"):
        handover.main()


@pytest.mark.parametrize(
    ("record", "is_met", "sentences"),
    [
        (
            "gpu_handover",
            False,
            ["took {transfer_ms:.1f} ms ({transfer_gb_s:.0f} GB/s)", "took {compare_ms:.1f} ms, of which"],
        ),
        (
            "gpu_handover_nixl",
            True,
            [
                "took {transfer_ms:.1f} ms ({transfer_gb_s:.0f} GB/s)",
                "in {prepare_ms:.1f} ms of the host",
                "the comparison took {compare_ms:.2f} ms, {percent:.1f} % of the transfer",
                "{fingerprints_ms:.2f} ms are the kernel",
                "beside it took {transfer_beside_it_ms:.1f} ms",
            ],
        ),
    ],
)
def test_the_page_quotes_the_records(record: str, is_met: bool, sentences: list[str]):
    """Of two GPUs: equal bytes, no finding, all faults found, and the times that were measured."""
    told = json.loads((RESULTS / f"{record}.json").read_text(encoding="utf-8"))
    page = " ".join((Path(__file__).parents[2] / "docs" / "handover.md").read_text(encoding="utf-8").split())
    assert told["clean"] == {"equal": True, "findings": []}
    assert [fault["fault"] for fault in told["faults"] if fault["found"]] == list(FAULTS)
    percent = 100 * told["compare_over_transfer"]
    assert [own for own in sentences if own.format(**told, percent=percent) not in page] == []
    assert (percent <= 100 * told["bar"]) is is_met
    assert f"`{record}.json`" in page.replace("tools/kvcanary_tools/bench/results/", "")
