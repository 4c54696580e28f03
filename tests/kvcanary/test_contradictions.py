"""What an engine does wrong is an error in mode raise, and in log and abort a finding that ends nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kvcanary import (
    CanaryConfig,
    CanaryManager,
    HookOrderError,
    KVCorruptionError,
    LifetimeError,
    PlanError,
    PoolView,
    ReadPlan,
    WritePlan,
)
from kvcanary.errors import PageStateError, UnknownRequestError

SIZE, LAYERS = 4, 2


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@dataclass
class Row:
    """What the engine knows of a request."""

    tokens: list[int]
    pages: list[int]
    length: int = 0


@dataclass
class Plans:
    """Of a forward, as the engine gives them: by row what it reads, by entry what it writes."""

    names: list[str]
    reads: list[list[int]]
    prefixes: list[int]
    written: list[int]
    slots: list[int]
    tokens: list[int]
    positions: list[int]
    parents: list[int] | None = None
    indptr: list[int] = field(default_factory=list)

    def tensors(self) -> tuple[ReadPlan, WritePlan]:
        bounds = [0]
        for row in self.reads:
            bounds.append(bounds[-1] + len(row))
        indices = [slot for row in self.reads for slot in row]
        indptr = _ints(self.indptr or bounds)
        read = ReadPlan(indptr, _ints(indices), tuple(self.names), 1, _ints(self.prefixes), _ints(self.written))
        parents = None if self.parents is None else _ints(self.parents)
        return read, WritePlan(_ints(self.slots), _ints(self.tokens), _ints(self.positions), parents)


class Engine:
    """Pages, rows, and a decode forward of all of them; `wrong` changes the plans of the next forward."""

    def __init__(self, mode: str = "log", **config: object) -> None:
        shape = 64 * SIZE, 2, 8
        self.k, self.v = ([torch.zeros(shape) for _ in range(LAYERS)] for _ in range(2))
        view = PoolView("target", self.k, self.v, page_size=SIZE)
        self.canary = CanaryManager(CanaryConfig(mode=mode, seed=7, **config), [view], holds_back=True)
        self.canary.arm()
        self.free, self.rows = list(range(1, 64)), dict[str, Row]()
        self.wrong: Callable[[Plans], None] = lambda plans: None
        self.aborted = frozenset[str]()
        self.redirected = set[str]()  # requests whose stores were sent to the null slot
        self.step = 0

    def start(self, name: str, prompt: Sequence[int] = (5, 6, 7, 8, 9)) -> None:
        pages = [self.free.pop(0) for _ in range(-(-len(prompt) // SIZE))]
        self.rows[name] = Row(list(prompt), pages)
        self.begin()
        self.canary.admit(name, prompt)
        self.canary.on_alloc(name, pages)
        self.forward("prefill", [name])

    def decode(self, *names: str) -> None:
        self.begin()
        chosen = list(names or self.rows)
        for name in chosen:
            row = self.rows[name]
            row.tokens.append(row.tokens[-1] + 1)
            self.canary.append(name, row.tokens[-1:])
            if len(row.tokens) > len(row.pages) * SIZE:
                row.pages.append(self.free.pop(0))
                self.canary.on_alloc(name, row.pages[-1:])
        self.forward("decode", chosen)

    def begin(self) -> None:
        self.step += 1
        self.canary.begin_step(self.step)

    def slots(self, name: str, first: int, end: int) -> list[int]:
        pages = self.rows[name].pages
        return [pages[p // SIZE] * SIZE + p % SIZE for p in range(first, end)]

    def plans(self, names: list[str]) -> Plans:
        rows = [self.rows[name] for name in names]
        spans = [(name, row.length, len(row.tokens)) for name, row in zip(names, rows, strict=True)]
        return Plans(
            names,
            [self.slots(name, 0, end) for name, _, end in spans],
            [first for _, first, _ in spans],
            [end - first for _, first, end in spans],
            [slot for name, first, end in spans for slot in self.slots(name, first, end)],
            [token for name, first, end in spans for token in self.rows[name].tokens[first:end]],
            [p for _, first, end in spans for p in range(first, end)],
        )

    def forward(self, kind: str, names: list[str]) -> None:
        plans, self.wrong, wrong = self.plans(names), lambda plans: None, self.wrong
        wrong(plans)
        read, write = plans.tensors()
        substep = self.canary.forward(kind, 0, "target")
        indices, slots = substep.open(read, write)
        assert ((indices >= 0) & (indices < 64 * SIZE)).all()
        writers = [name for name, count in zip(plans.names, plans.written, strict=True) for _ in range(count)]
        asked = zip(writers, plans.slots, slots.tolist(), strict=False)
        self.redirected |= {name for name, slot, given in asked if slot != given}
        for layer in range(LAYERS):
            k, v = (torch.randn(len(slots), 2, 8) for _ in range(2))
            substep.store(layer, k, v)
            self.k[layer][slots], self.v[layer][slots] = k, v
        substep.close()
        for name in names:
            self.rows[name].length = len(self.rows[name].tokens)
            self.canary.commit(name, self.rows[name].length)
        self.aborted |= self.canary.collect(self.canary.end_step())

    def finish(self, name: str) -> None:
        row = self.rows.pop(name)
        self.canary.release(name)
        self.canary.on_free(name, row.pages)
        self.free += row.pages

    def publish(self, name: str) -> list[int]:
        """All full pages of a row."""
        shared = self.rows[name].pages[: self.rows[name].length // SIZE]
        self.canary.on_share(name, shared)
        return shared


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """As engines run."""
    with torch.inference_mode():
        yield


def double_free(engine: Engine) -> None:
    """Pages that were freed with their request come back a second time."""
    pages = engine.rows["wrong"].pages
    engine.finish("wrong")
    engine.canary.on_free("wrong", pages)


def free_of_ones_own_twice(engine: Engine) -> None:
    """A page is freed while its request runs, and again when it ends."""
    engine.canary.on_free("wrong", engine.rows["wrong"].pages[:1])
    engine.finish("wrong")


def free_of_anothers(engine: Engine) -> None:
    """A request frees its own pages and one of another, who reads it still."""
    row = engine.rows.pop("wrong")
    engine.canary.on_free("wrong", [*row.pages, engine.rows["victim"].pages[0]])


def free_while_it_loads(engine: Engine) -> None:
    """A page is given back under a load that nobody has ended."""
    engine.canary.on_alloc("wrong", [40], for_load=True)
    engine.canary.on_load_begin("wrong", [40])
    engine.canary.on_free("wrong", [40])


def share_of_writable(engine: Engine) -> None:
    """A cache takes a page that is not full."""
    engine.canary.on_share("wrong", engine.rows["wrong"].pages)


def share_of_anothers(engine: Engine) -> None:
    """A cache takes a page by the name of a request that does not hold it."""
    engine.canary.on_share("wrong", engine.rows["victim"].pages[:1])


def grant_in_quarantine(engine: Engine) -> None:
    """A page that was freed in this step is granted at once, to another request."""
    engine.canary.on_free("victim", engine.rows["victim"].pages)
    first = engine.rows.pop("victim").pages[0]
    engine.rows["wrong"].pages.append(first)
    engine.canary.on_alloc("wrong", [first])


def grant_of_anothers(engine: Engine) -> None:
    """A page is granted that another request reads and writes."""
    page = engine.rows["victim"].pages[0]
    engine.rows["wrong"].pages.append(page)
    engine.canary.on_alloc("wrong", [page])


def grant_of_ones_own(engine: Engine) -> None:
    """A page is granted to the request that has it."""
    engine.canary.on_alloc("wrong", engine.rows["wrong"].pages[:1])


def grant_of_no_page(engine: Engine) -> None:
    """A page is granted that the pool does not have."""
    engine.canary.on_alloc("wrong", [64])


def grant_of_null_page(engine: Engine) -> None:
    """Padding's page is granted."""
    engine.canary.on_alloc("wrong", [0])


