"""Lifetimes: sharing, forks, loads and quarantine, each alone, and all of them at random against a small model."""

from __future__ import annotations

import numpy as np
import pytest

from kvcanary.errors import LifetimeError, PageOwnerError, PageReferenceError, PageStateError
from kvcanary.ledger.ledger import Ledger
from kvcanary.ledger.page_states import STATE_NAMES
from kvcanary_kernels.record.layout import NO_OWNER, SHARED_OWNER, make_keys

KEYS = make_keys(7, 1, 4)
SIZE = 4


def make_ledger(*names: str, num_pages: int = 12) -> Ledger:
    """Pages of 4 slots, page 0 null, and requests without pages."""
    ledger = Ledger(num_pages, SIZE, 1, KEYS, [("target", 0)])
    for name in names:
        ledger.admit(name, range(100), 0)
    return ledger


def with_row(ledger: Ledger, name: str, pages: list[int], final: int) -> Ledger:
    """The request was granted these pages, has written them all, and the first `final` are final."""
    ledger.grant(name, pages, 1)
    ledger.pages.wrote(np.array(pages))
    ledger.commit(name, final * SIZE, 2)
    return ledger


def states(ledger: Ledger, *pages: int) -> list[str]:
    return [STATE_NAMES[int(ledger.states[page])] for page in pages]


def last_events(ledger: Ledger, page: int, count: int = 2) -> list[str]:
    return [str(event) for event in ledger.pages.history.of(page)[-count:]]


# what is final


def test_whole_pages_become_final():
    """A commit makes the pages final that lie wholly in it; the page with its end stays writable."""
    ledger = with_row(make_ledger("a"), "a", [5, 3, 7], final=0)
    ledger.commit("a", 2 * SIZE - 1, 3)
    assert states(ledger, 5, 3, 7) == ["COMMITTED", "WRITTEN", "WRITTEN"]
    ledger.commit("a", 3 * SIZE, 4)
    assert states(ledger, 5, 3, 7) == ["COMMITTED"] * 3


def test_what_was_not_written_is_not_final():
    """Entries that nobody wrote or that are still loading cannot be committed, nor can more than the row holds."""
    ledger = make_ledger("a")
    ledger.grant("a", [5], 1, for_load=True)
    ledger.grant("a", [3], 1)
    with pytest.raises(PageStateError, match=r"page 5 must be WRITTEN or COMMITTED to be committed by 'a'"):
        ledger.commit("a", SIZE, 2)
    ledger.load_begin("a", [5], 2)
    with pytest.raises(PageStateError, match=r"it is LOADING .*: commit only what was written or loaded"):
        ledger.commit("a", SIZE, 2)
    with pytest.raises(LifetimeError, match="must hold what it commits, got 12 entries and a row of 2 pages of 4"):
        ledger.commit("a", 3 * SIZE, 2)


# a prefix cache


def test_a_published_page_is_everybodys():
    """Who shares a page keeps a reference to it; its owner is nobody any more, its generation stays."""
    ledger = with_row(make_ledger("a"), "a", [5, 3], final=1)
    generation = ledger.generations[5]
    ledger.share("a", [5], 3)
    assert states(ledger, 5, 3) == ["SHARED", "WRITTEN"]
    assert (ledger.owners[5], ledger.refcounts[5], ledger.generations[5]) == (SHARED_OWNER, 1, generation)
    assert ledger.owner_of(5) is None
    assert ledger.holders(5) == ("a",)


