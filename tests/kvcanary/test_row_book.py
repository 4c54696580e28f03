"""Requests and their rows without a pool: slots of positions, who holds a page, what a refusal says."""

from __future__ import annotations

import ctypes
from array import array

import numpy as np
import pytest

from kvcanary.errors import LifetimeError, PageOwnerError, PageReferenceError, PageStateError
from kvcanary.ledger.ledger import Judged, Ledger
from kvcanary.ledger.request_ids import digest
from kvcanary.ledger.request_state import LEAST_ROOM, RequestState, UncollectedStep
from kvcanary.ledger.requests import NO_PAGE, Batch
from kvcanary.ledger.step_book import in_a_row
from kvcanary.native.layout import FINAL, NOWHERE, REQUEST, ROW_CHAIN, ROWS, RUN
from kvcanary_kernels.record.layout import COMMITTED, RESERVED, WRITTEN, chain_root, make_keys

KEYS = make_keys(7, 1, 4)
SIZE = 4


def make_ledger(page_size: int = SIZE, num_pages: int = 12) -> Ledger:
    """Two pools, the second one token further and one entry ahead; page 0 null; `a` has a row of pages 5, 3, 7."""
    ledger = Ledger(num_pages, page_size, 1, KEYS, [("target", 0), ("draft", 1, 1)])
    ledger.admit("a", range(100), 0)
    ledger.grant("a", [5, 3, 7], 1)
    return ledger


def said(error: type[LifetimeError], call, *arguments: object) -> LifetimeError:
    with pytest.raises(error) as caught:
        call(*arguments)
    return caught.value


# rows


def test_the_slots_of_a_range_are_those_that_were_granted():
    """Half-open, in row order; holes are left out, and so is what lies behind the row."""
    ledger = make_ledger()
    request = ledger.request("a")
    assert ledger.slots(request, 2, 6) == [22, 23, 12, 13]
    ledger.free("a", [3], 2)
    assert ledger.slots(request, 2, 99) == [22, 23, 28, 29, 30, 31]
    assert [ledger.slot(request, position) for position in (3, 4, 7, 8, 12)] == [23, -1, -1, 28, -1]


def test_pages_of_one_slot_are_their_own_slots():
    """Without arithmetic, and without holes."""
    ledger = make_ledger(page_size=1)
    request = ledger.request("a")
    assert ledger.slots(request, 0, 2) == [5, 3]
    ledger.free("a", [5], 2)
    assert ledger.slots(request, 0, 9) == [3, 7]


def test_a_row_is_cut_behind_its_last_page():
    """Freed tail pages leave no hole; the bytes of the row are those of what is left."""
    ledger = make_ledger()
    request = ledger.request("a")
    ledger.free("a", [7], 2)
    assert (request.pages, np.frombuffer(request.row, np.int64).tolist()) == ([5, 3], [*range(20, 24), *range(12, 16)])
    ledger.free("a", [5], 2)
    assert (request.pages, np.frombuffer(request.row, np.int64).tolist()) == (
        [NO_PAGE, 3],
        [*range(-4, 0), *range(12, 16)],
    )


def test_a_move_to_the_end_of_a_row_lengthens_it():
    """By what follows without a gap; what is written already changes nothing, nor do uids that nobody has."""
    ledger = make_ledger()
    request = ledger.request("a")
    request.row_lens[0] = 2
    ledger.rows.note_moved(0, np.array([21, 20]), np.array([1, 0]))
    assert (request.row_lens.tolist(), ledger.states[5]) == ([2, 0], ledger.states[3])
    ledger.rows.note_moved(0, np.array([21, 22, 23, 13, 12]), np.array([1, 4, 9, 3, 2]))
    assert request.row_lens.tolist() == [6, 0]
    assert ledger.states[[5, 3, 7]].tolist() == [6, 6, 5]
    ledger.rows.note_moved(0, np.array([28, 40]), np.array([9, 9]))
    assert (request.row_lens.tolist(), ledger.states[10]) == ([6, 0], 0)
    ledger.rows.note_moved(0, np.array([14, 28, 15, 28]), np.array([6, 8, 7, 8]))  # a page comes again, and an entry
    assert request.row_lens.tolist() == [9, 0]


