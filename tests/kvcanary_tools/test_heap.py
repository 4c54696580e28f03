"""Objects of a process that serves: kept, and in huge pages where the system gives them."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvcanary_tools import heap

NO_HEAP = "00100000-00200000 r-xp 00000000 08:01 42                                 /usr/bin/python\n"


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture
def advised(monkeypatch, tmp_path) -> list[tuple[int, int, int]]:
    """What the system was asked for, on one that has huge pages and gives every second one."""
    asked: list[tuple[int, int, int]] = []

    def madvise(*request: int) -> int:
        asked.append(request)
        return -(len(asked) % 2)

    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "maps").write_text(NO_HEAP)
    monkeypatch.setattr(heap, "SETTING", tmp_path / "enabled")
    monkeypatch.setattr(heap, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    return asked


def test_every_object_is_asked_for_once(advised) -> None:
    """By huge pages, and those that are given are counted."""
    own = [object() for _ in range(3)], ["a list"]
    assert heap.settle() == len(advised) // 2 * heap.HUGE_PAGE
    places = [place for place, *_ in advised]
    assert id(own) // heap.HUGE_PAGE * heap.HUGE_PAGE in places
    assert len(set(places)) == len(places)
    assert {(place % heap.HUGE_PAGE, size, advice) for place, size, advice in advised} == {(0, heap.HUGE_PAGE, 25)}
    assert own[1] == ["a list"]


def test_the_heap_is_asked_for_where_it_is_whole_huge_pages(advised) -> None:
    """What lies in front of the first and behind the last of them shares these with others."""
    heap.MAPS.write_text(f"{NO_HEAP}00300000-00b00000 rw-p 00000000 00:00 0                                  [heap]\n")
    heap.settle()
    places = [place for place, *_ in advised]
    assert places[:3] == [0x400000, 0x600000, 0x800000]
    assert places[3] > 0xB00000


def test_objects_are_kept_from_searches(advised) -> None:
    """None is read again."""
    before = gc.get_freeze_count()
    heap.settle()
    assert gc.get_freeze_count() > before


def test_an_operator_who_wants_none_gets_none(advised) -> None:
    """The system would give them for the asking, whatever it is set to."""
    heap.SETTING.write_text("always madvise [never]\n")
    assert heap.settle() == 0
    assert not advised


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_not_asked(advised, monkeypatch, platform) -> None:
    """Neither the call nor its number means the same there."""
    monkeypatch.setattr(sys, "platform", platform)
    assert heap.settle() == 0
    assert not advised


def test_a_kernel_without_the_setting_is_not_asked(advised, monkeypatch, tmp_path) -> None:
    """It was built without huge pages."""
    monkeypatch.setattr(heap, "SETTING", tmp_path / "nowhere")
    assert heap.settle() == 0
    assert not advised


def test_what_this_system_gives() -> None:
    """Objects are as they were, wherever they lie now."""
    own = {number: str(number) for number in range(100_000)}
    assert heap.settle() % heap.HUGE_PAGE == 0
    assert own == {number: str(number) for number in range(100_000)}
