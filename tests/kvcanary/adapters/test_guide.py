"""The guide's adapter, run as it stands there: clean, and around an engine that is broken in six ways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "write_an_adapter.md"
FULL = CanaryConfig(content="full", seed=7)


def block(name: str) -> str:
    [code] = re.findall(rf"^```python {name}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return code


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for part in ("engine", "adapter"):
        exec(compile(block(part), f"{GUIDE.name}: {part}", "exec"), names)
    return names


def drive(engine: Any) -> list[float]:
    """Two requests in one batch, one that ends early and one that takes its pages."""
    outputs = [engine.begin("a", [5, 6, 7, 8, 9]), engine.begin("b", [5, 6, 1])]
    outputs += [engine.forward({"a": [token], "b": [token + 1]}) for token in range(10, 14)]
    engine.end("a")
    outputs += [engine.begin("c", [2, 3, 4, 5, 6, 7]), engine.forward({"b": [20], "c": [21]})]
    engine.end("b")
    engine.end("c")
    return [float(value) for output in outputs for value in output.values()]


def go_on(engine: Any) -> None:
    for token in range(10, 13):
        engine.forward({"a": [token], "b": [token]})


def test_the_adapter_is_short_and_whole() -> None:
    """Under 100 lines, and every hook that the guide names is in it."""
    lines = [line for line in block("adapter").splitlines() if line.strip()]
    assert len(lines) < 100
    for hook in ("admit", "on_alloc", "substep", "store", "commit", "check", "release", "on_free", "detach"):
        assert f".{hook}(" in block("adapter"), hook


def test_a_sound_engine_has_no_finding(names) -> None:
    """Outputs are equal with and without the canary, everything was judged, and detaching leaves nothing behind."""
    expected, engine = drive(names["ToyEngine"]()), names["ToyEngine"]()
    watched = names["Watched"](engine, FULL)
    assert drive(engine) == expected
    certificate = watched.manager.certificate()
    assert certificate["findings"] == []
    assert certificate["slots_checked"] > 50
    assert certificate["bytes_checked"] > 50 * 2 * 128
    watched.detach()
    assert not {"begin", "body", "store", "end"} & set(vars(engine))
    drive(names["ToyEngine"]())


def flip(engine, put) -> None:
    engine.v[1].view(torch.int32)[engine.slot("a", 2), 1, 3] ^= 1 << 9


def swap(engine, put) -> None:
    table = engine.tables["a"]
    table[0], table[1] = table[1], table[0]


def share(engine, put) -> None:
    engine.tables["b"][0] = engine.tables["a"][0]


def forget(engine, put) -> None:
    engine.lengths["a"] -= 1


def shift(engine, put) -> None:
    engine.store = lambda layer, slots, k, v: put(layer, slots + (layer == 1), k, v)


def leave_out(engine, put) -> None:
    engine.store = lambda layer, slots, k, v: None if layer == 1 else put(layer, slots, k, v)


@pytest.mark.parametrize(
    ("harm", "code", "place"),
    [
        (flip, "R9", {"layer": 1, "part": "V", "head": 1, "dim": 3, "bit": 9, "position": 2}),
        (swap, "W8", {"writer": "a", "position": 5}),
        (share, "W2", {"writer": "b", "position": 3}),
        (forget, "R10", {"reader": "a"}),
        (shift, "R9", {"layer": 1}),
        (leave_out, "R12", {"layer": 1}),
    ],
)
def test_a_broken_engine_is_found_out(names, harm, code: str, place: dict[str, Any]) -> None:
    """One fault at a time: the finding has the code and the place, and no output of that step leaves."""
    engine = names["ToyEngine"]()
    names["Watched"](engine, FULL)
    engine.begin("a", [5, 6, 7, 8, 9])
    engine.begin("b", [5, 6, 1])
    harm(engine, engine.store)
    with pytest.raises(KVCorruptionError) as raised:
        go_on(engine)
    found = raised.value.findings[0]
    assert found.code == code, raised.value
    assert {name: getattr(found, name) for name in place} == place