def grant_twice_in_one_call(engine: Engine) -> None:
    """One call grants a free page to two requests."""
    for name in ("wrong", "victim"):
        engine.rows[name].pages.append(50)
    engine.free.remove(50)
    engine.canary.on_alloc_all(["wrong", "victim"], [[50], [50]])


def evict_undeclared(engine: Engine) -> None:
    """A cache gives up a page and tells nobody; the page is granted again."""
    page = engine.publish("wrong")[0]
    engine.finish("wrong")
    engine.rows["victim"].pages.append(page)
    engine.canary.on_alloc("victim", [page])
    engine.free.remove(page)


def evict_of_read(engine: Engine) -> None:
    """A cache gives up a page that a row names."""
    engine.canary.on_evict(engine.publish("wrong"))


def evict_of_private(engine: Engine) -> None:
    """A cache gives up a page that it never held."""
    engine.canary.on_evict(engine.rows["wrong"].pages[:1])


def hit_on_free(engine: Engine) -> None:
    """A prefix cache names a page that is free."""
    engine.canary.admit("late", [5, 6, 7, 8, 9])
    engine.canary.on_acquire("late", [60])


def hit_behind_grant(engine: Engine) -> None:
    """A cached page comes to a row that has pages of its own already."""
    engine.canary.on_acquire("wrong", engine.publish("victim"))


