"""`kvcanary doctor`: versions, devices, kernels, the embedded model; absent is not broken."""

from __future__ import annotations

import json
import sys
from importlib import import_module, metadata
from types import SimpleNamespace

import pytest
import torch

from kvcanary.codes import CODES
from kvcanary_tools import health, installed_engines


def test_doctor_finds_everything_working(kvcanary_process) -> None:
    """As a user runs it, in a process of its own: every section, and exit code 0."""
    child = kvcanary_process("doctor")
    assert child.returncode == 0, child.stdout + child.stderr
    for words in ("versions", "devices", "kernels", "embedded model", "everything works"):
        assert words in child.stdout
    if not torch.cuda.is_available():
        assert "cuda  not present" in child.stdout


SECTIONS = ["settings", "versions", "devices", "kernels", "embedded model"]
ENGINES = ["engine transformers", "engine vllm", "engine sglang"]


def test_doctor_json_has_every_section(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as one object, and nothing else."""
    monkeypatch.setenv("KVCANARY_DISABLE", "R5")
    result = kvcanary("doctor", "--json")
    assert result.exit_code == 0, result.stdout
    found = json.loads(result.stdout)
    assert list(found) == [*SECTIONS, *ENGINES, "problems"]
    assert result.stderr == ""
    assert found["problems"] == []
    assert found["settings"] == {"KVCANARY_DISABLE": "R5"}
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["kernels"]["torch"] == "equal to plain integers, bit for bit"
    assert found["embedded model"]["parameters"] > 1_000_000
    assert all(len(shard["sha256"]) == 64 for shard in found["embedded model"]["shards"].values())


def test_doctor_names_a_section_before_it_examines_it(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the import of an engine sees for which."""
    shown = []
    monkeypatch.setattr(health, "sections", lambda: {"engine": lambda: health.Examined({"was": shown[-1]})})
    monkeypatch.setattr("kvcanary_tools.console.data", lambda text="", newline=True: shown.append(text))
    assert kvcanary("doctor").exit_code == 0
    assert shown == ["engine", "\n  was  engine", "everything works"]


def test_doctor_names_what_is_broken(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken parts end with 1 and their errors, and the others are still examined."""

    def embedded_model() -> dict[str, object]:
        raise RuntimeError("no weights")

    monkeypatch.setattr(health, "embedded_model", embedded_model)
    monkeypatch.setattr(health, "ADAPTERS", {})
    monkeypatch.setenv("KVCANARY_MODE", "lgo")
    result = kvcanary("doctor")
    assert result.exit_code == 1
    assert result.stdout.endswith(
        "2 problems:\n  settings: CanaryConfigError: mode must be one of off, log, raise, abort, heal, got 'lgo'\n"
        "  embedded model: RuntimeError: no weights\n"
    )
    assert "everything works" not in result.stdout
    assert "equal to plain integers" in result.stdout


def test_doctor_does_without_the_embedded_model(kvcanary, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """It is a package of its own: where it is not installed it is not present, and no error."""
    monkeypatch.setattr("spec_engine.models.embedded.EMBEDDED_MODEL", tmp_path / "none")
    monkeypatch.setattr(health, "ADAPTERS", {})
    result = kvcanary("doctor")
    assert "embedded model: not present\n" in result.stdout
    assert result.stdout.endswith("everything works\n")


def test_doctor_takes_a_missing_extra_for_no_error(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional package that is not there is `not present`; a required one is an error."""
    monkeypatch.setattr(health, "OPTIONAL", ("no-such-extra",))
    monkeypatch.setattr(health, "embedded_model", dict)
    assert "no-such-extra  not present" in kvcanary("doctor").stdout
    monkeypatch.setattr(health, "REQUIRED", ("no-such-package",))
    result = kvcanary("doctor")
    assert result.exit_code == 1
    assert "not installed: no-such-package" in result.stdout


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An installed engine with its adapter; nothing else is examined."""
    installed = SimpleNamespace(
        __version__="2.1.0", TESTED=("2.0", "2.1"), FED=frozenset({*CODES} - {"W3", "P1", "L1"}), closed={}, faults=[]
    )
    installed.check, installed.closed_paths = (lambda: installed.faults), (lambda: installed.closed)
    monkeypatch.setitem(sys.modules, "host", installed)
    monkeypatch.setattr(installed_engines.importlib.util, "find_spec", lambda name: name == "host" or None)
    monkeypatch.setattr(installed_engines, "ADAPTERS", {"host": "host"})
    monkeypatch.setattr(health, "ADAPTERS", ["host", "absent"])
    for section in ("versions", "devices", "kernels", "embedded_model"):
        monkeypatch.setattr(health, section, dict)
    return installed


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.1.0", "2.1.0, supported"),
        ("2.0.7", "2.0.7, supported"),
        ("2.2.0", "2.2.0, newer than tested (2.0 to 2.1); names and signatures are as they were"),
        ("1.9", "1.9, older than tested (2.0 to 2.1); names and signatures are as they were"),
        ("dev", "dev, of no number that is known (2.0 to 2.1); names and signatures are as they were"),
    ],
)
def test_doctor_has_a_verdict_for_each_engine(kvcanary, host, version: str, verdict: str) -> None:
    """Its version, how it stands to those that were tested, and by reason what cannot be found there."""
    host.__version__ = version
    result = kvcanary("doctor")
    assert result.exit_code == 0
    assert result.stdout.endswith(
        f"engine host: {verdict}\n  inactive     H2: an error at once, in every mode\n"
        "  inactive     L1, P1, W3: the adapter has no data for them\nengine absent: not present\neverything works\n"
    )


def test_doctor_says_what_of_an_engine_is_not_watched(kvcanary, host) -> None:
    """Paths whose names are gone, and checks that the environment has switched off."""
    host.closed = {"crop": "host:Cache.crop is gone"}
    result = kvcanary("doctor", env={"KVCANARY_DISABLE": "R5"})
    assert "  not watched  crop: host:Cache.crop is gone\n" in result.stdout
    assert "  inactive     R5: disabled\n" in result.stdout


def test_doctor_never_says_that_a_refused_engine_works(kvcanary, host, monkeypatch: pytest.MonkeyPatch) -> None:
    """One verdict: the reason at the engine and at the end, exit code 1; so for a host without a version."""
    host.faults = ["host 2.1.0: name is gone", "other is gone"]
    result = kvcanary("doctor")
    assert result.exit_code == 1
    assert "engine host: 2.1.0, refused: host 2.1.0: name is gone (and 1 more, with --json)\n" in result.stdout
    assert result.stdout.endswith("1 problem:\n  host 2.1.0 is refused: host 2.1.0: name is gone\n")
    assert "works" not in result.stdout
    assert json.loads(kvcanary("doctor", "--json").stdout)["engine host"]["refused"] == host.faults
    del host.__version__
    shown = kvcanary("doctor").stdout
    assert "engine host: version unknown, refused: AttributeError:" in shown
    assert "works" not in shown


def test_doctor_knows_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has what a verdict is made of; strict accepts tested releases alone."""
    adapter = pytest.importorskip("kvcanary.adapters.transformers")
    for name in installed_engines.ADAPTERS.values():
        module = import_module(name)
        assert callable(module.check)
        assert callable(module.closed_paths)
        assert module.TESTED
        assert {*CODES} > module.FED
    no_data = set(installed_engines.verdict("transformers").inactive[installed_engines.NO_DATA])
    assert {"R7", "R8", "W2", "W3", "P1"} <= no_data == {*CODES} - adapter.FED - {"H2"}
    for host in (adapter.transformers, import_module("transformers")):  # two, where a test has imported it anew
        monkeypatch.setattr(host, "__version__", "6.1.0")
    assert installed_engines.verdict("transformers").standing == "newer than tested"
    monkeypatch.setenv("KVCANARY_ACCEPT", "strict")
    [refused] = installed_engines.verdict("transformers").refused
    assert refused.startswith("transformers 6.1.0 is not known here: install 5.14 or 5.16")


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
