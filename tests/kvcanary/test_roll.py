"""The rolling check of a step: tails first, then bytes beside what comes next, and one end of all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kvcanary.config import share_of
from kvcanary.scrub.scrubber import STRIDE


class SideStream:
    """Tells when somebody goes there, and when here follows."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    @contextmanager
    def behind(self) -> Iterator[None]:
        self.seen.append("there")
        yield
        self.seen.append("here")

    def join(self) -> None:
        self.seen.append("joined")


@pytest.fixture
def rolled(make_engine, monkeypatch):
    """Checks of a running request, what a step has launched, in order, and looks that wait from tails on."""
    engine, seen = make_engine(page_size=16), []
    engine.start("one", 20)
    checks = engine.canary.session.checks
    looks, look, finds = checks.rereads, checks.tails.reread, []

    def tails(*reported):
        seen.append("tails")
        looks.waits = bool(finds)
        return [*look(*reported), "tail"]

    def send():
        looks.waits = False
        seen.append("sent")

    monkeypatch.setattr(looks, "side_stream", SideStream(seen))
    monkeypatch.setattr(looks, "send", send)
    monkeypatch.setattr(checks.tails, "reread", tails)
    monkeypatch.setattr(
        checks.scrubber, "slice", lambda step, batch: seen.append(f"bytes of {batch.names}") or ["byte"]
    )
    monkeypatch.setattr(checks.cached, "slice", lambda step, stride: seen.append("cached") or ["cached"])
    end = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(checks._marks, "take", lambda: seen.append("mark") or end)
    checks.judge_pending()
    seen.clear()
    return checks, seen, finds


@pytest.mark.parametrize("is_waited_for", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_slice_departs_in_one_go(rolled, waits, is_waited_for):
    """The device goes beside once, and what ends there ends behind the step's forwards and tails too."""
    checks, seen, finds = rolled
    checks.step = STRIDE
    finds += ["look"] * waits
    flight = checks.send(is_waited_for)
    assert seen == ["tails", "there", "bytes of ('one',)", "cached", "sent", "mark", "here"]
    assert flight.violations == ["byte", "cached", "tail"]


def test_a_slice_follows_a_finding_in_the_next_step(rolled):
    """Requests near it are not kept waiting for the step in which a slice would be due."""
    checks, seen, _ = rolled
    checks.step = STRIDE + 1
    checks.scrubber.reread_soon(["one"])
    checks.send(True)
    assert seen == ["tails", "there", "bytes of ('one',)", "cached", "sent", "mark", "here"]


@pytest.mark.parametrize("is_waited_for", [False, True])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("has_new_pages", [False, True])
def test_other_steps_end_where_they_were_launched(rolled, waits, is_waited_for, is_full, has_new_pages):
    """Nothing of theirs runs beside; where nobody looks and the host waits by itself nothing is marked.

    Tails are looked at where a page is new, and in every step that reads all bytes.
    """
    checks, seen, finds = rolled
    checks.step, checks.is_full, checks.tails.has_new_pages = STRIDE + 1, is_full, has_new_pages
    finds += ["look"] * waits
    looks = is_full or has_new_pages
    waits = waits and looks
    flight = checks.send(is_waited_for)
    assert seen == ["tails"] * looks + ["sent", "mark"] * (waits or not is_waited_for)
    assert flight.violations == ["tail"] * looks


def test_a_step_whose_wait_is_interrupted_stays_in_the_air(rolled, monkeypatch):
    """Control-C while the host waits for a step: whoever asks next waits for it again, and hears what it says."""
    checks, _, _ = rolled
    checks.step, checks.violations = STRIDE, []
    end = SimpleNamespace(synchronize=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(checks._marks, "take", lambda: end)
    flight = checks.send(False)
    with pytest.raises(KeyboardInterrupt):
        checks.collect(flight)
    assert ([*checks._flights], flight.is_collected) == ([flight], False)
    end.synchronize = Mock()
    checks.collect(flight)
    assert (end.synchronize.call_count, flight.is_collected, len(checks._flights)) == (1, True, 0)


def test_a_host_that_waits_follows_what_runs_beside(rolled):
    """Bytes that a step has read beside are over when its end is."""
    checks, seen, _ = rolled
    checks.rereads.waits = True
    checks.collect()
    assert seen == ["joined", "sent", "mark"]


def test_a_slice_has_more_of_those_near_damage_and_none_of_those_who_were_read(make_engine, monkeypatch):
    """Each row has its share, a hurried one all, one that attention has compared nothing; ended ones are no rows."""
    engine, read = make_engine(page_size=16), []
    engine.start("one", 20)
    engine.start("two", 33)
    checks = engine.canary.session.checks
    checks.judge_pending()
    pool, scrubber = engine.canary.session.state.by_name["target"], checks.scrubber
    monkeypatch.setattr(checks.rereads, "reread", lambda own, slots, judge: read.append((own.name, len(slots))) or [])
    two = engine.canary.session.ledger.request("two")
    lengths = [engine.canary.session.ledger.request(name).final_len(pool.pool_id) for name in ("one", "two")]
    shares = [share_of(length, STRIDE) for length in lengths]

    def slots(step: int) -> int:
        read.clear()
        scrubber.slice(step, scrubber.batch())
        return dict(read)["target"]

    assert slots(100) == sum(shares)
    scrubber.reread_soon(["one"])
    assert slots(101) == lengths[0] + shares[1]
    assert slots(102) == sum(shares)
    scrubber.attend(pool, [two], 103)
    assert slots(103) == shares[0]
    two.released = True
    assert slots(104) == shares[0]


def test_an_interrupted_slice_loses_no_forward(rolled, monkeypatch):
    """What was launched before is in flight."""
    checks, _, _ = rolled

    def interrupted(step, batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(checks.scrubber, "slice", interrupted)
    checks.step = STRIDE
    with pytest.raises(KeyboardInterrupt):
        checks.send(False)
    assert [flight.step for flight in checks._flights] == [STRIDE]
