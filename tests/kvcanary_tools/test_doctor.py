"""`kvcanary doctor`: versions, devices, kernels, the embedded model; absent is not broken."""

from __future__ import annotations

import json

import pytest
import torch

from kvcanary.codes import CODES
from kvcanary_tools import health


def test_doctor_finds_everything_working(kvcanary_process) -> None:
    """As a user runs it, in a process of its own: every section, and exit code 0."""
    child = kvcanary_process("doctor")
    assert child.returncode == 0, child.stdout + child.stderr
    for words in ("versions", "devices", "kernels", "embedded model", "everything works"):
        assert words in child.stdout
    if not torch.cuda.is_available():
        assert "cuda  not present" in child.stdout


def test_doctor_json_has_every_section(kvcanary) -> None:
    """The same as one object."""
    result = kvcanary("doctor", "--json")
    assert result.exit_code == 0, result.stdout
    found = json.loads(result.stdout)
    assert set(found) == {"versions", "devices", "kernels", "embedded model", "adapters", "broken"}
    assert found["broken"] == []
    assert found["versions"]["torch"] == torch.__version__
    assert found["kernels"]["torch"] == "equal to plain integers, bit for bit"
    assert found["embedded model"]["parameters"] > 1_000_000
    assert all(len(shard["sha256"]) == 64 for shard in found["embedded model"]["shards"].values())


def test_doctor_names_what_is_broken(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """One broken part ends with 1 and its error, and the others are still examined."""

    def fail() -> dict[str, object]:
        raise RuntimeError("no weights")

    monkeypatch.setattr(health, "embedded_model", fail)
    result = kvcanary("doctor")
    assert result.exit_code == 1
    assert "RuntimeError: no weights" in result.stdout
    assert result.stdout.endswith("broken: embedded model\n")
    assert "equal to plain integers" in result.stdout


def test_doctor_takes_a_missing_extra_for_no_error(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional package that is not there is `not present`; a required one is an error."""
    monkeypatch.setattr(health, "OPTIONAL", ("no-such-extra",))
    monkeypatch.setattr(health, "embedded_model", dict)
    assert "no-such-extra  not present" in kvcanary("doctor").stdout
    monkeypatch.setattr(health, "REQUIRED", ("no-such-package",))
    result = kvcanary("doctor")
    assert result.exit_code == 1
    assert "not installed: no-such-package" in result.stdout


def test_doctor_says_what_an_adapter_misses(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a host cannot feed, paths that are closed; a refused one is broken, an absent one is None."""
    adapter = pytest.importorskip("kvcanary.adapters.transformers")
    found, _, inactive = str(health.adapters()["transformers"]).partition("; inactive: ")
    assert found == f"{len(adapter.NEEDED)} names and signatures are there"
    assert {"R7", "R8", "W2", "W3", "P1"} <= set(inactive.split(", ")) == {*CODES} - adapter.FED
    with monkeypatch.context() as gone:
        gone.delattr("transformers.cache_utils.Cache.crop")
        shown = health.adapters()["transformers"]
        assert shown.endswith("; crop is not watched: transformers.cache_utils:Cache.crop is gone")
        assert "are there" not in shown
    monkeypatch.setattr(adapter.transformers, "__version__", "6.1.0")
    monkeypatch.setenv("KVCANARY_ACCEPT", "strict")
    monkeypatch.setattr(health, "embedded_model", dict)
    result = kvcanary("doctor")
    assert result.exit_code == 1
    assert "refused: transformers 6.1.0 is not known here: install 5.14 or 5.16" in result.stdout
    assert result.stdout.endswith("broken: adapter of transformers\n")
    monkeypatch.setattr(health.importlib.util, "find_spec", lambda name: None)
    assert health.adapters() == {"transformers": None, "vllm": None, "sglang": None}


def test_kernels_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with one wrong bit is noticed."""
    from kvcanary_kernels.record import chain

    right = chain.chain_scan_torch

    def wrong(*arguments, out, **settings) -> None:
        right(*arguments, out=out, **settings)
        out[5] ^= 1

    monkeypatch.setattr(chain, "chain_scan_torch", wrong)
    with pytest.raises(RuntimeError, match="the torch kernel of chain values differs from plain integers"):
        health.kernels()
