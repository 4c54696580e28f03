"""The path of a step does not become longer unseen."""

from __future__ import annotations

from kvcanary_tools.step_path import path_of_a_step

#: Files of an eager step and of a captured one at most, and those that both run at least.
EAGER, CAPTURED, SHARED = 25, 27, 20


def test_a_clean_step_runs_code_of_few_files():
    """Both ways begin and end in the manager, run compiled loops, and neither asks for a report."""
    eager, captured = path_of_a_step("off"), path_of_a_step("on")
    assert {"native/forwards.py", "native/pool_bytes.py"} <= eager  # loops with arrays, and with numbers alone
    assert "native/device_results.py" in captured
    assert {"manager/manager.py", "manager/step.py"} <= eager & captured
    assert not [file for file in eager | captured if file.startswith(("report/", "dumps/", "replay/", "adapters/"))]
    assert len(eager) <= EAGER
    assert len(captured) <= CAPTURED
    assert len(eager & captured) >= SHARED
