"""Rules for caches that are only watched."""

from __future__ import annotations

from types import SimpleNamespace

from kvcanary.report.causes import watched
from kvcanary.report.finding import Cause
from rule_facts import a_record, a_violation, expect_said, shown, silent_rules


def watching(*incident: SimpleNamespace, **read: object) -> SimpleNamespace:
    """What a rule sees where nobody tells of pages."""
    facts = shown(*incident, **read)
    facts.declared = None
    return facts


ASTRAY = {"record": a_record(position=35), "writer": "other", "write_step": 9, "last_write": "decode, step 9"}
SAID = [
    (watched.stored_astray, shown(**ASTRAY), None),
    (watched.stored_astray, watching(), None),
    (watched.stored_astray, watching(**ASTRAY | {"write_step": 8}), None),
    (watched.stored_astray, watching(a_violation(position=35), **ASTRAY), None),
    (
        watched.stored_astray,
        watching(**ASTRAY),
        Cause(
            "addressing",
            "another row's entry was stored into this slot",
            "derived",
            ("decode, step 9 was to store position 35 of 'other' there",),
        ),
    ),
]


def test_each_rule_names_its_cause():
    """Family, words, basis and evidence are those of the table; where the table has none, the rule is silent."""
    expect_said(SAID)


def test_every_rule_is_in_the_table():
    """No rule is left out above, nor one that is silent wherever it is asked."""
    assert silent_rules(watched, SAID) == set()
