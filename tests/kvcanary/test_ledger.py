"""The ledger: host truth of requests and pages, and the words with which contradictions are refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcanary import CanaryConfig, CanaryManager, KVCanaryError, KVCorruptionError, LifetimeError
from kvcanary.ledger.ledger import NO_PAGE, Ledger, ReadQueue
from kvcanary.ledger.requests import MOST_BATCHES
from kvcanary.ledger.step_book import in_a_row
from kvcanary_kernels.record.layout import SHARED_OWNER, chain_root, make_keys, mix_host

KEYS = make_keys(7, 1, 4)
ROOTS = (chain_root(KEYS, "target"), chain_root(KEYS, "draft"))
MODULUS = 1 << 64


def make_ledger(num_pages: int = 10, page_size: int = 4) -> Ledger:
    """Two pools, the second one token further; page 0 is null."""
    return Ledger(num_pages, page_size, 1, KEYS, [("target", 0), ("draft", 1)])


def plain_chain(tokens: list[int], root: int) -> int:
    """The chain by its definition: the value before times A, plus the token mixed with its position."""
    value = root
    for position, token in enumerate(tokens):
        value = (value * KEYS.multiplier + mix_host(token, position, KEYS)) % MODULUS
    return value


def refused(call, *arguments: object) -> str:
    """The words with which a call is refused."""
    with pytest.raises(LifetimeError) as caught:
        call(*arguments)
    return str(caught.value)


def test_lifetime_errors_are_runtime_errors_of_the_package():
    """Callers may catch RuntimeError or the base of the package."""
    assert issubclass(LifetimeError, RuntimeError)
    assert issubclass(LifetimeError, KVCanaryError)


def test_requests_that_steps_name_together_are_one_batch():
    """As long as all of them are there; what is made for one event is not kept, and of very many none is."""
    ledger = make_ledger()
    for name in ("one", "two"):
        ledger.admit(name, [5, 6], 0)
    once = ledger.batches.once(("one", "two"))
    assert not ledger.batches
    batch = ledger.batches[("one", "two")]
    assert (once.names, once.requests) == (batch.names, batch.requests)
    assert ledger.batches["one", "two"] is batch is ledger.batches.once(("one", "two"))
    assert refused(ledger.known, ["one", "nobody"]) == "request 'nobody' is not admitted: call admit() first"
    ledger.forget("two")
    assert refused(ledger.known, ["one", "two"]) == "request 'two' is not admitted: call admit() first"
    for count in range(3 * MOST_BATCHES):
        assert len(ledger.batches[tuple(["one"] * count)]) == count
        assert len(ledger.batches) <= MOST_BATCHES


# truth


@pytest.mark.parametrize("seed", range(5))
def test_truth_is_the_chain_by_its_definition(seed):
    """Asked in any order of lengths, both pools' chains are those of a plain loop."""
    rng = random.Random(seed)
    tokens = [rng.randrange(1 << 32) for _ in range(40)]
    ledger = make_ledger()
    request = ledger.admit("only", tokens, 0)
    for _ in range(60):
        length = rng.randrange(1, 40)
        assert ledger.truth(request, 0, length) == plain_chain(tokens[:length], ROOTS[0])
        assert ledger.truth(request, 1, length) == plain_chain(tokens[1 : length + 1], ROOTS[1])


@pytest.mark.parametrize(("roles", "final"), [([("a", 0)], 0), ([("a", 1, 1)], 1), ([("a", 0), ("b", 1, 1)], 0)])
def test_a_page_is_final_when_all_pools_have_filled_it(roles, final):
    """Entries that every pool holds beyond what is committed count, those of some pools do not."""
    ledger = Ledger(10, 4, 1, KEYS, roles)
    request = ledger.admit("a", list(range(9)), step=0)
    ledger.grant("a", [1, 2], step=0)
    ledger.pages.wrote(np.array([1, 2]))
    request.row_lens, request.committed_len = [8] * len(roles), 3
    ledger.finalise(request, step=1)
    assert request.final_pages == final
    request.committed_len = 4
    ledger.finalise(request, step=1)
    assert request.final_pages == 1