def test_rows_reach_a_position_when_all_do():
    """The shortest row decides."""
    ledger = make_ledger()
    ledger.admit("b", [1], 0)
    ledger.request("a").row_lens[0], ledger.request("b").row_lens[0] = 5, 3
    assert (ledger.rows.reach(0, 2), ledger.rows.reach(0, 3), ledger.rows.reach(1, 0)) == (True, False, False)


def test_a_page_has_its_owner_or_its_holders():
    """A private page its owner, a shared one whoever's rows name it, a cached one nobody."""
    ledger = make_ledger()
    ledger.pages.wrote(np.array([5, 3, 7]))
    a, b = ledger.request("a"), ledger.admit("b", [1], 0)
    assert (ledger.owner_of(5), ledger.holders(5), ledger.holder(5)) == ("a", ("a",), a)
    ledger.fork("a", "b", [5], 2)
    assert (ledger.owner_of(5), ledger.holders(5), ledger.holder(5)) == (None, ("a", "b"), a)
    ledger.free("a", [5], 3)
    assert (ledger.owner_of(5), ledger.holder(5), ledger.holder(9)) == ("b", b, None)


def test_a_page_that_is_not_in_the_row_is_named_with_its_rows():
    """Whose page it is, and what to do: in the words and in the fields."""
    ledger = make_ledger()
    ledger.admit("b", [1], 0)
    error = said(PageOwnerError, ledger.free, "b", [3], 2)
    assert str(error) == (
        "page 3, named by 'b', must be in its row to be freed, it is in the row of 'a': name only pages of the row"
    )
    assert (error.page, error.request_id, error.owner) == (3, "b", "a")


def test_a_cache_takes_pages_that_are_final():
    """In state and in the row; a hit comes before any grant."""
    ledger = make_ledger()
    ledger.pages.wrote(np.array([5, 3, 7]))
    ledger.commit("a", 4, 2)
    with pytest.raises(PageStateError, match="page 3 must be COMMITTED or SHARED to be published by 'a'"):
        ledger.share("a", [3], 2)
    ledger.share("a", [5], 2)
    assert str(said(LifetimeError, ledger.acquire, "a", [5], 3)) == (
        "pages of a cache must be the head of the row of 'a': acquire before grant"
    )


def test_a_row_names_a_page_once():
    """A hit on a page that the row has, and pages that are not final, are refused with the rule."""
    ledger = make_ledger()
    ledger.pages.wrote(np.array([5, 3, 7]))
    ledger.commit("a", 12, 2)
    ledger.share("a", [5, 3, 7], 2)
    error = said(PageOwnerError, ledger.acquire, "a", [3], 3)
    assert (
        str(error) == "page 3, named by 'a', must be new to its row, it is in the row of 'a': a row names a page once"
    )
    ledger.admit("b", [1], 0)
    error = said(PageOwnerError, ledger.share, "b", [7], 3)
    assert str(error) == (
        "page 7, named by 'b', must be one of the 0 final pages of its row, it is in the row of 'a': commit it first"
    )


def test_only_what_a_cache_holds_is_violation_or_evicted():
    """A forked page is shared, but no cache has it."""
    ledger = make_ledger()
    ledger.pages.wrote(np.array([5, 3, 7]))
    ledger.admit("b", [1], 0)
    ledger.fork("a", "b", [5], 2)
    error = said(PageReferenceError, ledger.evict, [5], 3)
    assert str(error) == "page 5 must be held by a prefix cache, only rows hold it: share it first"
    assert (error.page, error.refcount) == (5, 2)


def test_a_page_with_references_is_not_evicted():
    """The count, and who holds it."""
    ledger = make_ledger()
    ledger.pages.wrote(np.array([5, 3, 7]))
    ledger.commit("a", 4, 2)
    ledger.share("a", [5], 2)
    error = said(PageReferenceError, ledger.evict, [5], 3)
    assert str(error) == "page 5 must have no reference to be evicted, it has 1 (a): evict what no row names"
    assert (error.page, error.refcount) == (5, 1)


