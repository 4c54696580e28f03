"""The switch behind every re-enacted bug: absent while nothing is armed, cheap, and known to the catalogue."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from pkgutil import iter_modules
from timeit import repeat

import pytest

from kvcanary import faults
from kvcanary.faults import memory, steps
from kvcanary.faults.catalogue import FAMILIES, UnknownFaultError, find
from spec_engine import Engine, EngineConfig, SamplingParams

NAME = "bounds.page_table_scatter"
ENGINE = Path(__file__).resolve().parents[2] / "spec_engine"


def test_a_seam_gives_back_its_value():
    """With nothing armed, and with another fault armed, it is the very object that came in."""
    value = [12]
    assert faults.seam(NAME, value, num_steps=4) is value
    with faults.arm("bounds.row_width"):
        assert faults.seam(NAME, value, num_steps=4) is value


def test_an_armed_fault_changes_its_value_and_counts():
    """Only inside the block, also when arms are nested or the block ends in an error."""
    with faults.arm(NAME) as outer:
        assert faults.seam(NAME, 3, num_steps=12) == 12
        with faults.arm(NAME) as inner:
            assert faults.seam(NAME, 12, num_steps=12) == 12
        assert faults.seam(NAME, 6, num_steps=24) == 24
    assert (outer.num_strikes, inner.num_strikes) == (2, 0)
    with suppress(TypeError), faults.arm(NAME):
        faults.seam(NAME, 12)
    assert faults.seam(NAME, 12, num_steps=4) == 12


def test_an_unknown_name_lists_the_closest():
    """A misspelt fault must not be one that never fires."""
    with (
        pytest.raises(UnknownFaultError, match=r"got 'row_width': did you mean bounds\.row_width"),
        faults.arm("row_width"),
    ):
        pass
    with pytest.raises(UnknownFaultError, match=r"got '': its families are .*bits, bounds, draft, "):
        find("")


@pytest.fixture
def environment(monkeypatch):
    """What the environment arms is armed for the process: here it ends with the test."""
    monkeypatch.setattr(faults, "_armed", {})
    return monkeypatch


def test_the_environment_arms_when_an_engine_starts(environment):
    """KVCANARY_REENACT stays armed for the process; one that is not set, or empty, arms nothing."""
    environment.setenv("KVCANARY_REENACT", "")
    Engine(EngineConfig(max_total_tokens=512))
    assert faults.seam(NAME, 12, num_steps=4) == 12
    environment.setenv("KVCANARY_REENACT", NAME)
    Engine(EngineConfig(max_total_tokens=512))
    assert faults.seam(NAME, 12, num_steps=4) == 4
    environment.setenv("KVCANARY_REENACT", "bounds.nothing")
    with pytest.raises(UnknownFaultError):
        Engine(EngineConfig(max_total_tokens=512))


def test_nothing_armed_loads_no_fault():
    """Neither `import kvcanary` nor a running engine knows what could be re-enacted: off means absent."""
    script = (
        "import sys, kvcanary\n"
        "assert not any(name.startswith('kvcanary.faults') for name in sys.modules)\n"
        "from spec_engine import Engine, EngineConfig, SamplingParams\n"
        "Engine(EngineConfig(max_total_tokens=512)).generate([[1, 2]], SamplingParams(max_new_tokens=2))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('kvcanary.faults')))\n"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["kvcanary.faults"]


def test_engine_and_catalogue_know_the_same_names():
    """A seam without an entry could not be armed, an entry without a seam would never change anything."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in ENGINE.rglob("*.py"))
    from kvcanary.faults.catalogue import faults as entries

    assert set(re.findall(r'seam\(\s*"([\w.]+)"', source)) == {fault.name for fault in entries() if fault.is_seam}


def test_every_family_is_in_the_catalogue():
    """A module that the catalogue does not name would be a family that nobody can arm."""
    names = [module.name for folder in (memory, steps) for module in iter_modules(folder.__path__)]
    assert sorted(names) == list(FAMILIES)


def test_entries_are_whole():
    """Names are unique and carry their family; bugs can be looked up, numbers are K01 to K55; there is a story."""
    from kvcanary.faults.catalogue import faults as entries

    assert len({fault.name for fault in entries()}) == len(entries())
    for fault in entries():
        assert fault.family in FAMILIES
        assert all(re.fullmatch(r"[\w-]+/[\w.-]+(#\d+|@[0-9a-f]{7})", bug) for bug in fault.bugs)
        assert re.fullmatch(r"(K\d\d)?", fault.k)
        assert fault.story.endswith(".")
        assert fault.expected
        assert fault.applies_to


class Counting(dict):
    """Something armed, so that seams look for themselves in it."""

    looks = 0

    def __contains__(self, name: object) -> bool:
        self.looks += 1
        return super().__contains__(name)


def test_seams_cost_less_than_a_thousandth_of_a_step(monkeypatch):
    """All seams of the cheapest decode step (one request, whole pages read) against its time, nothing armed."""
    one = min(repeat(lambda: faults.seam(NAME, 12, num_steps=4, worst_case=None), number=2000, repeat=20)) / 2000
    config = EngineConfig(attention_backend="paged", page_size=4, max_total_tokens=1024, max_running_requests=1)
    engine = Engine(config)
    engine.submit([5] * 8, SamplingParams(max_new_tokens=60, ignore_eos=True))
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    armed = Counting(another=None)
    monkeypatch.setattr(faults, "_armed", armed)
    engine.step()
    assert 5 <= armed.looks <= 30
    assert armed.looks * one < 0.001 * min(seconds[1:])
