"""Grants: entries of rows that lie on shared pages which their requests do not hold.

A free page, and another request's private one, say so themselves. A shared page has no owner: its bytes may be right,
and its tokens those that the row would have had, but who reads it without holding it reads what may be evicted and
reused at any time. Only the host knows the pages of every row.
"""

from __future__ import annotations

import numpy as np

from kvcanary.calls.forward import Ints
from kvcanary.ledger.ledger import Ledger, Request
from kvcanary_kernels.record.layout import CODE_BITS, SHARED


def grant_codes(ledger: Ledger, request: Request, first_position: int, names: Ints) -> Ints:
    """[n] int64: R7 or R8 for entries of a row, from a position on, on shared pages that it does not hold; else 0.

    names: [n] int64, slots as plans name them, inside the pool or not

    R7: the row has given the page back, or was granted none for this position. R8: it was granted another one there.
    An own page in the place of another is left to the positions that its records hold (R4).
    """
    granted, codes = request.slots[first_position : first_position + len(names)], np.zeros_like(names)
    known = np.full(len(names), -1)
    known[: len(granted)] = granted
    strange = np.flatnonzero(names != known)
    pages = names[strange] // ledger.page_size
    for page in np.unique(pages).tolist():
        is_shared = 0 <= page < len(ledger.states) and ledger.states[page] == SHARED
        if not is_shared or page in request.pages:
            continue
        own = strange[pages == page]
        is_foreign = (known[own] >= 0) & (not ledger.had(page, request.request_id))
        codes[own] = np.where(is_foreign, CODE_BITS["R8"], CODE_BITS["R7"])
    return codes
