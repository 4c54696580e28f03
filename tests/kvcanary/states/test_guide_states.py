"""The guide's engine with recurrent states, and its adapter, as they stand there: sound, and broken in several ways."""

from __future__ import annotations

import re
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "write_an_adapter.md"
PROMPT = tuple(range(3, 23))  # two blocks of 8, and a rest


def block(name: str) -> str:
    [code] = re.findall(rf"^```python {name}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return code


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch}
    for part in ("states", "states_adapter"):
        exec(compile(block(part), f"{GUIDE.name}: {part}", "exec"), names)
    return names


def config(content: str = "full") -> CanaryConfig:
    return CanaryConfig(mode="raise", content=content, seed=7)


def drive(engine: Any) -> list[float]:
    """Hits, drafts that are kept in part, a batch with padding, an end, an eviction, entries that come again."""
    outputs = [engine.begin("a", PROMPT), engine.begin("b", (*PROMPT[:16], 70, 71))]
    engine.verify("a", (30, 31, 32))
    engine.accept("a", (30, 31))
    engine.verify("b", (40, 41, 42))
    engine.accept("b", (40,))
    outputs.append(engine.forward({"a": (33,), "b": (43,)}, padding=2))
    engine.verify("a", (34, 35))
    engine.accept("a", (34, 35))
    outputs.append(engine.forward({"b": (44,)}, padding=1))  # a is parked
    outputs.append(engine.forward({"a": (36,)}))
    engine.end("a")
    engine.evict(PROMPT[:8])
    outputs += [engine.begin("c", (9, 9, 9)), engine.forward({"b": (45,), "c": (50,)})]
    engine.end("b")
    engine.end("c")
    return outputs


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
def test_a_sound_engine_has_no_finding(names, content: str) -> None:
    """Outputs are equal with and without the canary, and states were judged."""
    expected, engine = drive(names["StateEngine"]()), names["StateEngine"]()
    watched = names["StateWatched"](engine, config(content))
    assert drive(engine) == expected
    certificate = watched.manager.certificate()
    assert certificate["findings"] == []
    assert certificate["unchecked"] == {}
    assert certificate["states_checked"] > 15
    assert (certificate["bytes_checked"] > 0) == (content != "write")


# what is broken: a method of the engine, put there before the canary is


def stale_column(engine: Any) -> None:
    def accept(engine, name, tokens):
        type(engine).accept(engine, name, tokens)
        engine.at[name] = 0

    engine.accept = MethodType(accept, engine)


def kept_lookahead(engine: Any) -> None:
    def accept(engine, name, tokens):
        type(engine).accept(engine, name, tokens)
        engine.at[name] = 2

    engine.accept = MethodType(accept, engine)


def padding_strikes(engine: Any) -> None:
    def body(engine, kind, fed, sources, targets):
        output = type(engine).body(engine, kind, fed, sources, targets)
        if len(sources) > len(fed) and "a" not in fed:
            for states in engine.states:
                states[engine.columns["a"][engine.at["a"]]] = states[0]
        return output

    engine.body = MethodType(body, engine)


def padding_told(engine: Any) -> None:
    def forward(engine, fed, padding=0):
        targets = [[engine.columns[name][0]] for name in fed] + [[engine.columns["a"][engine.at["a"]]]] * padding
        sources = [engine.columns[name][engine.at[name]] for name in fed] + [0] * padding
        output = engine.body("forward", fed, sources, targets)
        for name, tokens in fed.items():
            engine.at[name], engine.length[name] = 0, engine.length[name] + len(tokens)
        return output

    engine.forward = MethodType(forward, engine)


def copy_backwards(engine: Any) -> None:
    def copy(engine, source, entry):
        type(engine).copy(engine, entry, source)

    engine.copy = MethodType(copy, engine)


def neighbours_column(engine: Any) -> None:
    def accept(engine, name, tokens):
        type(engine).accept(engine, name, tokens)
        if name == "b":
            engine.columns["b"], engine.columns["a"] = engine.columns["a"], engine.columns["b"]

    engine.accept = MethodType(accept, engine)


def weak_key(engine: Any) -> None:
    def begin(engine, name, prompt):
        if name == "b":
            engine.cache[prompt[:8]] = engine.cache.pop(prompt[:16])
        return type(engine).begin(engine, name, prompt)

    engine.begin = MethodType(begin, engine)


@pytest.mark.parametrize("content", ["full", "rolling"])
@pytest.mark.parametrize(
    ("broken", "code", "family", "reader"),
    [
        (stale_column, "R4", "draft", "a"),
        (kept_lookahead, "R4", "draft", "b"),
        (padding_strikes, "R9", "graphs", "a"),
        (padding_told, "W9", "graphs", None),
        (weak_key, "R4", "lengths", "b"),
        (copy_backwards, "T1", "transfer", "a"),
        (neighbours_column, "R8", "addressing", "b"),
    ],
)
def test_a_broken_engine_is_found(names, content: str, broken: Any, code: str, family: str, reader: str | None) -> None:
    """At the first state that is taken, left, copied or published wrongly, with its family as the first cause."""
    engine = names["StateEngine"]()
    broken(engine)
    names["StateWatched"](engine, config(content))
    with pytest.raises(KVCorruptionError) as caught:
        drive(engine)
    finding = caught.value.findings[0]
    assert (finding.code, finding.causes[0].family, finding.reader) == (code, family, reader)
    assert finding.entry == finding.slot > 0
    assert f"linear states, entry {finding.entry}" in str(caught.value)
