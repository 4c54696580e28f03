"""docs/tiers.md: its examples run, and what its record says of faults in files is so."""

from __future__ import annotations

import json
import re
import shelve
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary import ForeignSnapshotError, KVCorruptionError, Tier
from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.tiers import injections
from kvcanary_tools.pages import tiers as page

ROOT = Path(__file__).parents[2]
NAMES = ("file_tier", "sealed_backend")
BLOCKS = {"file_tier": "file_tier", "sealed_backend": "lmcache"}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The examples as they stand in the page."""
    text, found = (ROOT / "docs" / "tiers.md").read_text(encoding="utf-8"), dict[str, Any]()
    for name in BLOCKS.values():
        [code] = re.findall(rf"^```python {name}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        exec(compile(code, f"tiers.md: {name}", "exec"), found)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_examples_that_were_tried(name: str) -> None:
    """The record is of the very code of the page."""
    source = (ROOT / "tools/kvcanary_tools/bench/tiers" / f"{name}.py").read_text(encoding="utf-8")
    code = source.split('"""', 2)[2].lstrip("\n")
    assert f"```python {BLOCKS[name]}\n{code}```" in (ROOT / "docs" / "tiers.md").read_text(encoding="utf-8")


def test_examples_are_short() -> None:
    """Twenty lines or so of code: classes and methods."""
    for name in NAMES:
        lines = (ROOT / "tools/kvcanary_tools/bench/tiers" / f"{name}.py").read_text().split("\nclass ")[1].splitlines()
        assert len([line for line in lines if line.strip()]) <= 24


# files


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_files_come_back_as_they_were_saved(names, tmp_path: Path, mode: str) -> None:
    """After a restart too, and a file that is not there is a miss; a cut one is none of it."""
    kv = np.random.default_rng(1).standard_normal((2, 4, 16, 2, 8)).astype(np.float16)
    names["FileTier"](tmp_path, 5).save("key", kv)
    tier = names["FileTier"](tmp_path, 5, mode)
    assert tier.load("key") == kv.tobytes()
    assert tier.load("other") is None
    (tmp_path / "key.kv").write_bytes(kv.tobytes()[:-2])
    if mode == "raise":
        with pytest.raises(KVCorruptionError, match="4094 of 4096 bytes"):
            tier.load("key")
    else:
        assert tier.load("key") is None


def test_files_of_another_seed_are_refused_with_both(names, tmp_path: Path) -> None:
    """The bytes are right; a process without the seed cannot know."""
    names["FileTier"](tmp_path, 5).save("key", np.ones(9))
    with pytest.raises(ForeignSnapshotError, match=f"{Tier(5).seed_id} for {Tier(6).seed_id}"):
        names["FileTier"](tmp_path, 6, "raise").load("key")


def test_every_fault_of_a_file_is_found_and_named(tmp_path: Path) -> None:
    """A sample of the record: none is missed, none is called what it is not."""
    told = injections.inject(72, tmp_path)
    assert (told["misses"], told["alarms"], told["other_verdicts"]) == (0, 0, 0)
    assert sum(told["verdicts"].values()) == 72


def test_right_files_are_right(tmp_path: Path) -> None:
    """A sample of the record: loads, objects that were put again, restarts."""
    told = injections.load_clean(1200, tmp_path)
    assert (told["misses_of_clean_loads"], told["findings"]) == (0, 0)


def test_a_fault_that_changes_nothing_would_be_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of misses counts."""
    monkeypatch.setattr(injections, "FAULTS", {lambda *scene: None: ()})
    assert injections.inject(3, tmp_path)["misses"] == 3


def test_the_record_has_what_it_should() -> None:
    """A thousand faults and a hundred thousand clean loads, and the page says what it says."""
    record = json.loads((RESULTS / "tier_files.json").read_text())
    assert record["injections"] >= 1000
    assert record["clean_loads"] >= 100_000
    assert [record[name] for name in ("misses", "alarms", "other_verdicts", "misses_of_clean_loads", "findings")] == [
        0
    ] * 5
    assert page.written() in (ROOT / "docs" / "tiers.md").read_text(encoding="utf-8")


# LMCache


class MemoryObj:
    """What LMCache moves: a tensor with a count of references."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.references = tensor, 1

    def ref_count_down(self) -> None:
        self.references -= 1


