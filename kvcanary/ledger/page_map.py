"""Page map: state, owner, references, grant and last look of every page, as columns of plain JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcanary.ledger.ledger import NO_PAGE, Ledger
from kvcanary.ledger.page_states import STATE_NAMES, Array
from kvcanary_kernels.record.layout import SHARED_OWNER

NEVER = -1


def page_map(ledger: Ledger, cached_reads: Array, step: int) -> dict[str, Any]:
    """Columns have one entry a page, null pages included.

    cached_reads: [num_pages] int64, the step of the last re-read at each page that only a cache holds

    state:      number in `states`
    owner:      number in `owners`, -1 for nobody; a page of several is "(shared)"
    references: rows that name the page; generation: grows when it is granted and when it is free again
    checked:    step in which all its final bytes were last known good; -1 where it holds none
    """
    owners = ["(shared)", *ledger.requests]
    number = {request.uid: place for place, request in enumerate(ledger.requests.values(), 1)}
    return {
        "step": step,
        "page_size": ledger.page_size,
        "null_pages": ledger.null_pages,
        "states": [*STATE_NAMES.values()],
        "state": ledger.states.tolist(),
        "owners": owners,
        "owner": [0 if uid == SHARED_OWNER else number.get(uid, -1) for uid in ledger.owners.tolist()],
        "references": ledger.refcounts.tolist(),
        "generation": ledger.generations.tolist(),
        "checked": _checked(ledger, cached_reads).tolist(),
    }


def _checked(ledger: Ledger, cached_reads: Array) -> Array:
    """[num_pages] int64: of a page that rows hold, the oldest re-read at any of its final entries in any pool."""
    cached = ledger.pages.published & (ledger.refcounts == 0)
    checked = np.where(cached, cached_reads, NEVER)
    is_seen = np.zeros(len(checked), dtype=np.bool_)
    for request in ledger.requests.values():
        for queue in request.reads:
            for start, end, step in queue.oldest_first():
                held = request.pages[start // ledger.page_size : -(-end // ledger.page_size)]
                pages = np.array([page for page in held if page != NO_PAGE], dtype=np.int64)
                checked[pages] = np.where(is_seen[pages], np.minimum(checked[pages], step), step)
                is_seen[pages] = True
    return checked
