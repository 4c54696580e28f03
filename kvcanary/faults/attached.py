"""A Target for any engine with an attached canary: what pools, rows and lifecycle calls give, without hooks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcanary.errors import KVCanaryError
from kvcanary.faults.target import Hook, MoveHook, Running, Setup, Target

if TYPE_CHECKING:
    from kvcanary.manager.manager import CanaryManager
    from kvcanary.pools.views import PoolView


class NeedsHarnessError(KVCanaryError, NotImplementedError):
    """The fault needs what only an engine's own harness can give."""


class AttachedTarget(Target):
    """What the canary itself knows of its engine. Rows are its own copies: faults of index tables need a harness."""

    def __init__(self, canary: CanaryManager, seed: int = 0, chosen: Mapping[str, Any] | None = None) -> None:
        self.canary, self.rng, self.turn, self.chosen = canary, random.Random(seed), seed, chosen or {}
        self.pools: Mapping[str, PoolView] = {pool.name: pool.view for pool in canary.session.state.pools}
        self.setup = Setup(page_size=canary.session.state.page_size, drafts="draft" in self.pools)
        self.prompts: list[Sequence[int]] = []
        self.strike = None

    @property
    def step(self) -> int:
        return self.canary.step + 1

    def running(self) -> Sequence[Running]:
        import torch

        from kvcanary.pools.slot_maps import slots_of_pages

        size = self.setup.page_size
        return [
            Running(
                name,
                request.committed_len,
                torch.from_numpy(slots_of_pages(request.pages, size)),
                tuple(request.pages),
            )
            for name, request in self.canary.session.ledger.requests.items()
            if request.committed_len and not request.released
        ]

    def free_pages(self) -> Sequence[int]:
        held = {page for request in self.canary.session.ledger.requests.values() for page in request.pages}
        return [page for page in range(1, self.pools["target"].num_pages) if page not in held]

    def before(self, kind: str, hook: Hook) -> None:
        raise _needs_harness(f"a hook before {kind}")

    def after(self, kind: str, hook: Hook) -> None:
        raise _needs_harness(f"a hook behind {kind}")

    def on_move(self, hook: MoveHook) -> None:
        raise _needs_harness("a hook before moves")

    def submit(self, tokens: Sequence[int], new_tokens: int) -> str:
        raise _needs_harness("a new request")

    def cancel(self, request_id: str) -> None:
        raise _needs_harness("the end of a request")


def _needs_harness(what: str) -> NeedsHarnessError:
    return NeedsHarnessError(f"the fault needs {what}: pass a target of the engine's own, which implements Target")