def copy_of_free(engine: Engine) -> None:
    """A private copy is made of a page that is nobody's."""
    engine.canary.on_copy("wrong", 60, 61)


def copy_of_private(engine: Engine) -> None:
    """A private copy is made of a page that is private."""
    engine.canary.on_copy("wrong", engine.rows["wrong"].pages[0], 61)


def fork_of_anothers(engine: Engine) -> None:
    """A row forks off pages that its parent does not begin with."""
    engine.canary.admit("child", [5, 6, 7, 8, 9])
    engine.canary.on_fork("wrong", "child", engine.rows["victim"].pages[:1])


def deduplicate_unpublished(engine: Engine) -> None:
    """A page is replaced by one that no cache holds."""
    engine.canary.on_deduplicate("wrong", engine.rows["wrong"].pages[0], engine.rows["victim"].pages[0])


def commit_shrinks(engine: Engine) -> None:
    """What was final is not."""
    engine.canary.commit_all(["other", "wrong"], [engine.rows["other"].length, 1])


def commit_too_few(engine: Engine) -> None:
    """One length for two requests."""
    engine.canary.commit_all(["wrong", "victim"], [5])


def tokens_too_few(engine: Engine) -> None:
    """Tokens of one request for two."""
    engine.canary.append_all(["wrong", "victim"], [[1]])


def tokens_after_the_end(engine: Engine) -> None:
    """A request that has ended is told of still."""
    engine.finish("wrong")
    engine.canary.append("wrong", [3])


def admitted_twice(engine: Engine) -> None:
    """A request begins that runs already."""
    engine.canary.admit("wrong", [1, 2, 3])


def load_ends_unbegun(engine: Engine) -> None:
    """A load ends that never began."""
    engine.canary.on_load_end("wrong", engine.rows["wrong"].pages[:1], 4)


def load_begins_in_use(engine: Engine) -> None:
    """A load goes into a page that a forward has written."""
    engine.canary.on_load_begin("wrong", engine.rows["wrong"].pages[:1])


def load_fails_unbegun(engine: Engine) -> None:
    """A load fails into a page that is in use."""
    engine.canary.on_load_fail("wrong", engine.rows["wrong"].pages[:1])


def restore_elsewhere(engine: Engine) -> None:
    """A snapshot of one page comes back into two."""
    snapshot = engine.canary.on_offload(engine.rows["wrong"].pages[:1])
    engine.canary.on_alloc("wrong", [50, 51])
    engine.canary.on_restore("wrong", [50, 51], 8, snapshot)


def offload_of_no_page(engine: Engine) -> None:
    """What leaves lies nowhere."""
    engine.canary.on_offload([99])


def move_out_of_the_pool(engine: Engine) -> None:
    """Bytes move to a slot that the pool does not have."""
    engine.canary.on_move("target", _ints([engine.slots("wrong", 0, 1)[0]]), _ints([9999]))