def test_a_cache_hit_takes_references_and_a_free_gives_them_back():
    """Acquired pages are the head of the row under the grant that they have; the cache keeps them when all are gone."""
    ledger = with_row(make_ledger("a", "b"), "a", [5, 3], final=2)
    ledger.share("a", [5, 3], 3)
    generations = ledger.generations.copy()
    ledger.acquire("b", [5, 3], 4)
    ledger.grant("b", [8], 4)
    request = ledger.request("b")
    assert (request.pages, request.final_pages) == ([5, 3, 8], 2)
    assert memoryview(request.row).cast("q").tolist() == [20, 21, 22, 23, 12, 13, 14, 15, 32, 33, 34, 35]
    assert ledger.refcounts[[5, 3, 8]].tolist() == [2, 2, 1]
    ledger.free("a", [5, 3], 5)
    ledger.free("b", [8, 3, 5], 6)
    assert states(ledger, 5, 3, 8) == ["SHARED", "SHARED", "FREE"]
    assert ledger.refcounts[[5, 3]].tolist() == [0, 0]
    assert ledger.generations[[5, 3]].tolist() == generations[[5, 3]].tolist()


def test_evicted_pages_are_free():
    """A cache gives up what no row names: a new generation, nobody's page."""
    ledger = with_row(make_ledger("a", "b"), "a", [5], final=1)
    ledger.share("a", [5], 3)
    ledger.acquire("b", [5], 4)
    ledger.free("a", [5], 5)
    with pytest.raises(PageReferenceError, match=r"page 5 must have no reference .* it has 1 \(b\)") as caught:
        ledger.evict([5], 6)
    assert (caught.value.page, caught.value.refcount) == (5, 1)
    ledger.free("b", [5], 6)
    generation = ledger.generations[5]
    ledger.evict([5], 7)
    assert (ledger.owners[5], ledger.generations[5]) == (NO_OWNER, generation + 1)
    ledger.grant("b", [5], 8)


def test_a_hit_on_a_freed_page_is_refused():
    """A prefix tree that points at a page that was evicted, or freed by its request, learns who freed it and when."""
    ledger = with_row(make_ledger("a", "b"), "a", [5], final=1)
    ledger.free("a", [5], 3)
    with pytest.raises(PageStateError, match=r"it is FREE \(freed by 'a' at step 3, .*\): drop it from"):
        ledger.acquire("b", [5], 4)


@pytest.mark.parametrize("event", ["written", "reserved", "set aside", "loading", "load-failed"])
def test_only_final_pages_are_published(event):
    """What may still be written, or was never written or loaded, is not for others."""
    ledger = make_ledger("a")
    ledger.grant("a", [5], 1, for_load=event in ("set aside", "loading", "load-failed"))
    if event == "written":
        ledger.pages.wrote(np.array([5]))
    if event in ("loading", "load-failed"):
        ledger.load_begin("a", [5], 1)
    if event == "load-failed":
        ledger.load_fail("a", [5], 1)
    with pytest.raises(PageStateError, match="page 5 must be COMMITTED or SHARED to be published by 'a'"):
        ledger.share("a", [5], 2)


def test_only_pages_of_the_row_are_published():
    """Somebody else's final page is not one's own to share."""
    ledger = with_row(make_ledger("a", "b"), "a", [5], final=1)
    with pytest.raises(PageOwnerError, match="page 5, named by 'b', must be one of the 0 final") as caught:
        ledger.share("b", [5], 2)
    assert (caught.value.page, caught.value.request_id, caught.value.owner) == (5, "b", "a")
    ledger.share("a", [5], 3)
    ledger.free("a", [5], 4)
    with pytest.raises(PageOwnerError, match=r"named by 'b', must be .*, it is in the row of nobody: commit"):
        ledger.share("b", [5], 5)


def test_cached_pages_come_before_granted_ones():
    """A hit is the head of a row, and no row names a page twice."""
    ledger = with_row(make_ledger("a", "b"), "a", [5], final=1)
    ledger.share("a", [5], 3)
    with pytest.raises(PageOwnerError, match="page 5, named by 'a', must be new to its row"):
        ledger.acquire("a", [5], 4)
    ledger.grant("b", [8], 4)
    with pytest.raises(LifetimeError, match="must be the head of the row of 'b': acquire before grant"):
        ledger.acquire("b", [5], 4)


