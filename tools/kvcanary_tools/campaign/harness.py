"""Our engine as a fault sees it: its rows and pools, and hooks in front of and behind its forwards and moves.

A hook's plans are put into the forward itself, before the canary or attention sees it: what a fault changes there is
what the engine reads and writes by.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvcanary import CanaryManager, PoolView, ReadPlan, WritePlan
from kvcanary.faults.target import Call, Hook, Move, MoveHook, Running, Setup, Target
from spec_engine import Engine, SamplingParams
from spec_engine.core import ForwardBatch
from spec_engine.models.decoder import KVAccess
from spec_engine.step.hooks import Forwards, read_plan, write_plan


class EngineTarget(Target):
    """A spec_engine Engine with a canary."""

    def __init__(
        self,
        engine: Engine,
        setup: Setup,
        rng: random.Random,
        turn: int = 0,
        chosen: Mapping[str, Any] | None = None,
    ) -> None:
        if engine.canary is None:
            raise ValueError("a fault strikes an engine that has a canary: its mode must not be off")
        self.engine, self.setup, self.rng, self.turn = engine, setup, rng, turn
        self.chosen: Mapping[str, Any] = chosen or {}
        self.canary: CanaryManager = engine.canary
        self.pools: Mapping[str, PoolView] = {name: engine.view(pool) for name, pool in engine.pools.items()}
        self.prompts: list[Sequence[int]] = []
        self.strike = None
        self.is_stepping = False
        self._before: list[tuple[str, Hook]] = []
        self._after: list[tuple[str, Hook]] = []
        self._moves: list[MoveHook] = []
        watched = [engine.runner.forwards, *([engine.drafter.forwards] if engine.drafter is not None else [])]
        for forwards in watched:
            _watch(self, forwards)

    @property
    def step(self) -> int:
        return self.engine.metrics.num_steps + (not self.is_stepping)

    @property
    def is_decoding(self) -> bool:
        """Whether the next step is everybody's: nobody waits, and no prompt is half-way."""
        engine = self.engine
        return not engine.scheduler.waiting and all(request.is_prefilled for request in engine.running)

    def running(self) -> Sequence[Running]:
        table = self.engine.request_table.table
        return [
            Running(request.request_id, request.committed_len, table[request.row], tuple(request.pages))
            for request in self.engine.running
            if request.is_prefilled and request.committed_len and request.finish_reason is None
        ]

    def free_pages(self) -> Sequence[int]:
        held = {page for request in self.engine.running for page in request.pages}
        held |= set(self.engine.memory.cache.tree.pages)
        return [page for page in range(1, self.engine.allocator.num_pages + 1) if page not in held]

    def before(self, kind: str, hook: Hook) -> None:
        self._before.append((kind, hook))

    def after(self, kind: str, hook: Hook) -> None:
        self._after.append((kind, hook))

    def on_move(self, hook: MoveHook) -> None:
        self._moves.append(hook)

    def submit(self, tokens: Sequence[int], new_tokens: int) -> str:
        self.prompts.append(tokens)
        return self.engine.submit(tokens, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    # called by what is watched

    def run_before(self, call: Call) -> None:
        self._before = [(kind, hook) for kind, hook in self._before if kind != call.kind or not hook(call)]

    def run_after(self, call: Call) -> None:
        self._after = [(kind, hook) for kind, hook in self._after if kind != call.kind or not hook(call)]

    def run_moves(self, move: Move) -> None:
        self._moves = [hook for hook in self._moves if not hook(move)]


def _watch(target: EngineTarget, forwards: Forwards) -> None:
    """Let hooks run around the forwards and moves of one pool."""
    open_, move = forwards.open, forwards.pool.move
    forwards.open = _opened(target, forwards.pool.name, open_)  # type: ignore[method-assign]

    def moved(source: Tensor, destination: Tensor) -> None:
        reported = Move(forwards.pool.name, source, destination)
        target.run_moves(reported)
        move(reported.source, reported.destination)

    forwards.pool.move = moved  # type: ignore[method-assign]


def _opened(target: EngineTarget, pool: str, open_: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def opened(batch: ForwardBatch) -> Iterator[KVAccess]:
        call = Call(batch.kind, batch.index, pool, read_plan(batch), write_plan(batch))
        read, write = call.read, call.write
        target.run_before(call)
        _apply(batch, read, call.read, write, call.write)
        with open_(batch) as attention:
            yield attention
        target.run_after(call)

    return opened


#: By field of a plan, the field of a ForwardBatch that it is made from.
_READS = {"indptr": "kv_indptr", "indices": "kv_indices", "prefix_lens": "prefix_lens", "tree_mask": "tree_mask"}
_WRITES = {name: name for name in ("slots", "tokens", "positions", "parents")}


def _apply(batch: ForwardBatch, read: ReadPlan, new_read: ReadPlan, write: WritePlan, new_write: WritePlan) -> None:
    """Put what a hook changed into the forward, which model and attention go by."""
    changed: dict[str, Any] = {
        field: getattr(new, name)
        for old, new, fields in ((read, new_read, _READS), (write, new_write, _WRITES))
        for name, field in fields.items()
        if getattr(new, name) is not getattr(old, name)
    }
    if "kv_indptr" in changed:
        changed["kv_lens"] = tuple(torch.diff(changed["kv_indptr"]).tolist())
    for field, value in changed.items():
        object.__setattr__(batch, field, value)
