"""Entries that were written again after their page was saved: told when the page comes back, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvcanary.transfers.stale_snapshots import LeftRecords, Outdated
from kvcanary_kernels.record.layout import CHAIN, REQUEST_GENERATION, STEP_SITE, TOKEN_POSITION

SIZE, FINAL, GRANT = 4, 7, 3
PAGE = 2  # the second of its row: positions 4 to 7, slots 8 to 11
POOL = SimpleNamespace(pool_id=0, base=0, view=SimpleNamespace(slot_map=None))


def records(generation: int = GRANT) -> np.ndarray:
    table = np.zeros((16, 8), np.uint64)
    table[8:12, TOKEN_POSITION] = np.arange(4, 8) << 32 | 50
    table[8:12, CHAIN], table[8:12, REQUEST_GENERATION], table[8:12, STEP_SITE] = 9, generation << 32 | 1, 5
    return table


def manager_state(holder: bool = True, generation: int = GRANT) -> LeftRecords:
    row = SimpleNamespace(final_len=lambda pool_id: FINAL)
    ledger = SimpleNamespace(generations=[0, 0, GRANT], holder=lambda page: row if holder else None)
    state = SimpleNamespace(page_size=SIZE, pools_of=lambda group: [POOL])
    return LeftRecords(state, SimpleNamespace(table=records(generation)), ledger)


def come_back(left: LeftRecords, slot: int) -> list[Outdated]:
    """The page was saved, one of its entries was written again in step 6, it left, and comes back as it was saved."""
    saved = left._record_store.table[8:12].copy()
    left.save("group", [PAGE])
    left._record_store.table[slot, CHAIN], left._record_store.table[slot, STEP_SITE] = 10, 6
    left.leave("group", [PAGE])
    return left.outdated(POOL, [PAGE], saved)


def test_a_final_entry_that_was_written_again_is_told():
    """Where it lies, at which position, and when it was written last; once."""
    left = manager_state()
    assert come_back(left, 9) == [Outdated(POOL, 1, 9, 5, 6)]
    assert left.outdated(POOL, [PAGE], records()[8:12]) == []


@pytest.mark.parametrize(("holder", "count"), [(True, 0), (False, 1)])
def test_what_is_not_final_may_be_older(holder, count):
    """A node that was rejected, behind the row's final entries; on a page that a cache alone has, all are final."""
    assert len(come_back(manager_state(holder), 11)) == count


def test_what_an_earlier_grant_wrote_is_not_missed():
    """It was nobody's when the page left."""
    assert come_back(manager_state(generation=GRANT - 1), 9) == []


def test_a_page_that_was_not_saved_is_not_looked_at():
    """A window that slides gives up pages that never come back: nothing is kept for them."""
    left = manager_state()
    left.leave("group", [PAGE])
    assert left.outdated(POOL, [PAGE], records()[8:12] * 0) == []
    left.save("group", [PAGE + 1])
    left.leave("group", [PAGE])
    assert left._left == {}