def test_duplicates_of_cached_pages_are_replaced():
    """A row takes the cache's pages for its own of the same tokens; its own are free, places and lengths stay."""
    ledger = with_row(make_ledger("a", "b"), "a", [5, 3], final=2)
    ledger.share("a", [5, 3], 3)
    with_row(ledger, "b", [7, 8, 9], final=2)
    ledger.deduplicate("b", [7, 8], [5, 3], 4)
    request = ledger.request("b")
    assert (request.pages, request.final_pages) == ([5, 3, 9], 2)
    assert states(ledger, 7, 8, 5) == ["FREE", "FREE", "SHARED"]
    assert {page: int(count) for page, count in enumerate(ledger.refcounts) if count} == {3: 2, 5: 2, 9: 1}
    assert last_events(ledger, 5) == ["published by 'a' at step 3", "acquired by 'b' at step 4"]
    assert last_events(ledger, 7, 1) == ["freed by 'b' at step 4"]
    with pytest.raises(LifetimeError, match="each page must have one that replaces it, got 1 and 0 pages"):
        ledger.deduplicate("b", [9], [], 5)
    ledger.commit("b", 3 * SIZE, 6)
    with pytest.raises(PageStateError, match="page 2 must be SHARED to be acquired by 'b', it is FREE"):
        ledger.deduplicate("b", [9], [2], 7)
    with pytest.raises(PageOwnerError, match="page 5, named by 'b', must be new to its row"):
        ledger.deduplicate("b", [9], [5], 7)


def test_a_duplicate_that_others_hold_too_is_released():
    """A page that a fork shares leaves the row, and is its other holder's alone again."""
    ledger = with_row(make_ledger("a", "b", "c"), "a", [5], final=1)
    ledger.share("a", [5], 3)
    with_row(ledger, "b", [7], final=1)
    ledger.fork("b", "c", [7], 3)
    ledger.deduplicate("b", [7], [5], 4)
    reported = ["released by 'b' at step 4", "taken back by 'c' at step 4", "committed by 'c' at step 4"]
    assert last_events(ledger, 7, 3) == reported


def test_an_event_of_no_page_changes_nothing():
    """A free of nothing is legal, and the row stays."""
    ledger = with_row(make_ledger("a"), "a", [5, 3], final=1)
    ledger.free("a", [], 3)
    assert (ledger.request("a").pages, last_events(ledger, 5, 1)) == ([5, 3], ["committed by 'a' at step 2"])


# forks


def test_a_fork_shares_and_a_write_needs_a_copy():
    """Both rows name the pages; the one that writes gets its own tail, the other has the old one alone again."""
    ledger = with_row(make_ledger("a", "b"), "a", [5, 3], final=1)
    ledger.fork("a", "b", [5, 3], 3)
    uid = ledger.request("a").uid
    assert states(ledger, 5, 3) == ["SHARED", "SHARED"]
    assert ledger.pages.write_codes(np.array([3]), np.array([uid])) == {0: "W3"}
    generation = ledger.generations[3]
    ledger.copy_on_write("b", 3, 9, 4)
    assert last_events(ledger, 3) == ["released by 'b' at step 4", "taken back by 'a' at step 4"]
    assert last_events(ledger, 9, 1) == ["granted as a copy to 'b' at step 4"]
    assert ledger.request("b").pages == [5, 9]
    assert [ledger.owner_of(page) for page in (5, 3, 9)] == [None, "a", "b"]
    assert states(ledger, 5, 3, 9) == ["SHARED", "WRITTEN", "WRITTEN"]
    assert ledger.generations[3] == generation
    assert ledger.pages.write_codes(np.array([3]), np.array([uid])) == {}


def test_pages_of_a_fork_end_with_its_last_request():
    """No cache holds them: with one request left they are private, final where that row says so, and then free."""
    ledger = with_row(make_ledger("a", "b"), "a", [5, 3], final=1)
    ledger.fork("a", "b", [5, 3], 3)
    ledger.free("a", [3, 5], 4)
    assert states(ledger, 5, 3) == ["COMMITTED", "WRITTEN"]
    assert ledger.owner_of(5) == "b"
    ledger.free("b", [5, 3], 5)
    assert states(ledger, 5, 3) == ["FREE", "FREE"]