def test_more_than_the_row_is_not_committed():
    """A length that fills the row exactly is; one page more is not."""
    ledger = make_ledger()
    ledger.pages.wrote(np.array([5, 3, 7]))
    assert str(said(LifetimeError, ledger.commit, "a", 16, 2)) == (
        "request 'a' must hold what it commits, got 16 entries and a row of 3 pages of 4: grant first"
    )
    ledger.commit("a", 12, 2)
    assert ledger.request("a").final_pages == 3


def test_what_is_final_in_every_pool_is_committed():
    """The shortest pool decides; what a forward may still write, or what is not the request's own, is not final."""
    ledger = make_ledger()
    request = ledger.request("a")
    ledger.pages.wrote(np.array([5, 3, 7]))
    request.committed_len, request.row_lens = 12, [12, 7]
    ledger.finalise(request, 2)
    assert request.final_pages == 1
    request.row_lens = [12, 13]
    ledger.finalise(request, 3, committed_len=8)
    assert request.final_pages == 2
    request.owned_len = 11
    ledger.finalise(request, 4)
    assert request.final_pages == 2
    request.owned_len = None
    ledger.finalise(request, 5)
    assert (request.final_pages, ledger.history.of(7)[-1].step) == (3, 5)


def land(ledger: Ledger, *names: str) -> list[int]:
    """One forward of these requests lands; who is left to the rules."""
    batch = ledger.batches[tuple(names)]
    rows, structs = array("q", [0] * (ROWS.size * len(names) + 1)), array("q", bytes(8 * RUN.size))
    structs[RUN.requests], structs[RUN.structs] = batch.loop_arguments
    structs[RUN.rows] = rows.buffer_info()[0]
    for request in batch.requests:
        request.in_flight += 1
    left, place = [], 0
    while (place := ledger.steps.finalise_runs(structs, place)) != NOWHERE:
        left.append(place)
        place += 1
    return left


def test_pages_of_all_rows_are_final_when_a_forward_lands():
    """Those of the request's own length, in every pool; copies of the arrays and histories follow in one go."""
    ledger = make_ledger()
    ledger.admit("b", range(100), 0)
    ledger.grant("b", [2, 4], 1)
    a, b = ledger.known(["a", "b"])
    ledger.pages.wrote(np.array([5, 3, 7, 2, 4]))
    a.committed_len, a.row_lens, a.owned_len = 12, [12, 13], 8
    b.committed_len, b.row_lens = 7, [7, 8]
    ledger.pages.changes()
    assert land(ledger, "a", "b") == []
    assert (a.final_pages, b.final_pages) == (2, 1)
    assert not ledger.pages.changed
    ledger.record_final_pages(4)
    assert ledger.pages.changes().tolist() == [5, 3, 2]
    assert [ledger.history.of(page)[-1][:3] for page in (5, 3, 2)] == [("committed", 4, name) for name in "aab"]
    ledger.record_final_pages(5)
    assert not ledger.pages.changed


def test_what_is_not_quiet_is_left_to_the_rules():
    """A page that nobody wrote, a row that is too short, and more than there is room for; the others are final."""
    ledger = make_ledger(num_pages=12)
    for name, pages in (("b", [2, 4]), ("c", [6]), ("d", [8, 9])):
        ledger.admit(name, range(100), 0)
        ledger.grant(name, pages, 1)
    ledger.pages.wrote(np.array([5, 3, 7, 2, 6, 8, 9]))
    for request in ledger.requests.values():
        request.committed_len, request.row_lens = 8, [8, 9]
    assert land(ledger, "a", "b", "c", "d") == [1, 2]
    assert [request.final_pages for request in ledger.requests.values()] == [2, 0, 0, 2]
    assert ledger.states[[5, 3, 7, 2, 4, 6]].tolist() == [COMMITTED] * 2 + [WRITTEN] * 2 + [RESERVED, WRITTEN]
    with pytest.raises(PageStateError, match="page 4 must be WRITTEN or COMMITTED to be committed by 'b'"):
        ledger.finalise(ledger.request("b"), 2)
    ledger.pages.final_struct[FINAL.room] = 3
    ledger.pages.wrote(np.array([4]))
    assert land(ledger, "b") == [0]
    ledger.record_final_pages(2)
    assert land(ledger, "b") == []


