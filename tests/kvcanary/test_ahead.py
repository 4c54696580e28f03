"""A draft model of its own: its pool holds one entry more than the committed length, and that entry is final."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcanary import CanaryConfig, CanaryManager, Finding, KVCorruptionError, PlanError, PoolView, ReadPlan, WritePlan

PAGE_SIZE, NUM_PAGES = 4, 24


class Standalone:
    """A target pool and the pool of a draft model of its own: `num_steps` guesses, verify, accept, extend.

    `change_read` and `change_write` see every plan.
    """

    def __init__(self, ahead: int = 1, **config: object) -> None:
        self.kv = {name: torch.zeros(1, NUM_PAGES * PAGE_SIZE, 2, 1, 4) for name in ("target", "draft")}
        views = [self._view("target", 0), self._view("draft", ahead)]
        settings = {"mode": "raise", "seed": 7, "content": "full", **config}
        self.canary = CanaryManager(CanaryConfig(**settings), views)
        self.canary.arm()
        self.pages: list[int] = []
        self.tokens: list[int] = []
        self.committed = self.step_number = 0
        self.change_read: Callable[[str, ReadPlan], ReadPlan] = lambda kind, plan: plan
        self.change_write: Callable[[str, WritePlan], WritePlan] = lambda kind, plan: plan

    def start(self, length: int) -> None:
        self.tokens = [100 + place for place in range(length)]
        self.canary.admit("only", self.tokens)
        self._begin(length + 1)
        for pool in self.kv:
            self._forward("prefill", 0, pool, 0, 0, self.tokens[:length])
        self.canary.collect(self.canary.end_step())
        self._accept(length, [500])
        self._extend(length)

    def step(self, accepted: int = 2) -> None:
        start = self.committed
        self._begin(start + 5)
        guesses = [600 + self.step_number, 700, 800]
        for index in range(2):
            self._forward("draft", index, "draft", start + 1, start + 1 + index, [guesses[index]])
        self._forward("verify", 0, "target", start, start, [self.tokens[start], *guesses[:2]])
        self.canary.collect(self.canary.end_step())
        self._accept(start + accepted, [*guesses[: accepted - 1], 900 + self.step_number])
        self._extend(start + 1)

    def finish(self) -> None:
        self.canary.release("only")
        self.canary.on_free("only", self.pages)

    def slot(self, position: int) -> int:
        return self.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    def _extend(self, start: int) -> None:
        """The draft model reads what was accepted, the newest token too, and junk behind it."""
        self._forward("extend", 0, "draft", start, start, [*self.tokens[start:], 0])

    def _accept(self, length: int, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.committed = length
        self.canary.append("only", tokens)
        self.canary.commit("only", length)

    def _forward(self, kind: str, index: int, pool: str, prefix: int, first: int, tokens: Sequence[int]) -> None:
        end = first + len(tokens)
        reads = ints([self.slot(position) for position in range(end)])
        read = ReadPlan(ints([0, end]), reads, ("only",), 1, ints([prefix]), len(tokens))
        write = WritePlan(reads[first:], ints(tokens), ints(range(first, end)))
        substep = self.canary.forward(kind, index, pool)
        _, slots = substep.open(self.change_read(kind, read), self.change_write(kind, write))
        k, v = torch.randn(2, len(tokens), 1, 4)
        substep.store(0, k, v)
        self.kv[pool][0, slots, 0], self.kv[pool][0, slots, 1] = k, v
        substep.close()

    def _begin(self, length: int) -> None:
        self.step_number += 1
        self.canary.begin_step(self.step_number)
        fresh = list(range(len(self.pages) + 1, -(-length // PAGE_SIZE) + 1))
        self.pages += fresh
        if fresh:
            self.canary.on_alloc("only", fresh)

    def _view(self, name: str, ahead: int) -> PoolView:
        k, v = self.kv[name].unbind(2)
        return PoolView(name, [k[0]], [v[0]], PAGE_SIZE, ahead=ahead)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def found(run: Callable[..., object], *arguments: object) -> Finding:
    """The only finding with which a call is stopped."""
    with pytest.raises(KVCorruptionError) as caught:
        run(*arguments)
    (finding,) = caught.value.findings
    return finding


@pytest.fixture
def make() -> Iterator[Callable[..., Standalone]]:
    """Standalone by its settings and those of CanaryConfig, with a prompt of 6 tokens computed."""

    def started(**settings: object) -> Standalone:
        engine = Standalone(**settings)
        engine.start(6)
        return engine

    with torch.inference_mode():
        yield started


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_right_traffic_has_no_finding(make, content, accepted):
    """Each step begins with one entry more in the draft pool than in the target's."""
    engine = make(content=content, budget=1 << 20)
    for _ in range(4):
        engine.step(accepted)
    engine.finish()
    assert engine.canary.findings == []