class Key:
    """An engine's key, which has a text."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def to_string(self) -> str:
        return f"vllm@model@1@0@{self.chunk:x}"


class Backend:
    """One of LMCache's backends, with the methods that move bytes; `damage` is done to what it gives."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.given: list[MemoryObj] = []
        self.damage = lambda tensor: tensor

    def contains(self, key: Key, pin: bool = False) -> bool:
        return key.to_string() in self.held

    def batched_submit_put_task(self, keys, objs, transfer_spec=None) -> list[Future]:
        self.held |= {key.to_string(): obj.tensor.clone() for key, obj in zip(keys, objs, strict=True)}
        return []

    def get_blocking(self, key: Key) -> MemoryObj | None:
        if key.to_string() not in self.held:
            return None
        self.given.append(MemoryObj(self.damage(self.held[key.to_string()].clone())))
        return self.given[-1]


def chunk(number: int) -> torch.Tensor:
    """K and V of 16 tokens in two layers, as LMCache has them: [2, layers, tokens, hidden]."""
    return torch.randn(2, 2, 16, 32, generator=torch.Generator().manual_seed(number)).bfloat16()


@contextmanager
def sealed(names: dict[str, Any], backend: Backend, folder: Path, mode: str = "log") -> Iterator[Any]:
    """In a process of its own: a new tier, with the seals that a file has."""
    with shelve.open(str(folder / "seals")) as seals:
        yield names["SealedBackend"](backend, Tier(5, name="LMCache", mode=mode), seals)


DAMAGE = {
    "right": (lambda t: t, ""),
    "packed": (lambda t: t.view(2, 2, 16, 2, 16).transpose(2, 3).contiguous().view(2, 2, 16, 32), "other layout"),
    "layers first": (lambda t: t.transpose(0, 1).contiguous(), "other layout"),
    "tokens first": (lambda t: t.permute(2, 0, 1, 3).contiguous(), "other layout"),
    "tokens first, read as they left": (
        lambda t: t.permute(2, 0, 1, 3).contiguous().view(2, 2, 16, 32),
        "other layout",
    ),
    "other shape": (lambda t: t.view(2, 32, 32), "other layout"),
    "short": (lambda t: torch.cat([t[:1], torch.zeros_like(t[1:])]), "short"),
    "another chunk": (lambda t: chunk(2), "misrouted"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_backend_gives_what_was_put_or_nothing(names, tmp_path: Path, damage: str) -> None:
    """Between put and get the process was started anew; what is wrong is a miss, and its reference is given back."""
    backend, keys = Backend(), [Key(1), Key(2)]
    with sealed(names, backend, tmp_path) as own:
        own.batched_submit_put_task(keys, [MemoryObj(chunk(1)), MemoryObj(chunk(2))])
    backend.damage, kind = DAMAGE[damage]
    with sealed(names, backend, tmp_path) as own:
        assert own.contains(keys[0])
        got, other, none = own.get_blocking(keys[0]), own.batched_get_blocking([keys[1]]), own.get_blocking(Key(3))
        told = own.tier.findings
    assert none is None
    if not kind:
        assert torch.equal(got.tensor, chunk(1))
        assert torch.equal(other[0].tensor, chunk(2))
        assert not told
        return
    assert got is None
    assert backend.given[0].references == 0
    assert told[0].code == "T1"
    assert told[0].pool == "LMCache"
    assert told[0].reader == "vllm@model@1@0@1"


@pytest.mark.parametrize("damage", [name for name, (_, kind) in DAMAGE.items() if kind])
def test_what_a_backend_does_is_named(names, tmp_path: Path, damage: str) -> None:
    """In the process that put it, whose other chunks are known."""
    backend, keys = Backend(), [Key(1), Key(2)]
    with sealed(names, backend, tmp_path, "raise") as own:
        own.batched_submit_put_task(keys, [MemoryObj(chunk(1)), MemoryObj(chunk(2))])
        backend.damage, kind = DAMAGE[damage]
        with pytest.raises(KVCorruptionError) as caught:
            own.get_blocking(keys[0])
    assert caught.value.findings[0].found["verdict"] == kind
