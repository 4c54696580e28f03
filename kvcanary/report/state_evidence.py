"""State evidence: what was known of a recurrent state when a check fired there, as findings are made from it."""

from __future__ import annotations

from collections.abc import Sequence

from kvcanary.calls.state_facts import StateFacts
from kvcanary.calls.violation import Violation
from kvcanary.ledger.ledger import Ledger
from kvcanary.pools.launch_site import pack_site
from kvcanary.report.evidence import Evidence
from kvcanary_kernels.record.layout import Record


def of_state(incident: Sequence[Violation], state: StateFacts, ledger: Ledger) -> Evidence:
    """Pages and rows say nothing of it: what is known was read when the check fired."""
    violation, lies = incident[0], state.lies
    names = [name for own in incident for name in (own.request_id, *own.others)]
    touched = [ledger.requests[name] for name in dict.fromkeys((*names, state.owner)) if name in ledger.requests]
    good = violation.last_good
    return Evidence(
        incident,
        None,
        record=_record(state) if lies.kind else None,
        writer=lies.writer,
        word=violation.word,
        owner="a prefix cache" if state.is_shared else state.owner,
        is_shared=state.is_shared,
        granted=state.generation,
        history=state.history,
        readers=tuple(request.request_id for request in touched),
        exposed_tokens=0 if good is None else sum(request.tokens_since(good) for request in touched),
    )


def _record(state: StateFacts) -> Record:
    """What the host knows of the entry, as records of slots have it."""
    lies = state.lies
    site = pack_site(lies.kind, 0)
    return Record(0, lies.absorbed, lies.chain, lies.uid, state.generation, lies.step, site, 0, 0, 0)
