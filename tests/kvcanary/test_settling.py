"""The loop that proves forwards clean, against the rules that name what is wrong: the same runs, judged both ways."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kvcanary import KVCanaryError, ReadPlan, WritePlan
from kvcanary.checks.fast_path import Unproved

READ, WRITE = ("indices", "prefix_lens"), ("slots", "tokens", "positions", "parents")
OFFSETS = (-1, 1, 2, 4, 7, -4, 1 << 33)


@dataclass
class Judged:
    """What one run came to: findings in words, what the loop said, and all that is kept; or how it was refused."""

    findings: list[tuple[object, ...]]
    said: list[Unproved]
    kept: list[object]
    refusal: str = ""


class Tampering:
    """One random change of one run: of a plan, of a mask, of a store, or of what lies in memory before a check."""

    def __init__(self, engine, seed: int) -> None:
        self.engine, self.random, self.forwards = engine, random.Random(seed), 0
        self.when = self.random.randrange(3, 26)
        self.what = self.random.choice(
            [
                *READ,
                *WRITE,
                "tokens",
                "tokens",
                "positions",
                "positions",
                "mask",
                "mask",
                "store",
                "record",
                "length",
                "ancestor",
                "ancestor",
                "nothing",
            ]
        )
        self.place = self.random.random()
        self.offset = self.random.choice(OFFSETS)
        engine.change_read, engine.change_write = self.read, self.write
        engine.change_store, engine.before_check = self.store, self.before_check

    def read(self, kind: str, index: int, pool: str, plan: ReadPlan) -> ReadPlan:
        self.forwards += 1
        if self.what == "ancestor" and kind == "draft" and index == 2 and self.forwards in range(self.when, 40):
            indices, self.when = plan.indices.clone(), 40
            indices[int(plan.indptr[1]) - 3] = indices[0]  # its grandparent, and no more than that
            return replace(plan, indices=indices)
        if self.is_now and self.what in READ:
            return replace(plan, **{self.what: self.changed(getattr(plan, self.what))})
        return plan

    def write(self, kind: str, index: int, pool: str, plan: WritePlan) -> WritePlan:
        if self.is_now and self.what in WRITE and getattr(plan, self.what) is not None:
            return replace(plan, **{self.what: self.changed(getattr(plan, self.what))})
        return plan

    def store(self, kind, index, pool, layer, slots, *values):
        return None if self.is_now and self.what == "store" and layer == 0 else (slots, *values)

    def before_check(self) -> None:
        state = self.engine.canary.session.state
        if self.what == "record" and self.forwards in range(self.when, self.when + 6):
            row = self.engine.rows[min(self.engine.rows)]
            slot = self.engine.slot(min(self.engine.rows), int(self.place * max(row.committed, 1)))
            state.pools[0].records[slot, self.random.randrange(8)] ^= 1 << self.random.randrange(63)
        if self.what == "length" and self.forwards in range(self.when, self.when + 6):
            requests = self.engine.canary.session.ledger.requests
            requests[min(requests)].row_lens[self.random.randrange(2)] += 1

    @property
    def is_now(self) -> bool:
        return self.forwards == self.when

    def changed(self, values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        if len(values):
            values[int(self.place * len(values))] += self.offset
        return values


def with_masks(engine, tampering: Tampering) -> None:
    """Verify forwards show the tree of their parents; where a mask is tampered with, one bit more or less."""
    verify = engine._forward

    def forward(kind, index, pool, read, write) -> None:
        if write.parents is not None:
            n, first = engine.num_nodes, torch.arange(0, len(write.slots), engine.num_nodes)
            parents, mask = (
                write.parents.view(-1, n) - first[:, None],
                torch.eye(n, dtype=torch.bool).repeat(len(first), 1, 1),
            )
            for tree, own in zip(mask, parents.tolist(), strict=True):
                for node, parent in enumerate(own):
                    if 0 <= parent < node:
                        tree[node] |= tree[parent]
            if tampering.what == "mask" and tampering.forwards in range(tampering.when - 6, tampering.when):
                mask.view(-1)[int(tampering.place * mask.numel())] ^= True
            read = replace(read, tree_mask=mask)
        verify(kind, index, pool, read, write)

    engine._forward = forward


def judge(make_engine: Callable, seed: int, is_compiled: bool, **settings: object) -> Judged:
    """One run with one change."""
    engine = make_engine(mode="log", seed=seed % 5, num_pages=128, num_steps=4, **settings)
    checks = engine.canary.session.checks
    tampering, said, settle = Tampering(engine, seed), [], checks._prover.prove
    with_masks(engine, tampering)

    def settled(forwards, violations) -> Unproved:
        said.append(settle(forwards, violations) if is_compiled else Unproved.ALL)
        return said[-1]

    checks._prover.prove = settled
    refusal = ""
    try:
        engine.start("first", 9, chunks=2)
        engine.start("second", 5)
        for _ in range(2):
            engine.step()
        engine.decode()
        engine.step("second")
        engine.step()
        engine.finish("first")
        engine.canary.drain()
    except KVCanaryError as error:
        refusal = str(error)
    findings = [
        (f.code, f.pool, f.slot, f.position, f.site, f.step, f.reader, str(f.expected), str(f.found), f.evidence)
        for f in engine.canary.findings
    ]
    state, coverage = engine.canary.session.state, engine.canary.session.coverage
    requests = engine.canary.session.ledger.requests.values()
    kept = [state.records.tolist(), state.expected.tolist(), [pool.content_a.tolist() for pool in state.pools]]
    kept += [
        [request.row_lens.tolist(), request.judged, [request.chain(n).tolist() for n in range(len(request.ahead))]]
        for request in requests
    ]
    kept += [coverage.totals(), engine.canary.session.ledger.states.tolist()]
    return Judged(findings, said, kept, refusal)


@pytest.mark.parametrize(
    ("content", "runs"),
    [("rolling", 40), ("full", 12), ("write", 8), pytest.param("rolling", 600, marks=pytest.mark.slow)],
)
def test_both_ways_find_the_same_and_the_loop_is_content_exactly_where_nothing_is_found(make_engine, content, runs):
    """Same findings, same records, same lengths and counters; `NOTHING` in every settle where no rule fires."""
    seen: Counter[str] = Counter()
    for seed in range(runs):
        settings = {"content": content, "page_size": (1, 4)[seed % 2], "vocab_size": 1000}
        fast, plain = (judge(make_engine, seed, is_compiled, **settings) for is_compiled in (True, False))
        assert (fast.findings, fast.refusal) == (plain.findings, plain.refusal), seed
        assert fast.kept == plain.kept, seed
        if not plain.findings and not plain.refusal:
            assert set(fast.said) == {Unproved.NOTHING}, seed
        seen["clean" if not plain.findings else "found"] += 1
        seen.update(left.name for left in fast.said)
        seen.update(finding[0] for finding in plain.findings)
    if runs >= 40:
        assert min(seen[what] for what in ("clean", "found", "NOTHING", "READS", "ALL")) > 3, seen
        assert {"R3", "R12", "R13", "W5", "W6"} <= set(seen), seen
