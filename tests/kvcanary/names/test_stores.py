"""Stores of names: what one process puts another finds, and what cannot be opened is one sentence."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvcanary import CanaryConfig, CanaryConfigError
from kvcanary.names import NameStore, store_at
from kvcanary.names.file_store import ANSWERED_IN, STORED_IN, FileNames

SPACE, OTHER = "model a, seed 1", "model b, seed 1"
LEAST, MOST = -(1 << 63), (1 << 63) - 1


def test_another_process_finds_what_one_has_put(opened: Callable[[], NameStore]) -> None:
    """By chain, every fingerprint with who wrote it first; of its own space alone."""
    one, two = opened(), opened()
    one.put(SPACE, "first", [(5, LEAST), (LEAST, 7), (MOST, MOST)])
    two.put(SPACE, "second", [(5, LEAST), (5, 9)])
    two.put(OTHER, "second", [(5, 11)])
    assert two.get(SPACE, [5, LEAST, MOST, 6]) == {
        5: {LEAST: "first", 9: "second"}, LEAST: {7: "first"}, MOST: {MOST: "first"}
    }  # fmt: skip
    assert one.get(OTHER, [5]) == {5: {11: "second"}}
    assert (one.chain_of(SPACE, 7), one.chain_of(SPACE, 11)) == (LEAST, None)
    assert sorted(one.spaces()) == [SPACE, OTHER]


def test_many_chains_are_asked_at_once(opened: Callable[[], NameStore]) -> None:
    """More than one query of a file takes."""
    store = opened()
    store.put(SPACE, "one", [(chain, 3 * chain) for chain in range(2500)])
    assert store.get(SPACE, range(1, 2500)) == {chain: {3 * chain: "one"} for chain in range(1, 2500)}
    assert store.get(SPACE, []) == {}


def test_several_writers_at_once_lose_nothing(opened: Callable[[], NameStore]) -> None:
    """Four threads, each with a store of its own."""

    def write(own: NameStore, number: int) -> None:
        for chain in range(20):
            own.put(SPACE, f"writer {number}", [(chain, number)])

    threads = [threading.Thread(target=write, args=(opened(), number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(set(ways) == {0, 1, 2, 3} for ways in opened().get(SPACE, range(20)).values())


def test_what_is_stored_waits_for_another_process_and_a_question_does_not(tmp_path: Path) -> None:
    """A thread of its own stores names, but a step waits for the answer."""
    path = tmp_path / "names.sqlite"
    with closing(FileNames(path)) as store, closing(sqlite3.connect(path, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            store.get(SPACE, [5])
        assert ANSWERED_IN <= 2 * (time.monotonic() - began) < STORED_IN
        release = threading.Timer(3 * ANSWERED_IN, other.commit)
        release.start()
        store.put(SPACE, "one", [(5, 6)])
        release.join()
        assert store.get(SPACE, [5]) == {5: {6: "one"}}


def test_a_file_survives_its_writer_and_stays_small(tmp_path: Path) -> None:
    """The oldest names go."""
    path = tmp_path / "names.sqlite"
    store = FileNames(path, most=100)
    for start in range(0, 300, 50):
        store.put(SPACE, "one", [(chain, chain) for chain in range(start, start + 50)])
    store.close()
    with closing(FileNames(path)) as store:
        assert sorted(store.get(SPACE, range(300))) == list(range(200, 300))


def test_a_transaction_that_is_undone_leaves_no_number_behind(tmp_path: Path) -> None:
    """Else a space that another process adds next would have the names of this one."""
    path = tmp_path / "names.sqlite"
    with closing(FileNames(path)) as one, closing(FileNames(path)) as two:
        with pytest.raises(OverflowError):
            one.put(SPACE, "one", [(1 << 70, 1)])  # no integer of SQLite's
        two.put(OTHER, "two", [(5, 6)])
        one.put(SPACE, "one", [(7, 8)])
        assert (two.get(OTHER, [5, 7]), two.get(SPACE, [5, 7])) == ({5: {6: "two"}}, {7: {8: "one"}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("disk", "names must be memory, file:PATH or redis://HOST:PORT, got 'disk'"),
        ("file:", "names must be memory"),
        ("file:/nowhere/at/all/names.sqlite", "unable to open database file"),
    ],
)
def test_a_place_that_is_none_is_one_sentence(text: str, words: str) -> None:
    """CanaryConfigError, as the setting is read or as the store is opened."""
    with pytest.raises(CanaryConfigError, match=words):
        store_at(CanaryConfig(names=text, seed=3).names)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """It stays as it is."""
    path = tmp_path / "names.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(CanaryConfigError, match="file is not a database"):
        store_at(f"file:{path}")
    assert path.read_bytes() == b"this is no database" * 100


def test_without_its_package_a_redis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the extra."""
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(CanaryConfigError, match=r"pip install 'kvcanary\[redis\]'"):
        store_at("redis://localhost:1")


def test_names_of_others_need_one_seed() -> None:
    """A secret seed would never find any."""
    with pytest.raises(
        CanaryConfigError, match=r"redis://store:6379 are found by processes with the same seed"
    ) as told:
        CanaryConfig(names="redis://user:secret@store:6379")
    assert "secret" not in str(told.value)
    assert CanaryConfig.from_env({"KVCANARY_NAMES": "file:/tmp/x", "KVCANARY_SEED": "3"}).names == "file:/tmp/x"


def test_who_cannot_compare_names_of_others_says_so() -> None:
    """Nobody believes that they are compared."""
    with pytest.raises(CanaryConfigError, match="names must be memory for transformers, got file:/x"):
        CanaryConfig(names="file:/x", seed=3).expect_names_in_memory("transformers")
    CanaryConfig().expect_names_in_memory("transformers")
