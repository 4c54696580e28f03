"""Each rule about branches by itself: what it is shown, and the one cause that it names, word for word; or none."""

from __future__ import annotations

from kvcanary.calls.violation import NO_BRANCH, Lineage
from kvcanary.report.causes import branches
from kvcanary.report.finding import Cause
from rule_facts import a_violation, expect_said, shown, silent_rules

DRAFT = ("draft", 3)
ROW = "the row is branch 2 of draft[3]"
PARENT = "the drafter says that it descends from branch 1 of draft[2]"
READS = "in front of its own entry it reads that of"

SAID = [
    (branches.other_branch, shown(a_violation(code="R5", site=DRAFT)), None),
    (
        branches.other_branch,
        shown(a_violation(code="R5", site=DRAFT, lineage=Lineage(2, 1, 2))),
        Cause(
            "draft",
            "row reads its own column (branch 2), not the entries of its ancestors (branch 1)",
            "derived",
            (ROW, PARENT, f"{READS} branch 2 there"),
        ),
    ),
    *(
        (
            branches.other_branch,
            shown(a_violation(code="R5", site=DRAFT, lineage=Lineage(2, 1, found))),
            Cause(
                "draft",
                "row reads another branch of the tree, not the entries of its ancestors (branch 1)",
                "derived",
                (ROW, PARENT, f"{READS} {provenance} there"),
            ),
        )
        for found, provenance in ((0, "branch 0"), (NO_BRANCH, "no branch"))
    ),
    (branches.copies_of_ancestors, shown(a_violation(code="R5", site=DRAFT)), None),
    (branches.copies_of_ancestors, shown(a_violation(code="R5", site=DRAFT), write_site=("draft", 2)), None),
    (branches.copies_of_ancestors, shown(a_violation(code="R5"), write_site=("move", 0)), None),
    (
        branches.copies_of_ancestors,
        shown(a_violation(code="R5", site=DRAFT), write_site=("move", 0), last_write="move, step 9"),
        Cause(
            "draft",
            "the ancestors of a row do not follow each other: copies of some were not made, or of others",
            "derived",
            ("read by draft[3]", "brought by move, step 9"),
        ),
    ),
]


def test_each_rule_names_its_cause() -> None:
    """Word for word, or none where what it is shown does not speak for it."""
    expect_said(SAID)


def test_every_rule_is_collected_here() -> None:
    """A new rule comes with what it says."""
    assert silent_rules(branches, SAID) == set()
