"""Rules about branches of a draft: why a row may have been told to read another one's entries."""

from __future__ import annotations

from kvcanary.calls.violation import NO_BRANCH
from kvcanary.pools.launch_site import site_name
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause


def other_branch(facts: Evidence) -> Cause | None:
    """The engine says of which branch a row is the child, and the row reads what another one has written."""
    lineage = facts.violation.lineage
    if lineage is None:
        return None
    kind, index = facts.violation.site
    here, before = site_name(kind, index), site_name(kind, index - 1)
    branch, parent, found = lineage
    read = f"its own column (branch {branch})" if found == branch else "another branch of the tree"
    text = f"row reads {read}, not the entries of its ancestors (branch {parent})"
    evidence = (
        f"the row is branch {branch} of {here}",
        f"the drafter says that it descends from branch {parent} of {before}",
        f"in front of its own entry it reads that of {'no branch' if found == NO_BRANCH else f'branch {found}'} there",
    )
    return Cause("draft", text, "derived", evidence)


def copies_of_ancestors(facts: Evidence) -> Cause | None:
    """Readers of whole pages have their ancestors copied; what a copy of this step brought does not follow the rest."""
    if facts.violation.site[0] != "draft" or facts.write_site is None or facts.write_site[0] != "move":
        return None
    evidence = (f"read by {site_name(*facts.violation.site)}", f"brought by {facts.last_write}")
    text = "the ancestors of a row do not follow each other: copies of some were not made, or of others"
    return Cause("draft", text, "derived", evidence)
