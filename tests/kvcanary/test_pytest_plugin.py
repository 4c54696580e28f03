"""The fixtures that other projects' tests use: a clean run passes, a fault that nobody expects fails with its name."""

from __future__ import annotations

import subprocess
import sys

import pytest

SUITE = '''
import pytest, torch
from kvcanary import PoolView, ReadPlan, WritePlan
from kvcanary.faults import seam
from kvcanary.invariants import check_row_fits


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


class Engine:
    """One request, one layer, one token a step."""

    def __init__(self, kv_canary, **settings):
        self.k, self.v = torch.zeros(64, 1, 4), torch.zeros(64, 1, 4)
        self.canary = kv_canary([PoolView("target", [self.k], [self.v], page_size=4)], seed=1, **settings)
        self.canary.admit("only", list(range(100, 140)))
        self.canary.on_alloc("only", list(range(1, 11)))
        self.length = 0

    def step(self):
        row = ints(*range(4, 4 + self.length + 1))
        self.canary.begin_step(self.length + 1)
        substep = self.canary.forward("decode", 0, "target")
        read = ReadPlan(ints(0, len(row)), row, ("only",), 1, ints(self.length), 1)
        substep.open(read, WritePlan(row[-1:], ints(100 + self.length), ints(self.length)))
        self.k[row[-1:]], self.v[row[-1:]] = torch.ones(1, 1, 4), torch.ones(1, 1, 4)
        substep.store(0, torch.ones(1, 1, 4), torch.ones(1, 1, 4))
        substep.close()
        self.canary.collect(self.canary.end_step())
        self.length += 1
        self.canary.commit("only", self.length)

    def damage(self):
        self.k[5, 0, 2] = 7.0


def grow(width):
    check_row_fits(1, 0, 24, width, 4)


def run(engine, steps=6):
    for _ in range(steps):
        engine.step()
'''

CASES = {
    "a clean run passes": ("run(Engine(kv_canary, content='full'))", 1, ""),
    "a fault that is raised is an error": (
        "engine = Engine(kv_canary, content='full'); run(engine); engine.damage(); engine.step()",
        0,
        "*KVCorruptionError*content changed (R9)*",
    ),
    "a fault that is only logged fails at the end": (
        "engine = Engine(kv_canary, content='full', mode='log'); run(engine); engine.damage(); engine.step()",
        1,
        "kvcanary found 1: content changed (R9) at slot 5",
    ),
    "the expected fault passes": (
        "engine = Engine(kv_canary, content='full'); run(engine); "
        "assert kv_fault(engine.damage, engine.step, 'R9', slot=5, layer=0).part == 'K'",
        1,
        "",
    ),
    "another code than expected fails": (
        "engine = Engine(kv_canary, content='full'); run(engine); kv_fault(engine.damage, engine.step, 'R3')",
        0,
        "expected {'code': 'R3'}, found {'code': 'R9'}:",
    ),
    "a code that is only evidence is pointed out": (
        "engine = Engine(kv_canary); run(engine); "
        "kv_fault(lambda: engine.canary.on_free('only', [2, 1]), engine.step, 'R7')",
        0,
        "R7 is in its evidence: faults of a write speak first, then the first entry of a row",
    ),
    "another place than expected fails": (
        "engine = Engine(kv_canary, content='full'); run(engine); kv_fault(engine.damage, engine.step, 'R9', slot=6)",
        0,
        "expected {'code': 'R9', 'slot': 6}, found {'code': 'R9', 'slot': 5}:",
    ),
    "an armed fault that ends in its typed error passes": (
        "error = kv_fault('bounds.row_width', lambda: grow(seam('bounds.row_width', 99, context_length=10, "
        "num_draft_tokens=6)), 'RowOverflowError'); assert 'its width is 20' in str(error)",
        1,
        "",
    ),
    "an armed fault that ends in another error fails": (
        "kv_fault('bounds.row_width', lambda: grow(10), 'LengthOrderError')",
        0,
        "expected {'code': 'LengthOrderError'}, found {'code': 'RowOverflowError'}:",
    ),
    "an armed fault that nothing finds fails": (
        "kv_fault('bounds.row_width', lambda: None, 'RowOverflowError')",
        0,
        "no check fired, RowOverflowError was expected",
    ),
    "no finding where one is expected fails": (
        "engine = Engine(kv_canary); run(engine); kv_fault(lambda: None, engine.step, 'R9')",
        0,
        "no check fired, R9 was expected",
    ),
}


