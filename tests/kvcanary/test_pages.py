"""Pages: which event is legal in which state, the arrays that say what is true, and who may write."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from kvcanary import CanaryConfig, CanaryManager
from kvcanary.errors import LifetimeError, PageStateError
from kvcanary.ledger.page_history import FEW, HISTORY_EVENTS, PageHistory, phrase
from kvcanary.ledger.page_states import EVENTS, STATE_NAMES, Pages
from kvcanary.native.layout import FINAL
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import NO_OWNER, SHARED_OWNER

# By event one column a state, in the order of their numbers: the number of the state that follows, or - .
# states:             FREE, QUARANTINED, NEVER_WRITTEN, LOADING, LOAD_FAILED, RESERVED, WRITTEN, COMMITTED, SHARED
LEGAL = """
granted               5 - - - - - - - -
set aside             2 - - - - - - - -
copied                6 - - - - - - - -
written               - - - - 6 6 6 - -
committed             - - - - - - 7 7 -
marked loading        - - 3 - 3 - - - -
loaded                - - - 6 - - - - -
marked load-failed    - - 4 4 - - - - -
restored              - - 6 - - 6 - - -
published             - - - - - - - 8 8
forked                - - - - - - 8 8 8
acquired              - - - - - - - - 8
released              - - - - - - - - 8
taken back            - - - - - - - - 6
freed                 - - 0 - 0 0 0 0 0
evicted               - - - - - - - - 0
taken away            0 0 0 0 0 0 0 0 0
quarantined           1 - - - - - - - -
left quarantine       - 0 - - - - - - -
"""
TABLE = {line[:22].strip(): line[22:].split() for line in LEGAL.strip().splitlines()}
CASES = [(event, state) for event in TABLE for state in range(9)]


def make_pages(state: int = record.FREE) -> Pages:
    """Ten pages, page 0 is null; all others are in one state."""
    pages = Pages(10, 1)
    pages.states[1:] = state
    return pages


def at(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int64)


def test_the_table_knows_all_events_and_states():
    """No event and no state is missing here or there."""
    assert set(TABLE) == set(EVENTS)
    assert list(STATE_NAMES) == list(range(9))
    assert all(getattr(record, name) == state for state, name in STATE_NAMES.items())


@pytest.mark.parametrize(("event", "state"), CASES)
def test_every_event_in_every_state(event, state):
    """A legal event leads to the next state; an illegal one names page, state, event and remedy and changes nothing."""
    pages, after = make_pages(state), TABLE[event][state]
    if after != "-":
        pages.advance(event, at(3, 4), step=5, request_id="only")
        assert pages.states[[2, 3, 4, 5]].tolist() == [state, int(after), int(after), state]
        return
    pages.states[3] = next(number for number, legal in enumerate(TABLE[event]) if legal != "-")
    before = pages.states.copy()
    with pytest.raises(PageStateError) as caught:
        pages.advance(event, at(3, 4), step=5, request_id="only")
    error, words = caught.value, str(caught.value)
    assert (error.page, error.state, error.event) == (4, STATE_NAMES[state], event)
    assert words.startswith("page 4 must be ")
    assert phrase(event, None) in words
    assert f", it is {STATE_NAMES[state]}: " in words
    assert words.endswith(EVENTS[event].remedy)
    assert pages.states.tolist() == before.tolist()
    assert pages.history.of(3) == ()


def test_the_words_of_a_refusal_name_the_last_event():
    """Who did what last, in which step and on which line, is what a double free is hunted with."""
    pages = Pages(10, 1)
    pages.advance("granted", at(3), step=1, request_id="a", uid=7)
    pages.advance("freed", at(3), step=4, request_id="a")
    with pytest.raises(PageStateError) as caught:
        pages.advance("freed", at(3), step=5, request_id="a")
    [last] = pages.history.of(3)[-1:]
    assert str(caught.value) == (
        "page 3 must be NEVER_WRITTEN, LOAD_FAILED, RESERVED, WRITTEN, COMMITTED or SHARED to be freed by 'a', "
        f"it is FREE (freed by 'a' at step 4, {last.place}): free a page once, and never while it loads"
    )


def test_every_grant_and_every_free_begins_a_generation():
    """Records of an earlier grant never fit a later one, and 0 is never granted, after 32 bits of them neither."""
    pages = Pages(10, 1)
    pages.generations[4] = (1 << 32) - 2
    seen = []
    for _ in range(2):
        pages.advance("granted", at(3, 4), step=1, request_id="a", uid=7)
        seen.append(pages.generations[[3, 4]].tolist())
        pages.advance("freed", at(3, 4), step=1, request_id="a")
        seen.append(pages.generations[[3, 4]].tolist())
    assert seen == [[1, (1 << 32) - 1], [2, 1], [3, 2], [4, 3]]


def test_numbers_are_checked():
    """Pages outside the pool, null pages and repeated pages are no event's."""
    pages = Pages(10, 2)
    assert pages.numbers([]).tolist() == []
    assert pages.numbers((9, 2)).dtype == np.int64
    for wrong in ([2, 1], [10], [-1, 3]):
        with pytest.raises(LifetimeError, match=r"page must be in \[2, 10\), got (1|10|-1): null pages"):
            pages.numbers(wrong)
    with pytest.raises(LifetimeError, match="got page 4 twice"):
        pages.numbers([3, 4, 4])