def ends_beyond_its_length(engine: Engine) -> None:
    """A request ends with more than it has committed."""
    engine.canary.release("wrong", 99)
    engine.canary.on_free("wrong", engine.rows.pop("wrong").pages)


LIFETIMES = [
    double_free,
    free_of_ones_own_twice,
    free_of_anothers,
    free_while_it_loads,
    share_of_writable,
    share_of_anothers,
    grant_in_quarantine,
    grant_of_anothers,
    grant_of_ones_own,
    grant_of_no_page,
    grant_of_null_page,
    grant_twice_in_one_call,
    evict_undeclared,
    evict_of_read,
    evict_of_private,
    hit_on_free,
    hit_behind_grant,
    copy_of_free,
    copy_of_private,
    fork_of_anothers,
    deduplicate_unpublished,
    commit_shrinks,
    commit_too_few,
    tokens_too_few,
    tokens_after_the_end,
    admitted_twice,
    load_ends_unbegun,
    load_begins_in_use,
    load_fails_unbegun,
    restore_elsewhere,
    offload_of_no_page,
    move_out_of_the_pool,
    ends_beyond_its_length,
]


def broken_indptr(plans: Plans) -> None:
    """Rows end behind all indices."""
    lengths = [len(row) for row in plans.reads]
    plans.indptr = [0, *(sum(lengths[: n + 1]) for n in range(len(lengths) - 1)), sum(lengths) + 3]


def falling_indptr(plans: Plans) -> None:
    """A row ends before it begins."""
    total = sum(map(len, plans.reads))
    plans.indptr = [0, total, *[total - 1] * (len(plans.names) - 2), total]


def written_negative(plans: Plans) -> None:
    """A row writes less than nothing."""
    plans.written[plans.names.index("wrong")] = -1


def written_too_many(plans: Plans) -> None:
    """Rows write more than the write plan has."""
    plans.written[plans.names.index("wrong")] += 1


def parents_forward(plans: Plans) -> None:
    """A node continues one that comes later."""
    plans.parents = [-1] * len(plans.slots)
    entry = plans.names.index("wrong")
    plans.parents[entry] = entry + 1


def prefix_negative(plans: Plans) -> None:
    """A row has less than nothing before it."""
    plans.prefixes[plans.names.index("wrong")] = -2


BROKEN = [broken_indptr, falling_indptr, written_negative, written_too_many, parents_forward, prefix_negative]


def _traffic(mode: str, **config: object) -> Engine:
    engine = Engine(mode, **config)
    for number, name in enumerate(("other", "wrong", "victim")):
        engine.start(name, [10 * number + token for token in range(5)])
    engine.decode()
    return engine


def _goes_on(engine: Engine) -> None:
    """All that the engine still has decodes into fresh pages, and ends; new requests come."""
    for _ in range(3):
        engine.decode()
    engine.start("new", [1, 2, 3, 4, 5, 6])
    for _ in range(5):
        engine.decode()
    for name in [*engine.rows]:
        engine.finish(name)
    engine.begin()
    engine.aborted |= engine.canary.collect(engine.canary.end_step())
    engine.start("last", [4, 4, 4, 4, 4])
    engine.decode()
    engine.finish("last")
    engine.canary.drain()


def _told(engine: Engine) -> list[str]:
    return [finding.code for finding in engine.canary.findings]


def _named(engine: Engine) -> set[str]:
    return {name for finding in engine.canary.findings for name in finding.readers}


@pytest.mark.parametrize("content", ["rolling", "full"])
@pytest.mark.parametrize("mistake", LIFETIMES, ids=lambda mistake: mistake.__name__)
def test_log_goes_on_after_a_lifetime_mistake(mistake: Callable[[Engine], None], content: str) -> None:
    """One L1 that has what the error says; nobody else is named, then or later, and nothing is raised."""
    engine = _traffic("log", content=content, quarantine=2)
    engine.begin()
    mistake(engine)
    engine.aborted |= engine.canary.collect(engine.canary.end_step())
    assert _told(engine) == ["L1"]
    assert ": " in engine.canary.findings[0].sentence
    _goes_on(engine)
    assert _told(engine) == ["L1"]
    assert not {"other", "new", "last"} & (_named(engine) | engine.redirected)
    assert engine.redirected <= ({"wrong"} if mistake is grant_twice_in_one_call else set())


