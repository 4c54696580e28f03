"""The certificate in words: every counter, what was off, what was not checked."""

from __future__ import annotations

from kvcanary_tools.certificate import certificate_line, certificate_lines

CERTIFICATE = {
    "mode": "log", "content": "rolling", "forwards": 1, "slots_checked": 12_345, "bytes_checked": 3_400_000,
    "finite_bytes_checked": 12_000, "live_bytes": 0, "max_unread_steps": 7, "freed_unread_bytes": 0,
    "classes": ["R1", "R9"], "disabled": ["R5"], "unchecked": {"no record": 3},
    "findings": [{"code": "R9", "count": 2}],
}  # fmt: skip


def test_certificate_line_counts_findings() -> None:
    """One line with mode, coverage and the number of findings, grouped ones included."""
    line = certificate_line(CERTIFICATE)
    assert line == "canary (log, rolling): 1 forward, 12,345 slots and 3.4 MB checked: 2 findings"
    assert certificate_line({**CERTIFICATE, "findings": []}).endswith(": nothing found")


def test_certificate_lines_hide_nothing() -> None:
    """What is switched off and what was not checked is said, with the reason."""
    lines = list(certificate_lines(CERTIFICATE))
    assert "switched off: R5" in lines
    assert "12.0 kB that nobody has written looked through for NaN and Inf" in lines
    assert "not checked: no record: 3" in lines
    assert "longest time that a live byte went unread: 7 steps" in lines
    assert lines[-1] == "findings: 2"


def test_certificate_lines_of_a_real_run() -> None:
    """The keys are those that the canary writes: no key is missing in a certificate of the engine."""
    from kvcanary import CanaryConfig
    from spec_engine import Engine, EngineConfig, SamplingParams

    canary = CanaryConfig(mode="raise", disable=frozenset({"R5"}))
    engine = Engine(EngineConfig(max_total_tokens=512, canary=canary))
    engine.generate(["x = 1\n"], SamplingParams(max_new_tokens=4))
    assert engine.canary is not None
    lines = list(certificate_lines(engine.canary.certificate()))
    assert "switched off: R5" in lines
    assert lines[-1] == "findings: 0"
