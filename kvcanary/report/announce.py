"""Announce: a finding where it happens, in modes that go on: one screen for people on stderr, an event for machines."""

from __future__ import annotations

import logging
import sys

import structlog

from kvcanary.report.finding import log_finding
from kvcanary.report.render import Report

_events = structlog.get_logger("kvcanary")


def announce(report: Report, on_screen: bool = True) -> None:
    """Tell of what was found; nothing that goes wrong meanwhile reaches the engine.

    on_screen: False where somebody else prints this report
    """
    for finding in report.findings:
        log_finding(finding, report.rank, report.dump)
    if on_screen and report.findings and _is_wanted() and sys.stderr is not None:
        try:
            report.print(sys.stderr)
            sys.stderr.flush()
        except (OSError, ValueError):  # stderr is closed, full, or knows fewer characters: the events have it
            pass


def _is_wanted() -> bool:
    """Whether events of level error are: a program that silences them has its own way to say what was found."""
    asked = getattr(_events.bind(), "is_enabled_for", None) or getattr(_events.bind(), "isEnabledFor", None)
    return asked is None or bool(asked(logging.ERROR))
