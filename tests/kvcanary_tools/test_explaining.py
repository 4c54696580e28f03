"""What `kvcanary explain` advises, by what a transfer did to the bytes, and by who waited for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.reading import read_dump
from kvcanary.replay.replayer import replay
from kvcanary_tools.bench.toy.engine import ToyEngine
from kvcanary_tools.dumps.explaining import NEXT, NEXT_OF_TRANSFERS
from toy_tier import Tier


def stopped(engine: ToyEngine) -> str:
    with pytest.raises(KVCorruptionError) as caught:
        engine.canary.collect(engine.canary.end_step())
    return str(caught.value.report.dump)


def flip(tier: Tier) -> None:
    tier.bytes["target"].view(torch.int32)[0, 5, 1, 0, 2] ^= 1 << 20


def exchange_pages(tier: Tier) -> None:
    tier.bytes = {name: kept.roll(4, 1) for name, kept in tier.bytes.items()}


def bring_nothing(tier: Tier) -> None:
    tier.bytes = {}


def take_the_earlier_one(tier: Tier) -> None:
    earlier = tier.bytes
    vars(tier).update(vars(Tier(tier.engine, "later", list(range(300, 310)))))
    tier.bytes = earlier


def exchange_parts(tier: Tier) -> None:
    tier.bytes = {name: kept.flip(2) for name, kept in tier.bytes.items()}


def bring_noise(tier: Tier) -> None:
    tier.bytes = {name: torch.randn_like(kept) for name, kept in tier.bytes.items()}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (flip, "one word"),
        (exchange_pages, "misrouted"),
        (bring_nothing, "short"),
        (take_the_earlier_one, "stale"),
        (exchange_parts, "other layout"),
        (bring_noise, "unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kind_of_transfer_has_its_advice(kvcanary, tmp_path, change, verdict):
    """From a dump without bytes and tokens, whose replay reaches the same finding."""
    with torch.inference_mode():
        tier = Tier(ToyEngine(CanaryConfig(content="full", dump_dir=str(tmp_path))))
        change(tier)
        tier.bring_back()
        dump = stopped(tier.engine)
    shown = kvcanary("explain", dump)
    assert f"  1. {verdict}: " in shown.stdout
    assert f"  - {NEXT_OF_TRANSFERS[verdict]}\n" in shown.stdout
    found = json.loads(kvcanary("explain", dump, "--json").stdout)["finding"]["found"]
    assert (found["verdict"], found["came_back_by"]) == (verdict, "restore")
    outcome = replay(read_dump(Path(dump)))
    assert (outcome.missing, outcome.errors) == ([], [])


def test_who_should_wait_is_advised(kvcanary, tmp_path):
    """A buffer has its name in the place of a slot."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(dump_dir=str(tmp_path)))
        engine.start("mine", 8)
        engine.canary.async_tracker.issue("results", "copies", writes=["results 0"])
        engine.canary.async_tracker.use("results", "host", ["results 0"], requests=["mine"])
        shown = kvcanary("explain", stopped(engine)).stdout
    assert shown.startswith("unordered access (O1): host buffer 'results 0', step ")
    advice = "let the host wait for the event of 'results' (stream copies, sequence 1) before 'results' on the host"
    assert f"  - {advice}\n" in shown


def test_a_declared_rewrite_keeps_its_advice(kvcanary, tmp_path):
    """T1 of a copy within the pools is no transfer from elsewhere."""
    with torch.inference_mode():
        engine = ToyEngine(CanaryConfig(content="full", dump_dir=str(tmp_path)))
        engine.start("mine", 8)
        slot = int(engine.rows["mine"].slots[7])
        engine.begin()
        engine.canary.on_move("target", torch.tensor([slot - 1]), torch.tensor([slot]))
        shown = kvcanary("explain", stopped(engine)).stdout
    assert shown.startswith("moved bytes (T1): ")
    assert f"  - {NEXT['transfer']}\n" in shown