def test_truth_follows_appended_tokens():
    """Tokens that are accepted later continue the chain."""
    ledger = make_ledger()
    request = ledger.admit("only", [5, 6], 0)
    assert ledger.truth(request, 0, 2) == plain_chain([5, 6], ROOTS[0])
    ledger.steps.append(ledger.batches[("only",)], *in_a_row([[7, 8]]), 1)
    assert ledger.truth(request, 0, 4) == plain_chain([5, 6, 7, 8], ROOTS[0])


def test_tokens_for_which_there_is_no_room_yet_are_appended_once():
    """Those of every request of the batch, be there room for the others or not."""
    ledger = make_ledger()
    requests, new = [ledger.admit(name, [5, 6], 0) for name in ("few", "many")], [[7], [*range(5000)]]
    for step in (1, 2):
        ledger.steps.append(ledger.batches[("few", "many")], *in_a_row(new), step)
    assert [request.tokens.tolist() for request in requests] == [[5, 6, *tokens, *tokens] for tokens in new]
    assert [request.growth for request in requests] == [[(0, 2), (1, 3), (2, 4)], [(0, 2), (1, 5002), (2, 10_002)]]


def test_truth_is_none_where_a_token_is_not_known():
    """Past the known tokens the host says nothing; the draft pool needs one token more."""
    ledger = make_ledger()
    request = ledger.admit("only", [5, 6], 0)
    assert ledger.truth(request, 0, 3) is None
    assert ledger.truth(request, 1, 2) is None
    assert ledger.truth(request, 1, 1) == plain_chain([6], ROOTS[1])


def test_truth_of_no_entries_is_the_root():
    """Before the first entry stands the root of the pool."""
    ledger = make_ledger()
    request = ledger.admit("only", [5, 6], 0)
    assert ledger.truth(request, 0, 2) != ROOTS[0]
    assert ledger.truth(request, 0, 0) == ROOTS[0]


@pytest.mark.parametrize("place", range(6))
def test_one_other_token_gives_another_chain(place):
    """Whatever token differs, the chain at the end differs."""
    tokens = [3, 1, 4, 1, 5, 9]
    other = [token + (number == place) for number, token in enumerate(tokens)]
    ledger = make_ledger()
    truths = [ledger.truth(ledger.admit(str(row), row, 0), 0, 6) for row in (tokens, other)]
    assert truths[0] != truths[1]


@pytest.mark.parametrize("named", [{"salt": "tenant 1"}, {"adapter": "lora 1"}, {"salt": "lora 1"}])
def test_salt_and_adapter_change_every_chain(named):
    """Equal tokens under another salt or another adapter are another row, in every pool."""
    ledger = make_ledger()
    plain, other = ledger.admit("plain", [1, 2, 3], 0), ledger.admit("other", [1, 2, 3], 0, **named)
    again = ledger.admit("again", [1, 2, 3], 0, **named)
    for pool_id in (0, 1):
        for length in range(3 - pool_id):
            assert ledger.truth(plain, pool_id, length) != ledger.truth(other, pool_id, length)
            assert ledger.truth(again, pool_id, length) == ledger.truth(other, pool_id, length)
        assert other.root(pool_id) == ledger.truth(other, pool_id, 0)


def test_a_salt_is_not_an_adapter():
    """The same word in the other place names another row."""
    ledger = make_ledger()
    assert ledger.admit("a", [1], 0, salt="x").root(0) != ledger.admit("b", [1], 0, adapter="x").root(0)


def test_tokens_since_counts_what_was_appended_after_a_step():
    """Exposure is the tokens of later steps."""
    ledger = make_ledger()
    request = ledger.admit("only", [1, 2, 3], 1)
    ledger.steps.append(ledger.batches[("only",)], *in_a_row([[4]]), 2)
    ledger.steps.append(ledger.batches[("only",)], *in_a_row([[5, 6]]), 4)
    assert [request.tokens_since(step) for step in (0, 1, 2, 3, 4)] == [6, 3, 2, 2, 0]


# requests