# who may write


def world() -> Pages:
    """One page in every situation: of uid 7 in all its private states, of uid 8, shared, quarantined, free."""
    pages = Pages(12, 1)
    for page, state in enumerate((record.RESERVED, record.WRITTEN, record.LOAD_FAILED), 1):
        pages.advance("granted", at(page), step=0, request_id="a", uid=7)
        pages.states[page] = state
    pages.advance("granted", at(4, 6, 7, 9), step=0, request_id="a", uid=7)
    pages.advance("set aside", at(5), step=0, request_id="a", uid=7)
    pages.wrote(at(4, 7, 9))
    pages.advance("committed", at(4, 7), 0, "a")
    pages.advance("marked loading", at(5), 0, "a")
    pages.advance("freed", at(6), 0, "a")
    pages.advance("set aside", at(6), step=0, request_id="a", uid=7)
    pages.advance("published", at(7), 0, "a")
    pages.advance("granted", at(8), step=0, request_id="b", uid=8)
    pages.advance("freed", at(9), 0, "a")
    pages.advance("quarantined", at(9), 0)
    return pages


@pytest.mark.parametrize(
    ("page", "code"),
    [(1, None), (2, None), (3, None), (4, "W8"), (5, "W8"), (6, "W8"), (7, "W3"), (8, "W2"), (9, "W7"), (10, "W2")],
)
def test_a_write_is_judged_by_its_page(page, code):
    """Own and writable is right; final, loading, set aside, shared, foreign, quarantined and free pages have a code."""
    found = world().write_codes(at(1, page, 1), at(7, 7, 7))
    assert found == ({} if code is None else {1: code})


def test_padding_may_write_null_pages_only():
    """Entries of nobody are right on a null page and nowhere else; a live row has no business there."""
    pages = world()
    assert pages.write_codes(at(0, 0), at(NO_OWNER, NO_OWNER)) == {}
    assert pages.write_codes(at(0, 1, 10), at(7, NO_OWNER, NO_OWNER)) == {0: "W2", 1: "W2", 2: "W2"}


def test_no_write_is_right():
    """A forward that writes nothing has no findings."""
    assert world().write_codes(at(), at()) == {}


@pytest.mark.parametrize("seed", range(5))
def test_write_codes_agree_with_the_plain_rules(seed):
    """Random entries get the codes that the arrays of states and owners give one by one."""
    rng, pages = random.Random(seed), world()
    entries = [(rng.randrange(1, 12), rng.choice((7, 8, 9))) for _ in range(200)]
    expected = {}
    for entry, (page, uid) in enumerate(entries):
        state, owner = pages.states[page], pages.owners[page]
        if state == record.QUARANTINED:
            expected[entry] = "W7"
        elif owner == SHARED_OWNER:
            expected[entry] = "W3"
        elif owner != uid:
            expected[entry] = "W2"
        elif state not in (record.RESERVED, record.WRITTEN, record.LOAD_FAILED):
            expected[entry] = "W8"
    found = pages.write_codes(at(*(page for page, _ in entries)), at(*(uid for _, uid in entries)))
    assert found == expected
    assert set(found.values()) == {"W2", "W3", "W7", "W8"}


def test_what_was_written_is_known():
    """A forward's writes make pages WRITTEN, those that it may write and no others."""
    pages = world()
    before = pages.states.copy()
    pages.wrote(at(*range(1, 11), 1, 1))
    assert pages.states[[1, 2, 3, 8]].tolist() == [record.WRITTEN] * 4
    others = [0, 4, 5, 6, 7, 9, 10, 11]
    assert pages.states[others].tolist() == before[others].tolist()
    assert pages.write_codes(at(3), at(7)) == {}