def test_the_open_tail_of_a_fork_is_not_published():
    """A shared page that is not final is no page for a cache, and a cache holds no page of a fork unasked."""
    ledger = with_row(make_ledger("a", "b", "c"), "a", [5, 3], final=1)
    ledger.fork("a", "b", [5, 3], 3)
    with pytest.raises(PageOwnerError, match="page 3, named by 'b', must be one of the 1 final pages of its row"):
        ledger.share("b", [5, 3], 4)
    with pytest.raises(PageReferenceError, match="page 5 must be held by a prefix cache, only rows hold it"):
        ledger.acquire("c", [5], 4)
    ledger.share("b", [5], 4)
    ledger.acquire("c", [5], 5)


def test_a_fork_takes_a_head_to_an_empty_row():
    """Neither a middle part nor a row that has pages already."""
    ledger = with_row(make_ledger("a", "b"), "a", [5, 3], final=1)
    with pytest.raises(LifetimeError, match="a fork must take the head of the row of 'a' to the empty row of 'b'"):
        ledger.fork("a", "b", [3], 3)
    ledger.grant("b", [9], 3)
    with pytest.raises(LifetimeError, match="got 1 pages and 1 in the other row"):
        ledger.fork("a", "b", [5], 3)


def test_a_final_page_is_copied_only_at_the_end():
    """What has final pages behind it is not written again, so nobody needs a copy; private pages need none either."""
    ledger = with_row(make_ledger("a", "b"), "a", [5, 3, 7], final=2)
    ledger.fork("a", "b", [5, 3], 3)
    with pytest.raises(LifetimeError, match="page 5 is number 0 of 2 in the row of 'b'"):
        ledger.copy_on_write("b", 5, 9, 4)
    with pytest.raises(PageStateError, match="page 7 must be SHARED to be released by 'a', it is WRITTEN"):
        ledger.copy_on_write("a", 7, 9, 4)
    ledger.copy_on_write("b", 3, 9, 4)
    assert ledger.request("b").final_pages == 1


# loads


def test_a_load_has_a_beginning_and_an_end():
    """Until it has ended its pages are neither written nor freed nor loaded again."""
    ledger = make_ledger("a")
    ledger.grant("a", [5], 1, for_load=True)
    uid = np.array([ledger.request("a").uid])
    assert (states(ledger, 5), ledger.pages.write_codes(np.array([5]), uid)) == (["NEVER_WRITTEN"], {0: "W8"})
    ledger.load_begin("a", [5], 2)
    assert (states(ledger, 5), ledger.pages.write_codes(np.array([5]), uid)) == (["LOADING"], {0: "W8"})
    for event in (ledger.load_begin, ledger.restore, ledger.free):
        with pytest.raises(PageStateError, match="it is LOADING"):
            event("a", [5], 3)
    ledger.load_end("a", [5], 4)
    assert (states(ledger, 5), ledger.pages.write_codes(np.array([5]), uid)) == (["WRITTEN"], {})
    with pytest.raises(PageStateError, match="page 5 must be LOADING to be loaded by 'a', it is WRITTEN"):
        ledger.load_end("a", [5], 5)


def test_a_failed_load_is_written_or_loaded_again():
    """Its pages are not final, and may be computed, tried again, or freed."""
    ledger = make_ledger("a")
    ledger.grant("a", [5, 6, 7], 1, for_load=True)
    ledger.load_begin("a", [5, 6, 7], 2)
    ledger.load_fail("a", [5, 6, 7], 3)
    assert states(ledger, 5, 6, 7) == ["LOAD_FAILED"] * 3
    ledger.pages.wrote(np.array([5]))
    ledger.load_begin("a", [6], 4)
    ledger.free("a", [7], 4)
    assert states(ledger, 5, 6, 7) == ["WRITTEN", "LOADING", "FREE"]