@pytest.mark.parametrize("mistake", LIFETIMES, ids=lambda mistake: mistake.__name__)
def test_raise_raises_the_typed_error(mistake: Callable[[Engine], None]) -> None:
    """In mode raise it is the error that it always was, with the same words."""
    engine = _traffic("raise", quarantine=2)
    logged = _traffic("log", quarantine=2)
    engine.begin()
    with pytest.raises((LifetimeError, PlanError)) as caught:
        mistake(engine)
    logged.begin()
    mistake(logged)
    logged.canary.collect(logged.canary.end_step())
    assert logged.canary.findings[0].sentence.endswith(str(caught.value))


@pytest.mark.parametrize("mistake", LIFETIMES, ids=lambda mistake: mistake.__name__)
def test_abort_ends_those_that_are_touched(mistake: Callable[[Engine], None]) -> None:
    """The requests that the event names, and who holds its pages; no others."""
    engine = _traffic("abort", quarantine=2)
    engine.begin()
    mistake(engine)
    engine.aborted |= engine.canary.collect(engine.canary.end_step())
    assert engine.aborted <= {"wrong", "victim", "late", "child"}
    for name in engine.aborted & engine.rows.keys():
        engine.finish(name)
    _goes_on(engine)
    assert engine.aborted <= {"wrong", "victim", "late", "child"}


@pytest.mark.parametrize("mode", ["log", "abort"])
@pytest.mark.parametrize("mistake", BROKEN, ids=lambda mistake: mistake.__name__)
def test_a_plan_that_cannot_be_is_not_judged(mistake: Callable[[Plans], None], mode: str) -> None:
    """One L1; abort ends the requests whose rows they are, all of the forward only where nobody can tell."""
    engine = _traffic(mode)
    engine.wrong = mistake
    engine.decode()
    assert _told(engine) == ["L1"]
    whole = mistake in (broken_indptr, written_too_many)
    assert engine.canary.findings[0].site == ("decode", 0)
    if mode == "abort" and mistake is not falling_indptr:
        assert engine.aborted == ({"other", "wrong", "victim"} if whole else {"wrong"})
    for name in engine.aborted:
        engine.finish(name)
    _goes_on(engine)
    assert _told(engine) == ["L1"]
    unchecked = engine.canary.certificate()["unchecked"]
    assert unchecked["forwards whose plans contradict themselves"] == 1
    assert unchecked["requests set aside after L1"] == 3


def _cut_end(plans: Plans) -> None:
    plans.reads[1] = plans.reads[1][:-2]


def _cut_head(plans: Plans) -> None:
    plans.reads[1] = plans.reads[1][2:]


def _cut_all(plans: Plans) -> None:
    plans.reads[1] = []


@pytest.mark.parametrize("mode", ["raise", "log", "abort"])
@pytest.mark.parametrize("content", ["rolling", "full"])
@pytest.mark.parametrize("cut", [_cut_end, _cut_head, _cut_all])
def test_a_row_that_is_too_short_is_r10(cut: Callable[[Plans], None], content: str, mode: str) -> None:
    """In every mode, with the row's request and both sizes; the other rows of the forward are judged."""
    engine = _traffic(mode, content=content)
    engine.wrong, length = cut, len(engine.rows["wrong"].tokens)
    if mode == "raise":
        with pytest.raises(KVCorruptionError):
            engine.decode()
    else:
        engine.decode()
    finding = engine.canary.findings[0]
    assert (finding.code, finding.reader) == ("R10", "wrong")
    left = {_cut_all: 0}.get(cut, length - 1)
    assert (finding.expected, finding.found) == ({"entries": length + 1}, {"entries": left})
    assert engine.aborted == (frozenset({"wrong"}) if mode == "abort" else frozenset())
    assert engine.canary.certificate()["unchecked"].get("entries of rows that are too short", 0) == left
    assert _named(engine) == {"wrong"}


