"""Random lifetimes: the ledger against a small model that counts nothing along and derives every state from rows."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import numpy as np
import pytest

from kvcanary.errors import LifetimeError
from kvcanary.ledger.ledger import NO_PAGE, Ledger
from kvcanary.ledger.page_states import STATE_NAMES
from kvcanary.native.layout import NOWHERE, PAGES, ROWS, RUN
from kvcanary_kernels.record.layout import COMMITTED, FREE, NO_OWNER, QUARANTINED, SHARED, SHARED_OWNER, make_keys

KEYS = make_keys(7, 1, 4)
SIZE = 4
EVENTS = (
    *["grant"] * 3,
    *["wrote"] * 4,
    *["commit"] * 4,
    *["share"] * 2,
    *["free"] * 2,
    *["load_begin"] * 2,
    *["grant_all", "land"] * 2,
    *(
        "acquire",
        "acquire",
        "fork",
        "fork",
        "copy_on_write",
        "copy_on_write",
        "deduplicate",
        "evict",
        "quarantine",
        "leave_quarantine",
    ),
    *("load_end", "load_fail", "restore", "restore"),
)


class Model:
    """The same rules by sets and rows: states are derived from them, nothing is counted along."""

    def __init__(self, num_pages: int) -> None:
        self.base = ["NULL"] + ["FREE"] * (num_pages - 1)
        self.generations = [0] * num_pages
        self.rows: dict[str, list[int]] = {}
        self.final: dict[str, int] = {}
        self.cached: set[int] = set()
        self.waiting: list[tuple[int, int]] = []

    def holders(self, page: int) -> list[str]:
        return [name for name, row in self.rows.items() if page in row]

    def state(self, page: int) -> str:
        holders = self.holders(page)
        if page in self.cached or len(holders) > 1:
            return "SHARED"
        if holders and self.base[page] == "WRITTEN" and self.rows[holders[0]].index(page) < self.final[holders[0]]:
            return "COMMITTED"
        return self.base[page]

    def all_in(self, pages: list[int], *legal: str) -> bool:
        return all(self.state(page) in legal for page in pages)

    def begin(self, pages: list[int], base: str) -> None:
        for page in pages:
            self.base[page] = base
            self.generations[page] += 1

    def drop_loose(self) -> None:
        """Pages that neither a row nor the cache names are free; rows end with a page."""
        for name, row in self.rows.items():
            while row and row[-1] == NO_PAGE:
                row.pop()
            self.final[name] = min(self.final[name], len(row))
        taken = {page for row in self.rows.values() for page in row} | self.cached
        self.begin(
            [p for p, base in enumerate(self.base) if base not in ("NULL", "FREE", "QUARANTINED") and p not in taken],
            "FREE",
        )

    # every event says whether it is legal, and happens if it is

    def grant(self, name: str, pages: list[int], for_load: bool) -> bool:
        if not self.all_in(pages, "FREE"):
            return False
        self.begin(pages, "NEVER_WRITTEN" if for_load else "RESERVED")
        self.rows[name] += pages
        return True

    def grant_all(self, names: list[str], pages: list[list[int]], for_load: bool) -> bool:
        granted = [page for own in pages for page in own]
        if len(set(granted)) < len(granted) or not self.all_in(granted, "FREE"):
            return False
        return all(self.grant(name, own, for_load) for name, own in zip(names, pages, strict=True))

    def free(self, name: str, pages: list[int]) -> bool:
        if not set(pages) <= set(self.rows[name]) or any(self.base[page] == "LOADING" for page in pages):
            return False
        self.rows[name][:] = [NO_PAGE if page in pages else page for page in self.rows[name]]
        self.drop_loose()
        return True

    def commit(self, name: str, length: int) -> bool:
        row, full = self.rows[name], length // SIZE
        if full <= self.final[name]:
            return True
        fresh = [page for page in row[self.final[name] : full] if page != NO_PAGE]
        if full > len(row) or not self.all_in(fresh, "WRITTEN", "COMMITTED", "SHARED"):
            return False
        self.final[name] = full
        return True

    def share(self, name: str, pages: list[int]) -> bool:
        if not set(pages) <= set(self.rows[name][: self.final[name]]):
            return False
        self.cached |= set(pages)
        return True

    def acquire(self, name: str, pages: list[int]) -> bool:
        row = self.rows[name]
        if not set(pages) <= self.cached or set(pages) & set(row) or len(row) > self.final[name]:
            return False
        row += pages
        self.final[name] = len(row)
        return True

    def fork(self, name: str, child: str, pages: list[int]) -> bool:
        if self.rows[child] or self.rows[name][: len(pages)] != pages:
            return False
        if not self.all_in(pages, "WRITTEN", "COMMITTED", "SHARED"):
            return False
        self.rows[child] = list(pages)
        self.final[child] = min(self.final[name], len(pages))
        return True

    def copy_on_write(self, name: str, page: int, copy: int) -> bool:
        row = self.rows[name]
        if page not in row or self.state(page) != "SHARED" or self.state(copy) != "FREE":
            return False
        place = row.index(page)
        if place < self.final[name] - 1:
            return False
        row[place] = copy
        self.final[name] = min(self.final[name], place)
        self.begin([copy], "WRITTEN")
        self.drop_loose()
        return True

    def deduplicate(self, name: str, pages: list[int], shared: list[int]) -> bool:
        row = self.rows[name]
        legal = set(pages) <= set(row[: self.final[name]]) and set(shared) <= self.cached and not set(shared) & set(row)
        if not legal or len(pages) != len(shared):
            return False
        other = dict(zip(pages, shared, strict=True))
        row[:] = [other.get(page, page) for page in row]
        self.drop_loose()
        return True

    def evict(self, pages: list[int]) -> bool:
        if not set(pages) <= self.cached or any(self.holders(page) for page in pages):
            return False
        self.cached -= set(pages)
        self.drop_loose()
        return True

    def load(self, event: str, name: str, pages: list[int]) -> bool:
        legal = {
            "load_begin": ("NEVER_WRITTEN", "LOAD_FAILED"),
            "load_end": ("LOADING",),
            "load_fail": ("LOADING", "NEVER_WRITTEN"),
            "restore": ("NEVER_WRITTEN", "RESERVED"),
        }[event]
        if not set(pages) <= set(self.rows[name]) or not self.all_in(pages, *legal):
            return False
        after = {"load_begin": "LOADING", "load_end": "WRITTEN", "load_fail": "LOAD_FAILED", "restore": "WRITTEN"}
        for page in pages:
            self.base[page] = after[event]
        return True

    def wrote(self, pages: list[int]) -> bool:
        for page in pages:
            if self.state(page) in ("RESERVED", "LOAD_FAILED"):
                self.base[page] = "WRITTEN"
        return True

    def quarantine(self, pages: list[int], step: int) -> bool:
        if not self.all_in(pages, "FREE"):
            return False
        for page in pages:
            self.base[page] = "QUARANTINED"
        self.waiting += [(page, step) for page in pages]
        return True

    def leave_quarantine(self, step: int, steps: int) -> bool:
        for page, since in self.waiting:
            if step - since >= steps:
                self.base[page] = "FREE"
        self.waiting = [(page, since) for page, since in self.waiting if step - since < steps]
        return True


class Player:
    """Draws events, plays each to the ledger and to the model, and compares both."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.rng, self.num_pages = random.Random(seed), num_pages
        self.ledger, self.model = Ledger(num_pages, SIZE, 1, KEYS, [("target", 0)]), Model(num_pages)
        self.accepted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.copies = self.truth().copy()

    def some(self, likely: list[int], most: int = 4) -> list[int]:
        """Distinct pages, mostly of the likely ones."""
        source = [page for page in likely if page != NO_PAGE] if self.rng.random() < 0.85 else range(1, self.num_pages)
        return self.rng.sample(list(source), min(len(source), self.rng.randint(1, most)))

    def draw(self, step: int) -> tuple[str, tuple, bool]:
        """An event, its arguments for the ledger, and whether the model allows it (it has happened there then)."""
        rng, model = self.rng, self.model
        names = list(model.rows)
        name, other = rng.choice(names), rng.choice([name for name in names if not model.rows[name]] or names)
        row, final = model.rows[name], model.final[name]
        free = [page for page in range(1, self.num_pages) if model.state(page) == "FREE"]
        match rng.choice(EVENTS):
            case "grant":
                pages, for_load = self.some(free), rng.random() < 0.3
                return "grant", (name, pages, step, for_load), model.grant(name, pages, for_load)
            case "grant_all":
                names, for_load = rng.sample(names, rng.randint(1, 4)), rng.random() < 0.3
                pages = self.some(free, 8)
                cuts = sorted(rng.randint(0, len(pages)) for _ in names[1:])
                parts = [pages[i:j] for i, j in zip([0, *cuts], [*cuts, len(pages)], strict=True)]
                if rng.random() < 0.1 and pages:
                    parts[-1] = [*parts[-1], pages[0]]
                return "grant_all", (names, parts, step, for_load), model.grant_all(names, parts, for_load)
            case "land":
                names = [name for name in rng.sample(names, rng.randint(1, 4)) if model.rows[name]]
                most = [len(model.rows[name]) * SIZE + (rng.random() < 0.1) * SIZE for name in names]
                lengths = [rng.randint(0, length) for length in most]
                refused = [name for name, length in zip(names, lengths, strict=True) if not model.commit(name, length)]
                return "land", (names, lengths, refused, step), not refused
            case "free":
                pages = self.some(row[rng.randrange(len(row)) :] if row else [], most=8)
                return "free", (name, pages, step), model.free(name, pages)
            case "commit":
                length = rng.randint(0, len(row) * SIZE + (rng.random() < 0.1) * SIZE)
                return "commit", (name, length, step), model.commit(name, length)
            case "share":
                pages = self.some(row[:final])
                return "share", (name, pages, step), model.share(name, pages)
            case "acquire":
                pages = self.some(sorted(model.cached))
                return "acquire", (name, pages, step), model.acquire(name, pages)
            case "fork":
                pages = [page for page in row if page != NO_PAGE][: rng.randint(1, 5)]
                return "fork", (name, other, pages, step), model.fork(name, other, pages)
            case "copy_on_write":
                tail = [page for page in row[-2:] if page != NO_PAGE and model.state(page) == "SHARED"]
                [page], [copy] = self.some(tail, 1) or [1], self.some(free, 1) or [1]
                return "copy_on_write", (name, page, copy, step), model.copy_on_write(name, page, copy)
            case "deduplicate":
                pages, shared = self.some(row[:final], 2), self.some(sorted(model.cached - set(row)), 2)
                return "deduplicate", (name, pages, shared, step), model.deduplicate(name, pages, shared)
            case "evict":
                pages = self.some([page for page in sorted(model.cached) if not model.holders(page)])
                return "evict", (pages, step), model.evict(pages)
            case "wrote":
                pages = self.some(row)
                return "wrote", (pages,), model.wrote(pages)
            case "quarantine":
                pages = self.some(free, 2)
                return "quarantine", (pages, step), model.quarantine(pages, step)
            case "leave_quarantine":
                return "leave_quarantine", (step, 4), model.leave_quarantine(step, 4)
            case event:
                legal = {"load_end": "LOADING", "load_fail": "LOADING"}.get(event)
                likely = [page for page in row if page != NO_PAGE and legal in (None, model.state(page))]
                pages = self.some(likely, 2)
                return event, (name, pages, step), model.load(event, name, pages)

    def play(self, step: int) -> None:
        self.come_and_go()
        event, arguments, is_legal = self.draw(step)
        try:
            if event == "wrote":
                self.ledger.pages.wrote(np.array(arguments[0], dtype=np.int64))
            elif event == "land":
                self.land(*arguments)
            else:
                getattr(self.ledger, event)(*arguments)
            words = ""
        except LifetimeError as error:
            words = str(error)
        assert is_legal == (not words), (event, arguments, words)
        (self.accepted if is_legal else self.refused)[event] += 1

    def land(self, names: list[str], lengths: list[int], refused: list[str], step: int) -> None:
        """A captured forward lands that makes so much of these rows final; `refused`: those left to the rules."""
        ledger, batch = self.ledger, self.ledger.batches[tuple(names)]
        before = [request.final_pages for request in batch.requests]
        for request, length in zip(batch.requests, lengths, strict=True):
            request.row_lens, request.committed_len, request.in_flight = [length], length, 1
        rows, structs = array("q", [0] * (ROWS.size * len(names) + 1)), array("q", bytes(8 * RUN.size))
        structs[RUN.requests], structs[RUN.structs] = batch.loop_arguments
        structs[RUN.rows] = rows.buffer_info()[0]
        left, place = [], 0
        while (place := ledger.steps.finalise_runs(structs, place)) != NOWHERE:
            left.append(names[place])
            place += 1
        ledger.record_final_pages(step)
        assert left == refused
        for request, first in zip(batch.requests, before, strict=True):
            for page in request.pages[first : request.final_pages]:
                if page != NO_PAGE and ledger.states[page] == COMMITTED:
                    newest = ledger.history.of(page)[-1]
                    assert (newest.kind, newest.step, newest.request_id) == ("committed", step, request.request_id)
        if refused:
            raise LifetimeError("left to the rules")

    def come_and_go(self) -> None:
        """Some requests live at a time; those without pages may end."""
        rows = self.model.rows
        for name in [name for name, row in rows.items() if not row and self.rng.random() < 0.1]:
            self.ledger.forget(name)
            del rows[name], self.model.final[name]
        while len(rows) < 5:
            name = f"r{self.rng.randrange(1000)}"
            if name not in rows:
                self.ledger.admit(name, [1], 0)
                rows[name], self.model.final[name] = [], 0

    def compare(self) -> None:
        ledger, model = self.ledger, self.model
        pages = range(1, self.num_pages)
        assert [STATE_NAMES[state] for state in ledger.states[1:].tolist()] == [model.state(page) for page in pages]
        assert ledger.refcounts[1:].tolist() == [len(model.holders(page)) for page in pages]
        assert ledger.generations.tolist() == model.generations
        assert [self.owner(page) for page in pages] == ledger.owners[1:].tolist()
        assert {page for page in pages if ledger.pages.published[page]} == model.cached
        assert ledger.pages.struct[PAGES.num_published] == len(model.cached)
        for name, row in model.rows.items():
            request = ledger.request(name)
            assert (request.pages, request.final_pages) == (row, model.final[name])
            slots = [page * SIZE + offset for page in row for offset in range(SIZE)]
            assert memoryview(request.row).cast("q").tolist() == slots
        states, num_owned = ledger.states[1:].tolist(), int((ledger.owners[1:] >= 0).sum())
        assert sum(map(states.count, (FREE, QUARANTINED, SHARED))) + num_owned == self.num_pages - 1
        ledger.rows.audit(sorted(model.cached))

    def compare_copies(self) -> None:
        """A copy of the arrays that follows `changes()` is the arrays."""
        changed = self.ledger.pages.changes()
        self.copies[:, changed] = self.truth()[:, changed]
        assert np.array_equal(self.copies, self.truth())

    def truth(self) -> np.ndarray:
        pages = self.ledger.pages
        return np.stack([pages.states, pages.owners, pages.generations, pages.writers, pages.published])

    def owner(self, page: int) -> int:
        if self.model.state(page) == "SHARED":
            return SHARED_OWNER
        holders = self.model.holders(page)
        return self.ledger.request(holders[0]).uid if holders else NO_OWNER

    def compare_writes(self) -> None:
        """Who may write which page, from the model alone."""
        names = list(self.model.rows)
        for page in range(1, self.num_pages):
            state, holders, name = self.model.state(page), self.model.holders(page), self.rng.choice(names)
            code = {"SHARED": "W3", "QUARANTINED": "W7"}.get(state, "W2" if holders != [name] else "W8")
            is_right = holders == [name] and state in ("RESERVED", "WRITTEN", "LOAD_FAILED")
            found = self.ledger.pages.write_codes(np.array([page]), np.array([self.ledger.request(name).uid]))
            assert found == ({} if is_right else {0: code})


def play(seed: int, steps: int, num_pages: int = 24) -> Player:
    player = Player(seed, num_pages)
    for step in range(steps):
        player.play(step)
        player.compare()
        if step % 10 == 0:
            player.compare_writes()
            player.compare_copies()
    return player


def test_random_lifetimes_agree_with_the_model():
    """After every event of random lives states, references, owners, generations, rows and sums are the model's."""
    players = [play(seed, 800) for seed in range(12)]
    accepted, refused = (sum((getattr(p, which) for p in players), Counter()) for which in ("accepted", "refused"))
    assert set(accepted) == set(EVENTS)
    assert set(refused) == set(EVENTS) - {"wrote", "leave_quarantine"}
    assert min(accepted.values()) >= 15
    assert min(refused.values()) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_long_random_lives_agree_with_the_model(seed):
    """The same for longer lives in pools of other sizes."""
    play(seed, 3000, num_pages=8 + seed % 40)
