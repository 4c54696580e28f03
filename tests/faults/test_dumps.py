"""Dumps of running engines: what stopped the engine is what a replay of its recording reaches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.dumps.reading import Dump, read_dump
from kvcanary.replay.replayer import replay
from kvcanary_tools.campaign.configurations import PLANS
from kvcanary_tools.campaign.engines import build
from kvcanary_tools.dumps.explaining import explain
from spec_engine import Engine, SamplingParams

STEPS = 10
NEW_TOKENS = 80


def dump_of(engine: Engine, folder: Path) -> Dump:
    """Run until a finding stops the engine; its dump."""
    with pytest.raises(KVCorruptionError):
        drive(engine)
    return read_dump(engine.canary.dump(folder / "found.kvdump"))


def drive(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def flip_a_bit(engine: Engine) -> None:
    """In the last page of the first row: inside every window."""
    request = engine.running[0]
    slot = engine.request_table.table[request.row, request.committed_len - 3 : request.committed_len - 2]
    if (behind := engine.windows or engine.split) is not None:
        slot = behind.translate(slot)
    kv = engine.pools["target"].kv[1, int(slot), 1, 0]
    kv.view(torch.uint8)[1] ^= 1 << 4


def swap_two_entries(engine: Engine) -> None:
    row = engine.request_table.table[engine.running[0].row]
    row[[3, 9]] = row[[9, 3]]


@pytest.mark.parametrize(
    ("fault", "code", "family"), [(flip_a_bit, "R9", "bits"), (swap_two_entries, "R4", "addressing")]
)
def test_a_drafting_engine(make_engine: Callable[..., Engine], tmp_path: Path, fault, code, family) -> None:
    """The embedded model with tree drafting: the same finding, the same cause, and a story that begins at the grant."""
    engine = make_engine()
    fault(engine)
    dump = dump_of(engine, tmp_path)
    assert dump.findings[0]["code"] == code
    outcome = replay(dump)
    assert outcome.missing == []
    reported = explain(dump, 0)
    assert reported["causes"][0]["family"] == family == outcome.findings[0].causes[0].family
    assert reported["story"][0]["kind"] == "born"
    assert reported["story"][-1]["kind"] == "found"


MORE = {
    "plain, window": {"drafts": False, "window": 16},
    "overlap": {"schedule": "overlap"},
    "prefix cache": {"shared": 24},
    "split pool": {"topk": 1, "num_steps": 2, "on_device": 2},
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_other_engines(tmp_path: Path, more: dict) -> None:
    """Windows, pages on the host, a lagging host, shared prefixes: clean up to the fault, and the finding after it."""
    setup = replace(
        next(iter(PLANS["full"].setups.values())), model="known", page_size=4, new_tokens=NEW_TOKENS, **more
    )
    bench = build(setup, CanaryConfig(content="full", ring=4))
    engine, rng = bench.engine, random.Random(1)
    for _ in range(3):
        engine.submit(bench.prompt(rng, setup), SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    for _ in range(STEPS):
        engine.step()
    before = replay(read_dump(engine.canary.dump(tmp_path / "before.kvdump")))
    assert (before.findings, before.errors) == ([], [])
    flip_a_bit(engine)
    dump = dump_of(engine, tmp_path)
    assert dump.manifest["first_step"] > 0
    assert replay(dump).missing == []