#: By what it is: arguments of the marker, the test's body, how many pass, and what is told.
MARKED = {
    "a fault of the catalogue passes": (
        "'bits.flip', layer=0",
        "engine = Engine(kv_canary, content='full'); run(engine); assert kv_fault(run=engine.step).layer == 0",
        1,
        "",
    ),
    "a fault that the engine hides fails": (
        "'bits.flip'",
        "engine = Engine(kv_canary, content='write'); run(engine); kv_fault(run=engine.step)",
        0,
        "no check fired, R9 was expected",
    ),
    "an undone fix passes": (
        "'bounds.row_width'",
        "kv_fault(run=lambda: grow(seam('bounds.row_width', 99, context_length=10, num_draft_tokens=6)))",
        1,
        "",
    ),
    "a fault that needs more than pools fails": (
        "'draft.position_off_by_one'",
        "engine = Engine(kv_canary); kv_fault(run=engine.step)",
        0,
        "NeedsHarnessError: the fault needs a hook before draft",
    ),
    "a fault without an engine fails": ("'bits.flip'", "kv_fault(run=print)", 0, "attach a canary first"),
    "a fault that cannot strike yet fails": (
        "'bits.flip'",
        "engine = Engine(kv_canary); kv_fault(run=engine.step)",
        0,
        "bits.flip could not strike, it applies to everything",
    ),
}


def run_suite(pytester: pytest.Pytester, body: str, *options: str, marker: str = "") -> pytest.RunResult:
    """The result of a suite of one test with this body."""
    marked = f"@pytest.mark.kvfault({marker})\n" if marker else ""
    pytester.makepyfile(SUITE + f"\n\n{marked}def test_it(kv_canary, kv_fault):\n    {body}\n")
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "kvcanary.pytest_plugin", *options)


def expect(result: pytest.RunResult, passed: int, reported: str) -> None:
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) == passed, result.stdout.str()
    assert bool(outcomes.get("failed", 0) + outcomes.get("errors", 0)) == bool(reported)
    if reported:
        result.stdout.fnmatch_lines([f"*{reported}*".replace("[", "[[]")])


@pytest.mark.parametrize("case", CASES)
def test_what_a_suite_sees(pytester: pytest.Pytester, case: str) -> None:
    """Each outcome, in a suite of its own."""
    body, passed, reported = CASES[case]
    expect(run_suite(pytester, body), passed, reported)


@pytest.mark.parametrize("case", MARKED)
def test_what_a_marked_test_sees(pytester: pytest.Pytester, case: str) -> None:
    """`@pytest.mark.kvfault` names the fault; `kv_fault` makes it and knows what must find it."""
    marker, body, passed, reported = MARKED[case]
    expect(run_suite(pytester, body, "--strict-markers", marker=marker), passed, reported)


def test_the_option_sets_the_mode(pytester: pytest.Pytester) -> None:
    """`--kvcanary=log`: canaries go on after a finding, and the test fails at its end."""
    body = "engine = Engine(kv_canary, content='full'); run(engine); engine.damage(); engine.step(); print('went on')"
    result = run_suite(pytester, body, "--kvcanary=log", "-s")
    expect(result, 1, "kvcanary found 1: content changed (R9) at slot 5")
    result.stdout.fnmatch_lines(["*went on*"])


def test_loading_the_plugin_loads_no_torch() -> None:
    """Every session of whoever installs kvcanary loads it."""
    script = "import kvcanary.pytest_plugin, sys; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
