"""Who looks, and when: the sweep, a request's end, drain; and what is counted meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from kvcanary.scrub.scrubber import STRIDE
from toy_findings import bits, found, on, slot_of


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_flip_in_a_request_that_nobody_steps_is_found_by_the_sweep(make_engine, pool):
    """Committed bytes that no forward reads are read by the rolling check, in every pool."""
    engine = make_engine(content="rolling", budget=1 << 30)
    engine.start("idle", 9)
    engine.start("busy", 9)
    slot = slot_of(engine, "idle", 4)
    bits(engine, 0, slot, pool=pool)[0] ^= 1
    (finding,) = found(engine.decode, "busy")
    assert (finding.code, finding.pool, finding.slot, finding.site) == ("R9", pool, slot, ("sweep", 0))


def test_the_automatic_sweep_reads_every_few_steps_and_writes_nothing(make_engine):
    """Bytes are read in the steps that are multiples of the stride alone, and no record changes for it."""
    engine = make_engine(content="rolling")
    engine.start("only", 40)
    certificate = engine.canary.certificate()
    for _ in range(3 * STRIDE):
        engine.begin()
        engine.canary.collect(engine.canary.end_step())
        after = engine.canary.certificate()
        assert (after["bytes_checked"] > certificate["bytes_checked"]) == (engine.num_steps % STRIDE == 0)
        assert after["slots_sealed"] == certificate["slots_sealed"]
        certificate = after
    engine.finish("only")
    assert engine.canary.findings == []


@pytest.mark.parametrize(("look", "site"), [("decode", "decode"), ("draft", "verify"), ("finish", "release")])
def test_a_finding_names_who_looked(make_engine, look, site):
    """The same fault carries the forward, or the look of the canary's own, that found it."""
    engine = make_engine(content="rolling" if look == "finish" else "full")
    engine.start("only", 9)
    bits(engine, 1, slot_of(engine, "only", 4))[0] ^= 1
    (finding,) = found(getattr(engine, look), "only")
    assert (finding.code, finding.site[0]) == ("R9", site)


def test_drain_judges_what_no_check_has_seen(engine):
    """The extend forward comes behind the step's check: at idle its finding is not lost."""
    engine.change_write = on("extend", lambda plan: replace(plan, positions=plan.positions + 1))
    engine.decode()
    assert engine.canary.findings == []
    assert {finding.code for finding in found(engine.canary.drain)} == {"W5"}


def test_a_forward_without_hooks_is_told_in_its_step(engine):
    """What is counted are entries: tokens that became final and that no hook has seen are missing at once."""
    forward = engine._forward
    engine._forward = lambda kind, *plans: None if kind == "decode" else forward(kind, *plans)
    committed = engine.rows["first"].committed
    engine.decode("first")
    (finding,) = found(engine.canary.drain)
    assert (finding.code, finding.reader, finding.step) == ("H1", "first", engine.num_steps)
    assert finding.expected == {"entries": committed + 1}


def test_what_is_switched_off_does_not_count_as_standing_still(make_engine):
    """Without content checks and poison, and with idle steps, 120 steps pass; the certificate says what was off."""
    engine = make_engine(content="write", poison="off", num_pages=64)
    engine.start("only", 5)
    for _ in range(60):
        engine.decode()
        engine.begin()
        engine.canary.collect(engine.canary.end_step())
    assert engine.canary.findings == []
    assert engine.canary.certificate()["inactive_classes"]["R9"] == "content is not compared"


def test_counters_are_told_every_hundred_steps(make_engine):
    """Metrics without a finding: one event with totals and with what was added."""
    engine = make_engine()
    engine.start("only", 5)
    with capture_logs() as logs:
        for _ in range(99):
            engine.begin()
            engine.canary.collect(engine.canary.end_step())
    (event,) = (log for log in logs if log["event"] == "kvcanary.stats")
    assert event["totals"]["slots_checked"] == engine.canary.certificate()["slots_checked"] > 0