def test_a_load_over_final_pages_is_refused():
    """A loader that rounds down the length of a hit would write pages that others read."""
    ledger = with_row(make_ledger("a"), "a", [5, 3], final=2)
    ledger.share("a", [5], 3)
    for page, state in ((5, "SHARED"), (3, "COMMITTED")):
        with pytest.raises(PageStateError, match=f"it is {state} .*: load only into pages that were granted with"):
            ledger.load_begin("a", [page], 4)


def test_a_load_into_pages_that_forwards_may_write_is_refused():
    """Between such a grant and the load nothing would tell a forward that writes, or reads, what is still to come."""
    ledger = make_ledger("a")
    ledger.grant("a", [5], 1)
    with pytest.raises(PageStateError, match=r"must be NEVER_WRITTEN or LOAD_FAILED to be marked loading .* RESERVED"):
        ledger.load_begin("a", [5], 2)


def test_a_load_into_a_foreign_page_is_refused():
    """Loads name pages of the request's own row."""
    ledger = make_ledger("a", "b")
    ledger.grant("a", [5], 1, for_load=True)
    with pytest.raises(PageOwnerError, match=r"page 5, named by 'b', must be in its row .* of 'a'"):
        ledger.load_begin("b", [5], 2)


def test_restored_pages_are_written():
    """What was put away and is back at once may be committed."""
    ledger = make_ledger("a")
    ledger.grant("a", [5], 1)
    ledger.restore("a", [5], 2)
    ledger.commit("a", SIZE, 3)
    assert states(ledger, 5) == ["COMMITTED"]


# quarantine


def test_freed_pages_wait():
    """Pages leave their quarantine after so many steps, the longest waiting first, and are not granted before."""
    ledger = make_ledger("a")
    ledger.quarantine([5], 10)
    ledger.quarantine([3, 7], 12)
    with pytest.raises(PageStateError, match="page 3 must be FREE to be granted to 'a', it is QUARANTINED"):
        ledger.grant("a", [3], 12)
    assert ledger.leave_quarantine(13, 4) == []
    assert ledger.leave_quarantine(15, 4) == [5]
    assert ledger.leave_quarantine(16, 4) == [3, 7]
    assert ledger.leave_quarantine(99, 4) == []
    ledger.grant("a", [3], 16)


def test_quarantine_shrinks_under_pressure():
    """As many pages as are needed leave early, but none before the least number of steps."""
    ledger = make_ledger("a")
    ledger.quarantine([5, 6, 7], 10)
    ledger.quarantine([8], 12)
    assert ledger.leave_quarantine(11, 4, wanted=2, least=2) == []
    assert ledger.leave_quarantine(12, 4, wanted=2, least=2) == [5, 6]
    assert ledger.leave_quarantine(13, 4, wanted=9, least=2) == [7]
    assert states(ledger, 5, 8) == ["FREE", "QUARANTINED"]


# what is recounted


def test_an_audit_counts_references_in_rows():
    """A row that was changed behind the ledger's back is told with both counts."""
    ledger = with_row(make_ledger("a"), "a", [5, 3], final=1)
    ledger.rows.audit()
    ledger.request("a").pages.append(7)
    with pytest.raises(PageReferenceError, match=r"page 7 must have a reference for each row .* 0 and 1 rows"):
        ledger.rows.audit()


def test_an_audit_compares_the_prefix_cache():
    """A tree that points at a free page, or forgot one that it holds, is told with the page's last event."""
    ledger = with_row(make_ledger("a"), "a", [5, 3], final=2)
    ledger.share("a", [5, 3], 2)
    ledger.rows.audit(cached=[3, 5])
    with pytest.raises(PageReferenceError, match="it does not name page 3 and holds it, last published by 'a'"):
        ledger.rows.audit(cached=[5])
    ledger.free("a", [5, 3], 3)
    ledger.evict([3], 4)
    with pytest.raises(PageReferenceError, match="it names page 3 and does not hold it, last evicted at step 4"):
        ledger.rows.audit(cached=[5, 3])
