"""The guide's adapters, run as they stand there: clean, and around engines that are broken in several ways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, CanaryManager, KVCorruptionError, LifetimeError, PoolView
from kvcanary.testing import check_adapter

LIFETIMES = Path(__file__).resolve().parents[3] / "docs" / "lifetimes.md"
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "write_an_adapter.md"
FULL = CanaryConfig(content="full", seed=7)


def block(name: str) -> str:
    [code] = re.findall(rf"^```python {name}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return code


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for part in ("engine", "adapter", "sharing", "sharing_adapter", "driver"):
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
    for hook in ("admit", "on_alloc", "forward", "store", "commit", "check", "release", "on_free", "detach"):
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


def misalign(engine, put) -> None:
    aligned = engine.slot
    engine.slot = lambda name, position: aligned(name, position) + 2 * (name == "a" and position > 4)


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
        (misalign, "W2", {"writer": "a", "position": 6}),
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


def share_pages(engine: Any) -> list[float]:
    """Two requests of one prefix, forks with and without a last page to copy, and what the cache gives up."""
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    outputs = [engine.begin("a", prompt), engine.begin("b", [*prompt[:8], 1, 2])]
    outputs += [engine.forward({"a": [token], "b": [token + 1]}) for token in range(20, 23)]
    engine.fork("b", "c")
    outputs += [engine.forward({"c": [token], "a": [token], "b": [token + 1]}) for token in range(30, 36)]
    engine.fork("a", "d")
    engine.end("a")
    outputs += [engine.forward({"d": [40], "b": [41]}), engine.forward({"c": [42]})]
    for name in ("b", "d", "c"):
        engine.end(name)
    engine.evict()
    outputs.append(engine.begin("e", prompt))
    engine.end("e")
    return [float(value) for output in outputs for value in output.values()]


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
def test_an_engine_that_shares_pages_has_no_finding(names, content: str) -> None:
    """Outputs are equal with and without the canary, through hits, forks, copies and evictions."""
    expected, engine = share_pages(names["SharingEngine"](pages=24)), names["SharingEngine"](pages=24)
    watched = names["SharingWatched"](engine, CanaryConfig(content=content, seed=7))
    assert share_pages(engine) == expected
    certificate = watched.manager.certificate()
    assert (certificate["findings"], certificate["slots_checked"] > 200) == ([], True)
    watched.detach()


def test_the_calls_of_shared_pages_are_listed() -> None:
    """Each with a line, and all but one of them in the example."""
    calls = {"on_share", "on_acquire", "on_fork", "on_copy", "on_move", "on_deduplicate", "on_free", "on_evict"}
    table = GUIDE.read_text(encoding="utf-8").split("## Shared pages")[1].split("```")[0]
    assert set(re.findall(r"`(on_[a-z]+)\(", table)) == calls
    used = set(re.findall(r"manager\.(on_[a-z]+)\(", block("adapter") + block("sharing_adapter")))
    assert calls - used == {"on_deduplicate"}


def names_anothers_page(engine: Any, watched: Any) -> None:
    engine.tables["a"][0] = engine.tables["b"][0]


def gives_a_page_back(engine: Any, watched: Any) -> None:
    watched.manager.on_free("a", [engine.tables["a"][0]])


def copies_nothing(engine: Any, watched: Any) -> None:
    engine.copy_last = lambda name: None


def copies_without_a_v(engine: Any, watched: Any) -> None:
    run = watched.own["copy_last"]

    def copy_last(name: str) -> tuple[int, int]:
        whole, engine.v = engine.v, engine.v[:1]
        pages = run(name)
        engine.v = whole
        return pages

    watched.own["copy_last"] = copy_last


def keeps_the_old_page(engine: Any, watched: Any) -> None:
    run = watched.own["copy_last"]

    def copy_last(name: str) -> tuple[int, int]:
        old, new = run(name)
        engine.tables[name][-1] = old
        return old, new

    watched.own["copy_last"] = copy_last


def exchanges_entries(engine: Any, watched: Any) -> None:
    engine.begin("d", [25, 26, 27, 28, 29, 30, 31, 32, 33])
    engine.tables["d"][:2] = engine.tables["d"][1::-1]


@pytest.mark.parametrize(
    ("harm", "code", "family"),
    [
        (names_anothers_page, "R8", "addressing"),
        (gives_a_page_back, "R7", "lifetime"),
        (copies_nothing, "W3", None),
        (copies_without_a_v, "T1", "transfer"),
        (keeps_the_old_page, "W2", "lifetime"),
        (exchanges_entries, "R4", "addressing"),
    ],
)
def test_an_engine_that_shares_wrongly_is_found_out(names, harm, code: str, family: str | None) -> None:
    """Shared pages of others, pages that others still hold, and writes into shared pages."""
    engine = names["SharingEngine"](pages=24)
    watched = names["SharingWatched"](engine, FULL)
    engine.begin("a", [5, 6, 7, 8, 9])
    engine.begin("b", [15, 16, 17, 18, 19])
    engine.fork("a", "c")
    harm(engine, watched)
    with pytest.raises(KVCorruptionError) as raised:
        engine.forward({name: [1] for name in engine.tables if name != "c"})
    found = raised.value.findings[0]
    assert (found.code, family in (None, found.causes[0].family)) == (code, True), raised.value
    assert len(raised.value.findings) == 1


def test_the_second_example_is_of_150_lines_or_fewer() -> None:
    """Engine and adapter of shared pages, with what they have more than the first ones, and the driver."""
    lines = "\n".join(block(part) for part in ("sharing", "sharing_adapter", "driver")).splitlines()
    assert len([line for line in lines if line.strip()]) <= 150


def test_every_call_about_pages_is_in_the_guide() -> None:
    """Whatever the manager can be told is named, so that nobody must look for it with `inspect`."""
    guide, states = GUIDE.read_text(encoding="utf-8"), LIFETIMES.read_text(encoding="utf-8")
    k, v = [torch.zeros(16, 1, 8)], [torch.zeros(16, 1, 8)]
    told = {name for name in dir(CanaryManager(FULL, [PoolView("p", k, v, page_size=4)])) if name.startswith("on_")}
    assert len(told) > 18
    assert {name for name in told if f"`{name}" not in guide + states} == set()
    assert {name for name in told if f"`{name}" not in guide} == {"on_alloc_all"}  # of many requests at once


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_the_check_of_an_adapter_finds_nothing_in_the_example(names, mode: str) -> None:
    """Every needed call came; the advice says what may be told, too."""
    checked = check_adapter(names["Driver"](mode))
    assert checked.missing == (), checked.text()
    assert checked.text().startswith("nothing is missing\nadvice   ")
    assert checked.calls["on_fork"] == checked.calls["on_evict"] == 1
    exec(compile(block("check"), GUIDE.name, "exec"), dict(names))


class Deaf:
    """A manager that does not hear one call."""

    def __init__(self, manager: CanaryManager, call: str) -> None:
        self._manager, self._call = manager, call

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name == self._call else getattr(self._manager, name)


def forgotten() -> dict[str, str]:
    """By call, what the guide's table says of it."""
    table = GUIDE.read_text(encoding="utf-8").split("| a call that is forgotten |")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE))


@pytest.mark.parametrize("call", sorted(forgotten()))
def test_the_check_of_an_adapter_says_what_was_forgotten(names, call: str) -> None:
    """The words of each row of the table are said in mode log, and mode raise is not silent either."""
    driver, strict = names["Driver"](), names["Driver"]("raise")
    driver.watched.manager, strict.watched.manager = Deaf(driver.manager, call), Deaf(strict.manager, call)
    assert forgotten()[call] in check_adapter(driver).text()
    assert check_adapter(strict).missing
    assert check_adapter(strict).calls.get(call, 0) == 0


def test_an_engine_without_a_null_page_gives_page_0_up(names) -> None:
    """Told that it was granted, the canary says what to do; done so, nothing is found."""
    engine = names["ToyEngine"]()
    engine.free.insert(0, 0)
    names["Watched"](engine, FULL)
    with pytest.raises(
        LifetimeError, match="got 0: null pages are never granted or freed, take them out of the engine"
    ):
        engine.begin("a", [1])
    engine = names["ToyEngine"]()
    engine.free.insert(0, 0)
    watched = names["Watched"](engine, FULL)
    engine.free.remove(0)
    drive(engine)
    assert watched.manager.findings == []