def test_admitting_twice_is_refused():
    """A request that runs is not admitted again."""
    ledger = make_ledger()
    ledger.admit("only", [1], 0)
    assert refused(ledger.admit, "only", [1], 0) == "request 'only' is admitted already"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [("request", ()), ("grant", ([1], 0)), ("free", ([1], 0))],
)
def test_an_unknown_request_is_refused(call, arguments):
    """Every event of a request that was not admitted says what to do first."""
    words = refused(getattr(make_ledger(), call), "nobody", *arguments)
    assert words == "request 'nobody' is not admitted: call admit() first"


# pages


def test_a_slot_is_found_through_the_pages_of_a_row():
    """Page i of a row holds its positions, whatever number the page has."""
    ledger = make_ledger()
    request = ledger.admit("only", [1], 0)
    ledger.grant("only", [7, 2], 0)
    assert [ledger.slot(request, position) for position in (0, 3, 4, 7, 8)] == [28, 31, 8, 11, -1]
    assert ledger.slots(request, 2, 6) == [30, 31, 8, 9]


def test_every_grant_and_every_free_begins_a_generation():
    """Records of an earlier grant never fit a later one."""
    ledger = make_ledger()
    ledger.admit("only", [1], 0)
    seen = [ledger.generations[3]]
    for _ in range(3):
        ledger.grant("only", [3], 0)
        seen.append(ledger.generations[3])
        ledger.free("only", [3], 0)
        seen.append(ledger.generations[3])
    assert seen == [0, 1, 2, 3, 4, 5, 6]


def test_generation_0_is_never_granted():
    """After 32 bits of generations the count goes on at 1."""
    ledger = make_ledger()
    ledger.admit("only", [1], 0)
    ledger.generations[3] = (1 << 32) - 1
    ledger.grant("only", [3], 0)
    assert ledger.generations[3] == 1


def test_granting_an_owned_page_is_refused():
    """A page has one owner, and the message names both requests."""
    ledger = make_ledger()
    ledger.admit("first", [1], 0)
    ledger.admit("second", [1], 0)
    ledger.grant("first", [3], 0)
    for name in ("second", "first"):
        words = refused(ledger.grant, name, [4, 3], 1)
        assert words.startswith(f"page 3 must be FREE to be granted to {name!r}, it is RESERVED (granted to 'first' at")
        assert words.endswith(": free it first, and let it leave its quarantine")
        assert ledger.owner_of(4) is None


def test_freeing_twice_is_refused():
    """The second free of a page says who freed it first, when and where."""
    ledger = make_ledger()
    ledger.admit("only", [1], 0)
    ledger.grant("only", [3], 0)
    ledger.free("only", [3], 0)
    words = refused(ledger.free, "only", [3], 4)
    assert "to be freed by 'only', it is FREE (freed by 'only' at step 0, test_ledger.py:" in words
    assert words.endswith(": free a page once, and never while it loads")


def test_freeing_someone_elses_page_is_refused():
    """The message names the owner."""
    ledger = make_ledger()
    ledger.admit("first", [1], 0)
    ledger.admit("second", [1], 0)
    ledger.grant("first", [3], 0)
    words = "page 3, named by 'second', must be in its row to be freed, it is in the row of 'first': "
    assert refused(ledger.free, "second", [3], 0) == words + "name only pages of the row"
    assert ledger.owner_of(3) == "first"


@pytest.mark.parametrize("page", [-1, 0, 10])
def test_a_page_outside_the_pool_is_refused(page):
    """The null page and numbers outside the pool are never granted."""
    ledger = make_ledger()
    ledger.admit("only", [1], 0)
    assert refused(ledger.grant, "only", [page], 0) == (
        f"page must be in [1, 10), got {page}: null pages are never granted or freed, "
        "take them out of the engine's free list"
    )


def test_a_freed_page_leaves_a_hole_in_its_row():
    """Later pages keep their positions when an earlier one goes."""
    ledger = make_ledger()
    request = ledger.admit("only", [1], 0)
    ledger.grant("only", [7, 2], 0)
    ledger.free("only", [7], 1)
    assert request.pages == [NO_PAGE, 2]
    assert (ledger.slot(request, 0), ledger.slot(request, 4)) == (-1, 8)
    assert ledger.slots(request, 2, 6) == [8, 9]


