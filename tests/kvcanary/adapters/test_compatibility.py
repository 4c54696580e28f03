"""Which releases of a host are accepted, and when the reader is warned."""

from __future__ import annotations

import enum

import pytest
import structlog

from kvcanary import CanaryConfigError
from kvcanary.adapters import compatibility
from kvcanary.adapters.compatibility import ACCEPT, Needed, accept, missing

TESTED = ("5.9", "5.14", "5.24")


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "_warned", set())


def warnings(*versions: str) -> list[str]:
    with structlog.testing.capture_logs() as events:
        assert [accept("host", version, TESTED) for version in versions] == [None] * len(versions)
    assert {(event["event"], event["log_level"]) for event in events} <= {("kvcanary.untested_release", "warning")}
    assert all(event["docs"].startswith("docs/adapters.md") for event in events)
    return [event["version"] for event in events]


def test_a_release_in_the_tested_range_is_accepted_in_silence() -> None:
    """Tested ones, their patches and builds, and those between two tested ones; 5.9 is older than 5.14."""
    assert warnings("5.14.1", "5.24.0", "5.24.0+cpu", "5.9.7.dev0", "5.17.2") == []


def test_a_release_outside_of_it_is_told_once() -> None:
    """Newer, older and nameless ones are accepted, each with one warning a process."""
    assert warnings("5.25.0", "5.25.0", "6.0.1", "4.57.0", "dev", "dev") == ["5.25.0", "6.0.1", "4.57.0", "dev"]


def test_patches_are_told_apart_where_a_host_has_no_other_numbers() -> None:
    """With three numbers in the list a patch outside of it is told, and one between two is not."""
    tested = ("0.5.9", "0.5.23")
    with structlog.testing.capture_logs() as events:
        for version in ("0.5.9", "0.5.23.post1", "0.5.17", "0.5.24", "0.5.8", "0.5"):
            assert accept("host", version, tested) is None
    assert [event["version"] for event in events] == ["0.5.24", "0.5.8", "0.5"]


def test_methods_of_an_enumeration_are_attributes_of_it() -> None:
    """dir() of an enumeration hides them."""

    class Mode(enum.IntEnum):
        EXTEND = 1

        def is_extend(self) -> bool:
            return True

    assert {"is_extend", "EXTEND"} <= compatibility.attributes_of(Mode)


def test_strict_refuses_every_release_that_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVCANARY_ACCEPT=strict: one sentence with what to install, also for a release between two tested ones."""
    monkeypatch.setenv(ACCEPT, " Strict ")
    assert accept("host", "5.14.1", TESTED) is None
    for version in ("5.17.2", "5.25.0", "dev"):
        sentence = f"host {version} is not known here: install 5.9 or 5.14 or 5.24"
        assert accept("host", version, TESTED) == sentence


def test_another_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt policy must not be taken for the lax one."""
    monkeypatch.setenv(ACCEPT, "strickt")
    with pytest.raises(CanaryConfigError, match="KVCANARY_ACCEPT must be 'strict' or unset, got 'strickt'"):
        accept("host", "5.14.1", TESTED)


def test_a_module_that_asks_for_another_one_is_not_gone(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be imported is told once, with the name of what it lacks; a module that is not there is gone."""
    (tmp_path / "needs_other.py").write_text("import other_that_is_nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    needs = [Needed(f"needs_other:{name}") for name in ("a", "b")] + [Needed("nowhere.at_all:a")]
    assert missing(needs) == [
        "needs_other cannot be imported: No module named 'other_that_is_nowhere'",
        "nowhere.at_all:a is gone",
    ]