# history


def test_history_keeps_the_newest_events():
    """Events of a page are kept up to a bound, newest last, in words that name request and step."""
    pages = Pages(10, 1)
    for step in range(10):
        pages.advance("granted", at(3), step, "only", uid=7)
        pages.advance("freed", at(3), step, "only")
    pages.advance("quarantined", at(3), 12)
    kept = [str(event) for event in pages.history.of(3)]
    assert len(kept) == 8
    assert kept[-3:] == ["granted to 'only' at step 9", "freed by 'only' at step 9", "quarantined at step 12"]


def test_history_keeps_events_of_several_requests():
    """Each page has that of its own request, behind what it had; one without pages has none."""
    history, pages = PageHistory(6), at(4, 1, 3)
    history.add("freed", at(1, 2), 1, "b")
    history.add_all("granted", pages, 2, ["a", "b", "c"], [1, 0, 2])
    reported = [[event[:3] for event in history.of(page)] for page in range(6)]
    freed, site = ("freed", 1, "b"), history.of(4)[0].site
    assert reported == [[], [freed, ("granted", 2, "c")], [freed], [("granted", 2, "c")], [("granted", 2, "a")], []]
    assert site == (__file__, sys._getframe().f_lineno - 4)


@pytest.mark.parametrize("count", [1, FEW - 1, FEW, 40])
def test_history_of_many_pages_at_once_is_that_of_each(count):
    """However many have an event together, and however many each has had."""
    once, each = PageHistory(64), PageHistory(64)
    for step in range(HISTORY_EVENTS + 2):
        pages = np.arange(step, step + count)
        once.add("granted", pages, step, "a")
        for page in pages.tolist():
            each.add("granted", np.array([page]), step, "a")
    found, due = ([[event[:3] for event in history.of(page)] for page in range(64)] for history in (once, each))
    assert found == due


def test_history_knows_the_line_of_the_caller(make_engine):
    """The call site is the first line outside the package, however deep inside the event is written down."""
    manager = CanaryManager(CanaryConfig(seed=7), [pool.view for pool in make_engine().pools.values()])
    manager.arm()
    manager.admit("only", [1, 2, 3])
    line = sys._getframe().f_lineno + 1
    manager.on_alloc("only", [1])
    [event] = manager.session.ledger.history.of(1)
    assert event.site == (__file__, line)
    assert event.place == f"test_pages.py:{line}"


def test_the_documented_table_is_the_table(pytestconfig):
    """docs/lifetimes.md lists every event with the states before and after it, and no other."""
    page = (pytestconfig.rootpath / "docs/lifetimes.md").read_text()
    lines = page.partition("## States and events")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    documented = {event: dict.fromkeys(before.split(", "), after) for event, before, after, _ in cells}
    assert documented == {
        name: {STATE_NAMES[before]: STATE_NAMES[after] for before, after in event.after.items()}
        for name, event in EVENTS.items()
    }


def test_a_page_keeps_its_newest_events_in_their_order():
    """However often pages had others together; one that does not exist has none."""
    history = PageHistory(5)
    for step in range(HISTORY_EVENTS + 3):
        history.add("granted", np.array([1, 3]), step, "a")
        history.add("freed", np.array([3]), step, None)
    last = HISTORY_EVENTS + 3
    assert [(event.kind, event.step) for event in history.of(1)] == [("granted", step) for step in range(3, last)]
    steps = range(last - HISTORY_EVENTS // 2, last)
    assert [(event.kind, event.step) for event in history.of(3)] == [
        event for step in steps for event in (("granted", step), ("freed", step))
    ]
    assert (history.of(0), history.of(5), history.of(-1)) == ((), (), ())
    history.add("freed", np.array([0]), last, None)
    assert [event.step for event in history.of(0)] == [last]


def test_what_a_loop_has_marked_is_told_though_others_were_written_since():
    """As when the host is interrupted between the loop and its telling."""
    pages = make_pages(record.RESERVED)
    pages.changes()
    pages._fresh[0], pages.final_struct[FINAL.num_fresh] = 4, 1
    pages.wrote(at(3))
    pages.record_final_pages(1, str)
    assert sorted(pages.changes().tolist()) == [3, 4]
