"""Rules about the canary's own hooks: which forward ran past them."""

from __future__ import annotations

from kvcanary.pools.launch_site import site_name
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause


def never_opened(facts: Evidence) -> Cause | None:
    """A forward that was announced, or that must have run."""
    violation = facts.violation
    opened = (violation.found or {}).get("opened")
    if opened is None:
        return None
    name = site_name(*violation.site)
    evidence = (f"{name} was due in step {violation.step}", f"opened in this step: {', '.join(opened)}")
    return Cause("hooks", f"{name} ran without the canary's hooks, or did not run", "derived", evidence)


def wrong_number(facts: Evidence) -> Cause | None:
    """A draft forward whose rows and positions are those of another."""
    number = (facts.violation.expected or {}).get("number")
    if number is None:
        return None
    name, own = site_name(*facts.violation.site), site_name(facts.violation.site[0], number)
    evidence = (f"it was opened as {name}", f"by the ancestors that its rows read, and its positions, it is {own}")
    text = "numbers of substeps repeat or leave some out: the draft forwards of a step count from 0"
    return Cause("hooks", text, "derived", evidence)


def never_declared(facts: Evidence) -> Cause | None:
    """Entries that are final and that no forward with hooks has written."""
    violation, view = facts.violation, facts.violation.pool.view
    if not violation.is_unhooked or "entries" not in (violation.expected or {}):
        return None
    kinds = "the extend or prefill" if view.token_offset or view.ahead else "the forward"
    evidence = (f"no forward with hooks has written position {violation.position} of the {view.name} pool",)
    return Cause("hooks", f"{kinds} that wrote what became final ran without the canary's hooks", "inferred", evidence)
