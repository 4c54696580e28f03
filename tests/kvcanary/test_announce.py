"""A finding where it happens: the report on stderr in modes that go on, beside the event."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from kvcanary import Report
from kvcanary.dumps.reading import read_dump
from kvcanary.replay.replayer import replay
from kvcanary.report.announce import announce


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    """A stderr whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def damaged(make_engine, **settings: object):
    """An engine in mode log whose next steps read a flipped bit."""
    engine = make_engine(**{"content": "full", "mode": "log", **settings})
    engine.start("first", 13)
    engine.step()
    engine.pools["target"].bits(1, engine.slot("first", 5), "V", 1)[3] ^= 1 << 9
    return engine


@pytest.fixture
def report(make_engine) -> Report:
    """Of one finding, as mode log hands it on."""
    engine, reports = damaged(make_engine), []
    engine.canary.reporting.response.announce = reports.append
    engine.step()
    [found] = reports
    return found


def test_log_prints_the_report_once_an_incident(make_engine, capsys, tmp_path: Path) -> None:
    """One screen with the file and the next command; the event has both, and the file what the event leaves out."""
    engine = damaged(make_engine, dump_dir=str(tmp_path))
    with capture_logs() as events:
        for _ in range(3):
            engine.step()
    [event] = [event for event in events if event["event"] == "kvcanary.finding"]
    [path] = tmp_path.iterdir()
    shown = capsys.readouterr().err
    assert shown.count("kvcanary: ERROR: content changed (R9)") == 1
    assert len(shown.splitlines()) < 25
    assert "  action    logged; the engine goes on\n" in shown
    assert f"  dump      {path}\n  next      kvcanary explain {path}\n" in shown
    assert (event["dump"], event["next"]) == (str(path), f"kvcanary explain {path}")
    whole = read_dump(path).findings[0]
    assert {name: len(whole[name]) > 2 for name in event["cut"]} == dict.fromkeys(event["cut"], True)


def test_a_replay_prints_nothing_of_its_own(make_engine, capsys, tmp_path: Path) -> None:
    """The commands that replay say what came of it; the findings are not happening now."""
    engine = damaged(make_engine, dump_dir=str(tmp_path))
    engine.step()
    capsys.readouterr()
    [path] = tmp_path.iterdir()
    assert [finding.code for finding in replay(read_dump(path)).findings] == ["R9"]
    assert capsys.readouterr() == ("", "")


def test_without_a_dump_the_next_command_tells_of_the_code(report: Report, capsys) -> None:
    """What it means and what to do; no file is named where there is none."""
    announce(report)
    shown = capsys.readouterr().err
    assert "\n  next      kvcanary codes R9\n" in shown
    assert "\n  dump " not in shown


@pytest.mark.parametrize(("no_color", "has_colour"), [("", True), ("1", False)])
def test_colour_is_for_terminals_that_want_it(report: Report, monkeypatch, no_color: str, has_colour: bool) -> None:
    """Nothing of it in a file or a pipe, and nothing under NO_COLOR."""
    stderr = Terminal()
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stderr", stderr)
    announce(report)
    assert ("\x1b[31m" in stderr.getvalue()) == has_colour
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    announce(report)
    assert "\x1b" not in sys.stderr.getvalue()


@pytest.mark.parametrize("stderr", [Broken(), None], ids=["broken", "none"])
def test_a_stderr_that_is_gone_ends_nothing(report: Report, monkeypatch, stderr: io.StringIO | None) -> None:
    """The engine goes on, and the event is told all the same."""
    monkeypatch.setattr(sys, "stderr", stderr)
    with capture_logs() as events:
        announce(report)
    assert [event["code"] for event in events] == ["R9"]


def test_who_silences_errors_gets_no_report(report: Report, capsys) -> None:
    """A program that has its own way to say what was found, as `kvcanary inject` has."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        announce(report)
    finally:
        structlog.configure(**before)
    assert capsys.readouterr().err == ""


def test_a_worker_says_which_it_is(report: Report, capsys) -> None:
    """Of several processes of one engine each writes to the same terminal."""
    announce(Report(report.findings, report.action, {}, rank=3))
    assert "\n  rank      3\n" in capsys.readouterr().err
