"""Rules about tokens: how a forward may have come to be fed another token than its request has."""

from __future__ import annotations

from kvcanary.pools.launch_site import TREE_KINDS, site_name
from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause

FURTHEST_BACK = 16  # among which an older token is looked for


def view_offset(facts: Evidence) -> Cause | None:
    """Every token that was fed is off by one number."""
    shift, pool = facts.row.shift, facts.violation.pool
    if not shift or another_order(facts) is not None:
        return None
    offset = pool.view.token_offset
    texts = f"each of {len(facts.row.fed)} entries was fed the token {abs(shift)} {'behind' if shift > 0 else 'before'}"
    if facts.row.was_pool_right or offset + shift < 0:
        evidence = (texts, f"other rows of the {pool.name} pool are right")
        return Cause("draft", f"the inputs of this forward were shifted by {shift:+d}", "derived", evidence)
    evidence = (f"{texts} its own", f"no row of the {pool.name} pool begins with its own token")
    text = f"the view of the {pool.name} pool says token_offset {offset}, it should be {offset + shift}"
    return Cause("draft", text, "derived", evidence)


def another_order(facts: Evidence) -> Cause | None:
    """The right tokens at each other's positions."""
    fed, wanted = facts.row.together
    if len(fed) < 2 or fed == wanted or sorted(fed) != sorted(wanted):
        return None
    if facts.row.shift and len(facts.row.fed) > 2:
        return None  # shifted tokens are the same ones where the first and the last are equal
    how = "in reverse" if fed == wanted[::-1] else "in another order"
    was_fed = f"{site_name(*facts.violation.site)} was fed the {len(fed)} tokens of its row {how}"
    family = "draft" if facts.violation.site[0] in TREE_KINDS else "order"
    return Cause(family, f"accepted tokens were fed {how}", "derived", (was_fed, "each of them is right"))


def no_token(facts: Evidence) -> Cause | None:
    size, record = facts.violation.pool.view.vocab_size, facts.record
    if size is None or record is None or not record.site or record.token < size:
        return None
    text = "an input buffer was read before it was filled, or a mark of padding"
    return Cause("uninitialised", text, "inferred", (f"what was fed is no token id below {size}",))


def unshifted_token(facts: Evidence) -> Cause | None:
    """In a pool whose entries hold later tokens than their positions'."""
    violation, offset = facts.violation, facts.violation.pool.view.token_offset
    if not offset:
        return None
    reader, position, record = facts.reader, violation.position, facts.record
    text = "the pool was fed the token of the position itself"
    if reader is None or position is None or record is None or record.token not in reader.tokens[position:][:1]:
        text = "the pool was fed another token than the one that follows"
    return Cause("draft", text, "inferred", (f"the {violation.pool.name} pool holds tokens {offset} further",))


def older_token(facts: Evidence) -> Cause | None:
    """A root that holds one of the tokens before its own."""
    violation, reader, record = facts.violation, facts.reader, facts.record
    if violation.pool.view.token_offset or reader is None or record is None or not violation.position:
        return None
    before = reader.tokens[max(0, violation.position - FURTHEST_BACK) : violation.position].tolist()
    if record.token not in before:
        return None
    back = before[::-1].index(record.token) + 1
    evidence = (f"it is the token of position {violation.position - back}, {back} before",)
    return Cause("order", "an older token was fed, which is not the newest that was accepted", "inferred", evidence)