def test_the_last_request_of_a_fork_owns_its_pages_again():
    """Written anew where they were no final pages of its row, committed where they were; the free has its step."""
    ledger = make_ledger()
    ledger.pages.wrote(np.array([5, 3, 7]))
    ledger.commit("a", 4, 2)
    b = ledger.admit("b", [1], 0)
    ledger.fork("a", "b", [5, 3], 3)
    assert b.final_pages == 1
    ledger.free("a", [5, 3, 7], 4)
    assert [ledger.owner_of(page) for page in (5, 3, 7)] == ["b", "b", None]
    assert [(event.kind, event.step, event.request_id) for event in ledger.history.of(5)[-3:]] == [
        ("released", 4, "a"),
        ("taken back", 4, "b"),
        ("committed", 4, "b"),
    ]
    assert [event.kind for event in ledger.history.of(3)[-2:]] == ["released", "taken back"]
    ledger.free("b", [5, 3], 6)
    assert [(ledger.history.of(page)[-1].kind, ledger.history.of(page)[-1].step) for page in (5, 3)] == [
        ("freed", 6)
    ] * 2


# requests


def at(address, count):
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)).tolist()


def test_what_is_known_keeps_its_address_and_makes_room():
    """Tokens and values that a loop has filled stay where room is made for more; the struct stays where it is."""
    known = RequestState(8, [3, 1, 4], [(1 << 63 | 5, 0, 0), (7, 1, 0)], KEYS)
    values_at, count, root = (REQUEST.size + field for field in (ROW_CHAIN.values, ROW_CHAIN.count, ROW_CHAIN.root))
    assert (known.root(0), known.struct[root], len(known.chain(0))) == (1 << 63 | 5, 5 - (1 << 63), 0)
    assert (known.root(1), known.struct[ROW_CHAIN.size + REQUEST.size + ROW_CHAIN.offset]) == (7, 1)
    for first, values in ((0, [7, 8, 9]), (ROW_CHAIN.size, [5, 6])):
        ctypes.memmove(known.struct[first + values_at], np.array(values, np.uint64).ctypes.data, 8 * len(values))
        known.struct[first + count] = len(values)
    where, tokens = known.struct[values_at], list(range(LEAST_ROOM))
    struct = known.at
    known.write(3, tokens[3:-1], 0)
    assert known.struct[values_at] == where
    known.write(LEAST_ROOM - 1, tokens[-1:], 0)
    assert known.struct[values_at] == where
    assert known.at == struct == known.struct.buffer_info()[0]
    known.write(LEAST_ROOM, [1], 0)
    assert (known.struct[values_at] == where, known.at) == (False, struct)
    assert at(known.struct[REQUEST.tokens], LEAST_ROOM + 1) == [3, 1, 4, *tokens[3:], 1]
    assert (known.chain(0).tolist(), known.chain(1).tolist()) == ([7, 8, 9], [5, 6])
    known.write(1, [2, 6], 0)
    assert (at(known.struct[REQUEST.tokens], 3), known.struct[REQUEST.num_tokens]) == ([3, 2, 6], 3)


def test_a_row_is_read_where_it_lies():
    """No copy is made, and nothing has no address."""
    known = RequestState(8, [], [(1, 0, 0)], KEYS)
    for slots in ([40, 41, 42, 43], [], [7]):
        known.row = np.array(slots, np.int64).tobytes()
        assert at(known.struct[REQUEST.row], known.struct[REQUEST.num_row]) == slots


def test_what_the_engine_says_of_a_step_is_what_the_step_has_accepted():
    """Where the device has said something else: the tokens are others, and no chain behind them is known any more."""
    ledger = make_ledger()
    request = ledger.request("a")
    request.uncollected = [UncollectedStep([96, 97], 96, 98), UncollectedStep([98, 99], 98, 100)]
    for pool_id in range(2):
        assert ledger.truth(request, pool_id, 99) is not None
    ledger.book.confirm(request, [96, 97])
    assert [len(request.chain(pool_id)) for pool_id in range(2)] == [99, 99]
    ledger.book.confirm(request, [96, 7])
    assert request.tokens[94:].tolist() == [94, 95, 96, 7, 98, 99]
    assert request.uncollected == [UncollectedStep([96, 7], 96, 98), UncollectedStep([98, 99], 98, 100)]
    assert at(request.struct[REQUEST.tokens], 100) == request.tokens.tolist()
    assert [len(request.chain(pool_id)) for pool_id in range(2)] == [96, 95]