def test_a_short_prefill_says_so() -> None:
    """A row with fewer entries than it writes, and nothing before them, is R10 too."""
    engine = Engine("log")

    def cut(plans: Plans) -> None:
        plans.reads[0] = plans.reads[0][:2]

    engine.wrong = cut
    engine.start("wrong")
    assert _told(engine) == ["R10"]


def test_misuse_raises_in_every_mode() -> None:
    """Hooks in a wrong order, unknown names, shapes and requests that never were are errors of the adapter's author."""
    engine = _traffic("log")
    with pytest.raises(HookOrderError):
        engine.canary.begin_step(0)
    with pytest.raises(UnknownRequestError):
        engine.canary.on_free("nobody", [3])
    with pytest.raises(PlanError):
        engine.canary.forward("decode", 0, "elsewhere")
    with pytest.raises(PlanError):
        WritePlan(_ints([1]), _ints([1, 2]), _ints([1]))
    read, write = engine.plans(["other"]).tensors()
    read.requests = ("nobody",)
    with pytest.raises(UnknownRequestError):
        engine.canary.forward("decode", 0, "target").open(read, write)
    assert not _told(engine)


def test_a_published_page_in_doubt_is_not_poisoned() -> None:
    """A cache holds what was shared too early: when its request ends the bytes stay, and whoever hits them goes on."""
    engine = _traffic("log", quarantine=0)
    page = engine.rows["wrong"].pages[1]
    engine.canary.on_share("wrong", [page])
    before = engine.k[0][page * SIZE].clone()
    engine.finish("wrong")
    for _ in range(6):
        engine.decode()
    assert torch.equal(engine.k[0][page * SIZE], before)
    engine.canary.admit("late", [1, 2, 3, 4, 5])
    engine.canary.on_acquire("late", [page])
    assert _told(engine) == ["L1"]
    assert engine.canary.certificate()["unchecked"]["contradictions of what was set aside"] >= 1


def test_a_request_is_judged_again_when_it_is_admitted_anew() -> None:
    """And its pages when they are granted anew."""
    engine = _traffic("log", content="full")
    engine.canary.admit("wrong", [1])
    engine.decode()
    engine.finish("wrong")
    engine.start("wrong")
    engine.k[0][engine.slots("wrong", 0, 1)] += 1
    engine.decode("wrong")
    assert _told(engine) == ["L1", "R9"]


def test_the_state_and_the_history_are_told() -> None:
    """Page, states, and the line of the last event, as the typed error has them."""
    engine = _traffic("log")
    page = engine.rows["victim"].pages[0]
    engine.canary.on_alloc("wrong", [page])
    engine.canary.collect(engine.canary.end_step())
    finding = engine.canary.findings[0]
    assert finding.page == page
    assert finding.expected == {"state": "FREE"}
    assert finding.found == {"state": "COMMITTED", "event": "granted", "error": "PageStateError"}
    assert "test_contradictions.py:" in finding.sentence
    assert set(finding.readers) == {"wrong", "victim"}
    assert finding.causes[0].family == "lifetime"


def test_a_page_that_nobody_may_have_is_told_of_its_own_event_alone() -> None:
    """What an earlier event named is no evidence for a later one, here of a request that has ended."""
    engine = _traffic("log")
    engine.canary.on_alloc("wrong", [0])
    engine.finish("victim")
    engine.canary.on_alloc("victim", [50])
    engine.canary.collect(engine.canary.end_step())
    first, second = engine.canary.findings[:2]
    assert (first.found, first.causes[0].family) == ({"page": 0, "error": "LifetimeError"}, "addressing")
    assert (second.found, second.causes[0].family) == ({"error": "UnknownRequestError"}, "lifetime")


def test_page_state_errors_are_lifetime_errors() -> None:
    """What `ENGINES_DOING` names covers the errors of pages."""
    assert issubclass(PageStateError, LifetimeError)
