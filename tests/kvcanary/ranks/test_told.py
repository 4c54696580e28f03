"""What an agreement finds is told by a manager: in every mode, whichever request it names, and in a dump."""

from __future__ import annotations

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, KVCorruptionError, PoolView
from kvcanary.dumps.reading import read_dump
from kvcanary.ranks import RanksDisagreeError

DECIDED = {"step": 1, "level": "tokens", "name": "a", "position": 0, "values": (5, 5, 6), "minority": [2]}
COMPUTED = {"step": 1, "code": "X2", "level": "copies of the only pool", "name": "layer 1", "position": 9}


def watched(**settings) -> CanaryManager:
    layers = [torch.zeros(64, 2, 4) for _ in range(4)]
    canary = CanaryManager(CanaryConfig(seed=7, **settings), [PoolView("only", layers[:2], layers[2:], 4)])
    canary.copies(3)
    canary.arm()
    canary.begin_step(1)
    canary.admit("a", range(8))
    canary.on_alloc("a", [2, 3])
    return canary


@pytest.mark.parametrize("told", [DECIDED, COMPUTED], ids=["X1", "X2"])
@pytest.mark.parametrize("mode", ["raise", "abort", "heal"])
def test_it_stops_the_engine_though_it_names_a_request(mode, told) -> None:
    """To end that request alone would let the others go on with ranks that differ."""
    canary = watched(mode=mode, **({"content": "full"} if mode == "heal" else {}))
    with pytest.raises(KVCorruptionError) as caught:
        canary.ranks_differ(RanksDisagreeError("they differ", **told))
    [finding] = caught.value.findings
    assert finding.code == told.get("code", "X1")
    assert finding.action.startswith("raised KVCorruptionError")


def test_mode_log_tells_it(capsys) -> None:
    """Two findings are two incidents; what follows is the engine's to decide."""
    canary = watched(mode="log")
    for told in (DECIDED, COMPUTED | {"level": "hidden states", "name": None, "position": None}):
        assert canary.ranks_differ(RanksDisagreeError("they differ", **told)) == frozenset()
    assert [(found.code, found.incident) for found in canary.findings] == [("X1", 1), ("X2", 2)]
    assert "ranks disagree (X1): tokens, number 0" in capsys.readouterr().err


def test_copies_are_named_by_slot_and_layer() -> None:
    """The place of X2 is that of the pool."""
    canary = watched(mode="log")
    canary.ranks_differ(RanksDisagreeError("they differ", **COMPUTED))
    [finding] = canary.findings
    assert (finding.pool, finding.slot, finding.page, finding.layer) == ("only", 9, 2, 1)


@pytest.mark.parametrize("told", [DECIDED, COMPUTED], ids=["X1", "X2"])
def test_a_dump_has_it(tmp_path, told) -> None:
    """With its level and who is alone."""
    canary = watched(mode="raise", dump_dir=str(tmp_path))
    with pytest.raises(KVCorruptionError) as caught:
        canary.ranks_differ(RanksDisagreeError("they differ", **told))
    [finding] = read_dump(caught.value.report.dump).findings
    assert (finding["code"], finding["found"]["level"]) == (told.get("code", "X1"), told["level"])