def test_a_request_starts_anew_without_pages():
    """What was committed, written, read and judged is forgotten; its tokens stay."""
    ledger = make_ledger()
    request = ledger.request("a")
    request.committed_len, request.row_lens, request.judged = 4, [4, 5], [Judged(4, 1, 1)] * 2
    request.reads[1].extend_to(4, 1)
    ledger.free("a", [5, 3, 7], 2)
    assert (request.committed_len, request.row_lens.tolist(), request.judged) == (0, [0, 0], [Judged()] * 2)
    assert (request.reads[1].oldest_first(), len(request.tokens)) == ((), 100)


def test_what_a_pool_holds_is_final_up_to_what_was_written():
    """A pool that runs ahead holds one entry more; an earlier length may be asked for."""
    request = make_ledger().request("a")
    request.committed_len, request.row_lens = 6, [8, 6]
    assert (request.most_final(0), request.most_final(1), request.most_final(1, 2)) == (6, 7, 3)
    assert (request.final_len(0), request.final_len(1), request.final_len(0, 2)) == (6, 6, 2)


def test_tokens_since_a_step_are_those_that_came_after_it():
    """Several in one step count together; before the first step all do."""
    ledger = make_ledger()
    request = ledger.request("a")
    for tokens, step in (([1, 2], 4), ([3], 4), ([4.0], 6)):
        ledger.steps.append(Batch([request]), *in_a_row([tokens]), step)
    assert [request.tokens_since(step) for step in (-1, 0, 3, 4, 6)] == [104, 4, 4, 1, 0]
    assert request.tokens[-4:].tolist() == [1, 2, 3, 4]


def test_a_request_is_admitted_with_its_roots():
    """Salt and adapter are in the roots of both pools, and tokens are plain numbers."""
    ledger = make_ledger()
    request = ledger.admit("b", [7.0, 8], 3, "salt", "adapter")
    assert [request.root(pool) for pool in (0, 1)] == [
        chain_root(KEYS, name, "salt", "adapter") for name in ("target", "draft")
    ]
    assert (request.request_id, request.uid, request.tokens.tolist(), request.growth) == (
        "b",
        digest("b", 0),
        [7, 8],
        [(3, 2)],
    )
    assert request.ahead == (0, 1)
    assert str(said(LifetimeError, ledger.admit, "b", [1], 4)) == "request 'b' is admitted already"
    assert str(said(LifetimeError, ledger.known, ["a", "c"])) == "request 'c' is not admitted: call admit() first"
    assert str(said(LifetimeError, ledger.forget, "a")) == "request 'a' still holds 3 pages: free them first"
    ledger.forget("b")
    assert (ledger.name(request.uid), "b" in ledger.requests) == ("b", False)


def test_a_name_of_before_is_remembered():
    """A live request keeps its own uid."""
    ledger = make_ledger()
    uid = ledger.request("a").uid
    ledger.book.uids.remember(77, "old")
    ledger.book.uids.remember(uid, "other")
    assert (ledger.name(77), ledger.name(uid), ledger.name(78)) == ("old", "a", None)


def test_the_quarantine_of_a_ledger_follows_its_pages():
    """Free, then quarantined, then free again; nothing that leaves is no event."""
    ledger = make_ledger()
    ledger.free("a", [5, 3], 2)
    ledger.quarantine([5, 3], 2)
    assert ledger.leave_quarantine(3, 4) == []
    assert ledger.leave_quarantine(6, 4) == [5, 3]
    assert [(event.kind, event.step, event.request_id) for event in ledger.history.of(5)[-2:]] == [
        ("quarantined", 2, None),
        ("left quarantine", 6, None),
    ]
