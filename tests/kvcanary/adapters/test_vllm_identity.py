"""Weights and adapters of a vLLM worker that are replaced while its prefix cache is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcanary import KVCorruptionError
from kvcanary.adapters.vllm.identity import Identities, version_of

pytestmark = pytest.mark.usefixtures("host")
PROMPT = [(3 * n) % 97 for n in range(30)]


def adapter(folder, number: int = 1, name: str = "law", weights: bytes = b"a" * 70_000):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder))


def asked(served, name: str, lora=None):
    """A request from its first token to its last; the first finding, or None."""
    served.ask(name, PROMPT, 5, lora=lora)
    try:
        served.run()
    except KVCorruptionError as error:
        return error.report.findings[0]
    return None


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("resets", [True, False])
def test_weights_that_are_loaded_anew(serve, runner: str, resets: bool) -> None:
    """What the prefix cache keeps of the old ones is R5 for the next prompt, and nothing where it was reset; requests
    in flight go on.
    """
    served = serve(settings={"runner": runner})
    assert asked(served, "before") is None
    served.ask("runs", PROMPT[::-1], 12)
    for _ in range(3):
        served.step()
    served.wrapper.worker.reload_weights()
    if resets:
        served.cached.clear()
    served.run()
    finding = asked(served, "after")
    assert finding is None if resets else (finding.code, finding.position) == ("R5", 0)


@pytest.mark.parametrize(
    ("change", "is_found"),
    [("none", False), ("number", False), ("copied", False), ("in place", True), ("path", True), ("name only", True)],
)
def test_an_adapter_that_is_loaded_again(serve, tmp_path, change: str, is_found: bool) -> None:
    """One name with equal weights, under another number or from a copy, is one adapter; else it is R5 (vllm#30931)."""
    served, lora = serve(), adapter(tmp_path / "a")
    assert asked(served, "before", lora) is None
    if change == "number":
        lora = adapter(tmp_path / "a", number=2)
    elif change == "copied":
        lora = adapter(tmp_path / "b", number=2)
    elif change == "in place":
        lora = adapter(tmp_path / "a", weights=b"b" * 70_000)
        served.wrapper.worker.add_lora(lora)
    elif change == "path":
        lora = adapter(tmp_path / "b", number=2, weights=b"a" * 35_000 + b"c" * 35_000)
    elif change == "name only":
        lora = adapter(tmp_path / "a", name="medicine")
    finding = asked(served, "after", lora)
    assert (finding is not None) == is_found
    if finding is not None:
        assert (finding.code, finding.position) == ("R5", 0)


def test_no_name_equals_a_version(tmp_path) -> None:
    """Fields are told apart; an adapter that is no folder here is named by its path."""
    own = Identities()
    one = own.of(SimpleNamespace(lora_request=adapter(tmp_path / "a", name="x")), "r")
    own.changed()
    assert own.of(SimpleNamespace(lora_request=None), "r").weights == "1" != one.weights
    assert (version_of("hub/name"), version_of("")) == ("hub/name", "")


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("is_pickled", [False, True])
@pytest.mark.parametrize("forgets_salts", [False, True])
def test_blocks_of_another_salt(serve, runner: str, is_pickled: bool, forgets_salts: bool) -> None:
    """A cache that finds blocks by tokens alone gives one tenant's to another: R5 before a token leaves. Where keys
    have the salt nothing is found, in hits by the same tenant neither; and the salt itself is in no finding.
    """
    served = serve(settings={"runner": runner}, is_pickled=is_pickled, forgets_salts=forgets_salts)
    found = []
    for name, salt in (("one", "secret of a"), ("same", "secret of a"), ("none", None), ("other", "secret of b")):
        served.ask(name, PROMPT, 5, salt=salt)
        try:
            served.run()
        except KVCorruptionError as error:
            found += error.findings
            break
    assert not any("secret" in str(own) for own in found)
    assert served.violations >= 3  # blocks that were found
    assert [(own.code, own.reader, own.position) for own in found[:1]] == ([("R5", "none", 0)] if forgets_salts else [])


def test_a_salt_lives_as_long_as_its_request(serve) -> None:
    """Through preemption; then it is forgotten."""
    served = serve(num_blocks=9)
    for number in range(4):
        served.ask(f"r{number}", [(number + 5 * n) % 97 for n in range(14)], 12, salt=f"tenant {number}")
    served.run()
    assert served.preemptions > 0
    served.ask("last", PROMPT, 3)
    served.run()
    assert served.wrapper.worker.kvcanary.identities._salts == {}


def test_a_scheduler_of_another_kind_ends_no_request(serve) -> None:
    """Whose requests lie elsewhere: nothing is told any more, and everybody is served."""
    served = serve()
    served.scheduler.requests = None
    served.waiting = []
    served.ask = None
    from .served import Request

    served.outputs["r"] = []
    served.waiting.append(Request("r", PROMPT, len(PROMPT) + 4))
    assert len(served.run()["r"]) == 4
    assert served.wrapper.kvcanary_report()["owners"] == "the worker's own ledger"
