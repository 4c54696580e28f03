"""Which releases of a host are accepted, and when the reader is warned."""

from __future__ import annotations

import pytest
import structlog

from kvcanary import CanaryConfigError
from kvcanary.adapters import compatibility
from kvcanary.adapters.compatibility import ACCEPT, accept

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