def test_a_request_without_pages_starts_anew():
    """When the last page is back nothing of the row is final any more."""
    ledger = make_ledger()
    request = ledger.admit("only", [1], 0)
    ledger.grant("only", [7, 2], 0)
    request.committed_len, request.row_lens = 5, [5, 4]
    ledger.free("only", [2], 1)
    assert (request.committed_len, request.row_lens.tolist()) == (5, [5, 4])
    ledger.free("only", [7], 1)
    assert (request.pages, request.committed_len, request.row_lens.tolist()) == ([], 0, [0, 0])


@pytest.mark.parametrize(
    ("positions", "before", "length"),
    [(range(8), 0, 8), (range(4, 8), 0, 0), (range(4, 8), 4, 8), (range(2, 7), 3, 7), (range(5), 7, 7)],
)
@pytest.mark.parametrize("is_run", [False, True])
def test_what_is_brought_lengthens_a_row_that_it_follows(positions, before, length, is_run):
    """Whether or not somebody has said that the positions follow one another."""
    ledger = make_ledger()
    request = ledger.admit("only", list(range(8)), 0)
    ledger.grant("only", [7, 2], 0, for_load=True)
    ledger.restore("only", [7, 2], 0)
    request.row_lens = [before, 0]
    where = np.array(positions)
    ledger.rows.note_brought(request, 0, np.array([7, 2])[where // 4] * 4 + where % 4, where, is_run)
    assert request.row_lens.tolist() == [length, 0]


@pytest.mark.parametrize("shared", [7, 2])
def test_what_is_brought_into_pages_of_several_lengthens_no_row(shared):
    """Of a page that is not the row's alone its entries do not count, be it the first or the last."""
    ledger = make_ledger()
    request = ledger.admit("only", list(range(8)), 0)
    ledger.grant("only", [7, 2], 0, for_load=True)
    ledger.restore("only", [7, 2], 0)
    ledger.pages.owners[shared], request.row_lens = SHARED_OWNER, [2, 0]
    where = np.arange(2, 6)  # two entries of each
    ledger.rows.note_brought(request, 0, np.array([7, 2])[where // 4] * 4 + where % 4, where, True)
    assert request.row_lens.tolist() == [2 if shared == 7 else 4, 0]


def test_an_event_names_a_page_once():
    """A page twice in one call is a mistake of the caller, and nothing happens."""
    ledger = make_ledger()
    ledger.admit("only", [1], 0)
    assert (
        refused(ledger.grant, "only", [3, 4, 3], 0) == "an event must name a page once, got page 3 twice: name it once"
    )
    assert (ledger.owner_of(3), ledger.owner_of(4)) == (None, None)


def test_forgetting_a_request_that_holds_pages_is_refused():
    """Nobody would free its pages."""
    ledger = make_ledger()
    ledger.admit("only", [1], 0)
    ledger.grant("only", [3, 4, 5], 0)
    ledger.free("only", [3], 0)
    assert refused(ledger.forget, "only") == "request 'only' still holds 2 pages: free them first"


# the order of re-reading


def test_read_queue_takes_the_oldest_first():
    """Positions that waited longest are taken first, each with the step when it was last good."""
    queue = ReadQueue()
    queue.extend_to(4, 1)
    queue.extend_to(6, 2)
    assert queue.oldest() == 1
    assert queue.take(3, 5) == [(0, 3, 1)]
    assert queue.take(3, 6) == [(3, 4, 1), (4, 6, 2)]
    assert queue.take(3, 7) == [(0, 3, 5)]
    assert queue.oldest() == 6


def test_read_queue_takes_nothing_twice_in_a_step():
    """However many are asked for, a position is looked at once a step."""
    queue = ReadQueue()
    queue.extend_to(4, 1)
    assert queue.take(100, 2) == [(0, 4, 1)]
    assert queue.take(100, 2) == []


# through the manager


@pytest.fixture
def canary(make_engine) -> CanaryManager:
    """A manager with one admitted request that owns pages 1 and 2."""
    views = [pool.view for pool in make_engine().pools.values()]
    manager = CanaryManager(CanaryConfig(seed=7), views)
    manager.arm()
    manager.admit("only", [1, 2, 3])
    manager.on_alloc("only", [1, 2])
    return manager


def test_the_manager_refuses_a_second_admit(canary):
    """The words of the ledger reach the engine."""
    assert refused(canary.admit, "only", [1]) == "request 'only' is admitted already"


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [("append", ([1],)), ("on_alloc", ([3],)), ("on_free", ([3],)), ("commit", (1,)), ("release", ())],
)
def test_the_manager_refuses_an_unknown_request(canary, hook, arguments):
    """Every hook that names a request says that it was not admitted."""
    words = refused(getattr(canary, hook), "nobody", *arguments)
    assert words == "request 'nobody' is not admitted: call admit() first"


def test_the_manager_refuses_a_double_free(canary):
    """A page that went back is not given back again."""
    canary.on_free("only", [2])
    assert "to be freed by 'only', it is FREE (freed by 'only' at step 0, " in refused(canary.on_free, "only", [2])


def test_the_manager_refuses_a_second_owner(canary):
    """A page that is owned is not granted."""
    canary.admit("other", [1])
    assert refused(canary.on_alloc, "other", [1]).startswith(
        "page 1 must be FREE to be granted to 'other', it is RESERVED"
    )


def test_a_committed_length_does_not_shrink(canary):
    """What is final stays final; the message has both lengths."""
    canary.commit("only", 3)
    assert refused(canary.commit, "only", 2) == "committed_len of 'only' must not shrink, 2 follows 3"


def test_what_is_told_of_many_requests_is_refused_for_all(canary):
    """One that is unknown, or shrinks, or has nothing of its own: the others keep what they had."""
    canary.admit("other", [4, 5])
    canary.on_alloc("other", [3])
    canary.commit_all(["only", "other"], [2, 1])
    requests = canary.session.ledger.known(["only", "other"])
    words = refused(canary.append_all, ["only", "nobody"], [[7], [8]])
    assert words == "request 'nobody' is not admitted: call admit() first"
    words = refused(canary.commit_all, ["only", "other"], [3, 0])
    assert words == "committed_len of 'other' must not shrink, 0 follows 1"
    words = refused(canary.append_all, ["only", "other"], [[7]])
    assert words == "each request must have tokens, got 2 requests and 1 of these"
    words = refused(canary.commit_all, ["only"], [3, 2])
    assert words == "each request must have a length, got 1 requests and 2 of these"
    assert [(request.committed_len, len(request.tokens)) for request in requests] == [(2, 3), (1, 2)]


def true_of_pages(manager: CanaryManager) -> list[object]:
    """Arrays, histories without call sites, rows, and the copies' changes, of three requests."""
    ledger = manager.session.ledger
    pages = ledger.pages
    arrays = pages.states, pages.owners, pages.generations, pages.refcounts, pages.writers, pages.holder_sums
    reported = [[event[:3] for event in ledger.history.of(page)] for page in range(len(pages))]
    rows = [(request.pages, request.row, request.final_pages) for request in ledger.requests.values()]
    return [*(array.tolist() for array in arrays), reported, rows]


def test_pages_of_many_requests_are_granted_as_those_of_each(make_engine):
    """States, owners, generations, rows, histories and poison are the same behind one call as behind many."""
    both = []
    for at_once in (False, True):
        manager = CanaryManager(CanaryConfig(seed=7), [pool.view for pool in make_engine(num_pages=24).pools.values()])
        manager.arm()
        for name in ("one", "two", "three"):
            manager.admit(name, [1, 2, 3])
        manager.on_alloc("two", [4, 5])
        manager.on_free("two", [4])
        grants = [("three", [8]), ("one", [4, 9, 2]), ("two", []), ("two", [7, 3])]
        for step, names in enumerate((("three", "one"), ("two",)), 1):
            manager.begin_step(step)
            now = {name: pages for name, pages in grants if name in names}
            if at_once:
                manager.on_alloc_all(list(now), list(now.values()))
            else:
                for name, pages in now.items():
                    manager.on_alloc(name, pages)
        changed = np.unique(manager.session.ledger.pages.changes()).tolist()
        both.append([*true_of_pages(manager), changed, manager.certificate()])
    assert both[0] == both[1]
    assert both[0][-3][0][0] == [4, 9, 2]


@pytest.mark.parametrize(
    ("names", "pages", "words"),
    [
        (["only", "nobody"], [[3], [4]], "request 'nobody' is not admitted: call admit() first"),
        (["only", "other"], [[3]], "each request must have pages, got 2 requests and 1 of these"),
        (["only", "only"], [[3], [4]], "an event must name a request once, got only, only"),
        (["only", "other"], [[3], [99]], "page must be in [1, 16), got 99: null pages are never granted or freed"),
        (["only", "other"], [[3, 3], [4]], "an event must name a page once, got page 3 twice: name it once"),
        (["only", "other"], [[3], [4, 1]], "page 1 must be FREE to be granted to 'other', it is RESERVED (granted to"),
        (
            ["only", "other"],
            [[3, 5], [4, 3]],
            "page 3 must be FREE to be granted to 'other', it is RESERVED (granted to 'only' just now): free it first",
        ),
        (["only", "other"], [[3, 2], [3]], "page 2 must be FREE to be granted to 'only', it is RESERVED"),
    ],
)
def test_pages_of_many_requests_are_refused_for_all(make_engine, names, pages, words):
    """Whoever of them it is: no page has changed, no row is longer, and no copy of the arrays has to follow."""
    manager = CanaryManager(CanaryConfig(seed=7), [pool.view for pool in make_engine(num_pages=16).pools.values()])
    manager.arm()
    manager.admit("only", [1, 2, 3])
    manager.admit("other", [4, 5])
    manager.on_alloc("only", [1, 2])
    manager.session.ledger.pages.changes()
    before = true_of_pages(manager)
    assert refused(manager.on_alloc_all, names, pages).startswith(words)
    assert true_of_pages(manager) == before
    assert not manager.session.ledger.pages.changed


def test_what_is_told_of_many_requests_is_what_is_told_of_each(canary):
    """Tokens and lengths go to the request that they are told of; a length that nobody wrote is H1 of that one."""
    canary.admit("other", [4, 5])
    canary.on_alloc("other", [3])
    requests = canary.session.ledger.known(["other", "only"])
    requests[0].row_lens = [2, 2]
    canary.append_all(["other", "only"], [[6, 7], []])
    canary.commit_all(["other", "only"], [2, 3])
    assert [(request.tokens.tolist(), request.committed_len) for request in requests] == [
        ([4, 5, 6, 7], 2),
        ([1, 2, 3], 3),
    ]
    with pytest.raises(KVCorruptionError) as caught:
        canary.collect(canary.end_step())
    assert [(finding.code, finding.reader) for finding in caught.value.findings] == [("H1", "only")]


def test_a_request_is_unknown_once_released_and_freed(canary):
    """After release and the free of its last page the name is free."""
    canary.release("only")
    canary.on_free("only", [1, 2])
    assert "'only' is not admitted" in refused(canary.append, "only", [4])
    canary.admit("only", [9])


def test_the_row_is_what_is_granted():
    """The slots of a row in order, as an index array has them; pages that went back leave it, and come back anew."""
    ledger = make_ledger()
    request = ledger.admit("only", [1], 0)
    size = ledger.page_size
    ledger.grant("only", [3, 2], 0)
    slots = [*range(3 * size, 4 * size), *range(2 * size, 3 * size)]
    assert memoryview(request.row).cast("q").tolist() == slots
    ledger.free("only", [3, 2], 1)
    assert request.row == b""
    ledger.grant("only", [2], 1)
    assert memoryview(request.row).cast("q").tolist() == slots[size:]
