"""`kvcanary probe`: a sound device gives every answer; damage, a kernel that errs, another device's bits are found."""

from __future__ import annotations

import json

import pytest
import torch

from kvcanary_tools.fleet import probing
from kvcanary_tools.fleet.probing import BLOCK_BYTES, Probe, differences, pattern

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 256 slots is enough here."""
    monkeypatch.setattr(probing, "SLOTS", 256)
    monkeypatch.setattr(probing, "BLOCK_BYTES", BLOCK_BYTES // 16)


def test_a_sound_device_gives_every_answer(kvcanary, tmp_path) -> None:
    """Exit code 0; its JSON is what another device of its kind is compared with, and may differ in nothing."""
    first = kvcanary("probe", "--device", "cpu", "--minutes", "0", "--memory", "1MiB", "--json")
    assert first.exit_code == 0
    told = json.loads(first.stdout)
    assert (told["rounds"], told["faults"], told["bytes"]) == (2, [], 2 * BLOCK_BYTES // 16)
    assert told["hardware"]["pid"] > 0
    (tmp_path / "first.json").write_text(first.stdout)
    again = ("probe", "--device", "cpu", "--minutes", "0", "--memory", "1", "--against", str(tmp_path / "first.json"))
    assert kvcanary(*again).exit_code == 0
    (tmp_path / "first.json").write_text(json.dumps(told | {"answers": {"attention": "0"}}))
    differs = kvcanary(*again)
    assert differs.exit_code == 1
    assert "attention gives other bits" in differs.stdout
    (tmp_path / "first.json").write_text(json.dumps(told | {"device": "H100"}))
    assert kvcanary(*again).exit_code == 2


@pytest.mark.parametrize("number", range(4))
def test_a_pattern_has_every_word_once_and_then_its_complement(number: int) -> None:
    """So that every bit is tried both ways, and a word that lies elsewhere is seen."""
    words = pattern(number)
    assert len(words.unique()) == words.numel()
    assert number % 2 == 0 or torch.equal(words, ~pattern(number - 1))


def test_a_bit_that_does_not_rest_is_named_with_its_place() -> None:
    """Which block, slot and address; a word that is stuck is right in one of two rounds."""
    probe = Probe(CPU, BLOCK_BYTES // 8)
    probe.round()
    probe._blocks[1].view(torch.int32)[1, 17, 2, 5] ^= 1 << 30
    probe.again()
    [fault] = probe.probed.faults
    assert (fault["what"], fault["block"], fault["slot"]) == ("rest", 1, 17)
    assert fault["address"] == f"0x{probe._blocks[1][0, 17].data_ptr():016x}"


@pytest.mark.parametrize(("name", "first"), [("store", "store"), ("paged_attention", "attention")])
def test_a_kernel_that_errs_once_is_found(monkeypatch: pytest.MonkeyPatch, name: str, first: str) -> None:
    """In the round in which it does: the last bit of one number of its output."""
    right, calls = getattr(probing, name), []

    def errs(*args, **kwargs) -> None:
        right(*args, **kwargs)
        calls.append(name)
        if len(calls) == 2:
            out = args[0].parts[0][0] if name == "store" else kwargs["out"].view(torch.int32)
            out.view(-1)[11] ^= 1

    monkeypatch.setattr(probing, name, errs)
    probe = Probe(CPU, 1)
    for _ in range(3):
        probe.round()
    assert [fault["what"] for fault in probe.probed.faults][:1] == [first]
    assert {fault["round"] for fault in probe.probed.faults} == {1}


def test_a_move_that_loses_a_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it should have arrived."""
    probe = Probe(CPU, 1)
    monkeypatch.setattr(Probe, "_move", lambda *arguments: None)
    probe.round()
    assert probe.probed.faults[0]["what"] == "move"


def test_devices_of_two_kinds_are_not_compared() -> None:
    """Their kernels may round otherwise, and both be right."""
    probe = Probe(CPU, 1)
    with pytest.raises(ValueError, match="compare devices of one kind"):
        differences(probe.probed, {"device": "H100", "answers": {}})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cuda:9"], "device 'cuda:9' is not present"),
        (["--memory", "lots"], "--memory is a size, got 'lots'"),
    ],
)
def test_wrong_usage_is_a_sentence(kvcanary, arguments: list[str], sentence: str) -> None:
    """Before anything is filled."""
    result = kvcanary("probe", "--minutes", "0", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.gpu
def test_a_sound_gpu_gives_every_answer(kvcanary) -> None:
    """The kernels give what the host computes, and the same twice."""
    result = kvcanary("probe", "--device", "cuda", "--minutes", "0", "--memory", "64MiB")
    assert result.exit_code == 0
    assert "every answer was right" in result.stdout