def test_a_pool_that_is_not_told_to_be_ahead_has_a_wrong_length(make):
    """Its newest entry is then beyond what acceptance has made final."""
    finding = found(make(ahead=0).step)
    assert (finding.code, finding.pool, finding.expected, finding.found) == (
        "R10",
        "draft",
        {"length": 6},
        {"length": 7},
    )


def test_a_draft_that_forgets_the_newest_token_has_a_wrong_length(make):
    """R10 expects what the pool holds ahead, and not only what is committed."""
    engine = make()
    engine.change_read = lambda kind, plan: replace(plan, prefix_lens=plan.prefix_lens - int(kind == "draft"))
    finding = found(engine.step)
    assert (finding.code, finding.expected, finding.found) == ("R10", {"length": 7}, {"length": 6})


def test_the_entry_ahead_has_a_truth(make):
    """R6: the newest token that the draft model was fed is the one that left."""
    engine = make(disable={"W6"})
    engine.step()
    engine.change_write = lambda kind, plan: replace(plan, tokens=plan.tokens ^ (kind == "extend"))
    engine.step(1)
    engine.change_write = lambda kind, plan: plan
    finding = found(engine.step)
    assert (finding.code, finding.pool, finding.position) == ("R6", "draft", engine.committed)


@pytest.mark.parametrize("look", ["sweep", "release"])
def test_the_entry_ahead_is_read_again(make, look):
    """The rolling check and the last re-read reach one entry further in the pool that is ahead."""
    engine = make(content="rolling", budget=1 << 20)
    engine.step()
    slot = engine.slot(engine.committed)
    engine.kv["draft"].view(torch.int32)[0, slot, 0, 0, 1] ^= 2
    if look == "sweep":
        engine._begin(0)
    finding = found((lambda: engine.canary.collect(engine.canary.end_step())) if look == "sweep" else engine.finish)
    assert (finding.code, finding.pool, finding.slot, finding.site[0]) == ("R9", "draft", slot, look)


def test_what_lies_behind_the_entry_ahead_is_not_read_again(make):
    """The extend forward's padding is no entry of the row."""
    engine = make(content="rolling", budget=1 << 20)
    engine.step()
    engine.kv["draft"].view(torch.int32)[0, engine.slot(engine.committed + 1)] ^= 2
    engine.finish()
    assert engine.canary.findings == []


def test_the_entry_ahead_counts_among_unread_and_live_bytes(make):
    """Slots of 32 bytes: the committed ones in both pools, and one more in the draft's."""
    engine = make(content="write")
    engine.step()
    engine.canary.drain()
    assert engine.committed == 8
    assert engine.canary.certificate()["live_bytes"] == (8 + 9) * 32
    engine.finish()
    assert engine.canary.certificate()["freed_unread_bytes"] == (8 + 9) * 32


def test_a_fork_takes_the_entry_ahead_along(make):
    """Where a copy begins with all of a row, its draft pool is ahead as well; where it begins with less, it is not."""
    engine = make()
    engine.step()
    request = engine.canary.session.ledger.request
    for name, length, lens in (("whole", 9, [8, 9]), ("head", 4, [4, 4])):
        engine.canary.admit(name, engine.tokens[:length])
        engine.canary.on_fork("only", name, engine.pages[: -(-length // PAGE_SIZE)])
        assert request(name).row_lens.tolist() == lens


def test_ahead_is_not_negative():
    """A pool that lags has no word for it."""
    with pytest.raises(PlanError, match="ahead must be at least 0, got -1"):
        Standalone(ahead=-1)
