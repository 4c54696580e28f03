"""`kvcanary soak`: a ledger of what was injected and what was found, even or exit code 1."""

from __future__ import annotations

import json

import pytest

from kvcanary_tools.campaign import soak as soaking
from kvcanary_tools.campaign.runner import chosen
from kvcanary_tools.campaign.soak import soak, to_soak

ENGINES = 12


def after(names: tuple[str, ...], rate: float, seed: int, engines: int = ENGINES) -> soaking.Soaked:
    """The ledger after so many engines."""
    ledgers = soak(soaking.Soaked(), to_soak(chosen(names)), rate, seed)
    return [next(ledgers) for _ in range(engines)][-1]


def test_what_is_injected_is_found():
    """Faults of several families under random traffic, each found as its entry says, and nothing besides."""
    ledger = after(("addressing.pages_exchanged", "bits", "lifetime.double_free", "order"), rate=20.0, seed=1)
    assert ledger.wrong == []
    assert ledger.is_even
    assert ledger.injected.total() >= ENGINES // 2
    assert (ledger.engines, ledger.steps > 100, ledger.tokens > 1000) == (ENGINES, True, True)


@pytest.mark.parametrize("name", ["identity.weak_key", "identity.plain_key"])
def test_a_fault_that_nothing_met_is_not_injected(name):
    """A key that leaves something out counts where somebody was given the pages of another key by it."""
    ledger = after((name,), rate=5.0, seed=1, engines=6)
    assert ledger.wrong == []
    assert 0 < ledger.injected.total() == ledger.found.total() < ledger.engines


def test_without_faults_nothing_is_found():
    """Rate 0: traffic alone, with cancellations, and no finding."""
    ledger = after((), rate=0.0, seed=5, engines=6)
    assert (ledger.wrong, ledger.injected.total()) == ([], 0)
    assert ledger.is_even


def test_what_nobody_finds_is_told(kvcanary, monkeypatch, tmp_path):
    """A canary whose check is off misses it: exit code 1, the engine's number on stderr, the ledger as JSON."""
    from kvcanary import CanaryConfig
    from kvcanary_tools.campaign import traffic

    blind = frozenset({"R9", "T1"})
    monkeypatch.setattr(traffic, "CanaryConfig", lambda **more: CanaryConfig(**(more | {"disable": blind})))
    file = tmp_path / "ledger.json"
    result = kvcanary("soak", "bits.flip", "--minutes", "0.02", "--rate", "50", "--json", str(file))
    assert result.exit_code == 1
    assert "nothing fired" in result.stderr
    ledger = json.loads(file.read_text())
    assert ledger["injected"] > ledger["found"] == 0
    assert ledger["rows"][0]["fault"] == "bits.flip"


def test_an_even_ledger_exits_0(kvcanary):
    """Its last line has both sums."""
    result = kvcanary("soak", "hooks.wrong_substep", "--minutes", "0.02", "--rate", "50", "--json", "-")
    assert result.exit_code == 0
    ledger = json.loads(result.stdout)
    assert ledger["injected"] == ledger["found"] > 0
    assert f"{ledger['injected']} injected, {ledger['found']} found" in result.stderr


@pytest.mark.parametrize("name", ["ranks", "draft.approximate_features"], ids=["pending", "unseen"])
def test_what_cannot_be_found_is_wrong_usage(kvcanary, name):
    """A family none of which is ready, or an effect that no check can see: a sentence, and where to read why."""
    result = kvcanary("soak", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"none of {name} can be made and found" in result.stderr
