"""What a fault may use of the engine that it strikes: pools, rows, lifecycle calls, and hooks around forwards.

Faults of any engine need no more than this. An engine's harness is a `Target`; kvcanary imports no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvcanary.faults.strike import Strike

if TYPE_CHECKING:
    from torch import Tensor

    from kvcanary.manager.manager import CanaryManager
    from kvcanary.pools.plans import (
        ReadPlan,
        WritePlan,
    )
    from kvcanary.pools.views import PoolView


@dataclass(frozen=True)
class Setup:
    """Settings of the engine and its traffic, as far as a fault may depend on them.

    model: "random" (two layers, random weights, a draft that is told how much to get right), "hybrid" (random too, one
        layer is recurrent) or "embedded".
    drafts: whether anything drafts; topk, num_steps, num_draft_tokens: its tree; attend: "ancestors" or "columns".
    chunk: most prompt tokens in one forward; window: tokens that the target's attention sees, None: all.
    batch, prompt_len, new_tokens: requests at a time, and about how long; shared: leading tokens that prompts share.
    salts: of how many tenants the requests are; their prefixes are not to be shared.
    pages: of the pool, None: plenty; on_device: requests that its device has room for at a time, None: all lie there.
    context: longest prompt plus output, None: what the model was made for.
    content: of the canary, "full" or "rolling"; quarantine: steps, of the canary too.
    """

    model: str = "random"
    page_size: int = 4
    drafts: bool = True
    topk: int = 2
    num_steps: int = 3
    num_draft_tokens: int | None = None
    attend: str = "ancestors"
    adaptive: bool = False
    backend: str = "torch"
    schedule: str = "sync"
    graphs: bool = False
    prefix_cache: bool = True
    chunk: int = 512
    host_pages: int = 0
    window: int | None = None
    batch: int = 2
    prompt_len: int = 24
    new_tokens: int = 20
    shared: int = 0
    salts: int = 1
    pages: int | None = None
    on_device: int | None = None
    context: int | None = None
    new_token_ratio: float = 1.0
    content: str = "full"
    quarantine: int = 4

    @property
    def most_accepted(self) -> int:
        """Entries of a row that one step may make final."""
        return self.num_steps + 1 if self.drafts else 1

    @property
    def has_tree_pages(self) -> bool:
        """Whether draft branches lie on pages of their own."""
        return self.drafts and self.topk > 1 and self.page_size > 1


@dataclass(frozen=True, eq=False)
class Running:
    """A request past its prefill.

    slots: [width] int64, its row of the engine's index table, which may be changed; entries [0, committed_len) are
        final, those of [0, len(pages) * page_size) are granted.
    """

    request_id: str
    committed_len: int
    slots: Tensor
    pages: Sequence[int]


@dataclass(eq=False)
class Call:
    """One forward about to run, or just run; a hook before it may put other plans here: the engine goes by them."""

    kind: str
    index: int
    pool: str
    read: ReadPlan
    write: WritePlan


@dataclass(eq=False)
class Move:
    """A copy of rows within a pool: what moves by these arrays may be changed, what the canary is told is not."""

    pool: str
    source: Tensor
    destination: Tensor


Hook = Callable[[Call], bool]
MoveHook = Callable[[Move], bool]


class Target(Protocol):
    """A running engine with a canary, as a fault sees it.

    step: number of the engine step that runs, or of the next one between two steps.
    rng: every choice of a fault comes from here; turn: number of the run, for what should be tried one by one.
    chosen: choices that the caller has made ("layer", "pool", "part"), which are not drawn.
    pools: by name, those that the canary protects; canary: for lifecycle calls that the engine does not make.
    prompts: what `submit` was given, in order; strike: what was recorded.
    """

    setup: Setup
    rng: random.Random
    turn: int
    chosen: Mapping[str, Any]
    pools: Mapping[str, PoolView]
    canary: CanaryManager
    prompts: list[Sequence[int]]
    strike: Strike | None

    @property
    def step(self) -> int: ...

    def running(self) -> Sequence[Running]:
        """Requests past their prefill, which the next step goes on with."""
        ...

    def free_pages(self) -> Sequence[int]:
        """Pages that nobody holds, in the order in which they are granted; the last ones stay free longest."""
        ...

    def before(self, kind: str, hook: Hook) -> None:
        """Call `hook` before every forward of this kind, until it returns True."""
        ...

    def after(self, kind: str, hook: Hook) -> None:
        """Call `hook` after every forward of this kind, its stores made, until it returns True."""
        ...

    def on_move(self, hook: MoveHook) -> None:
        """Call `hook` before rows are moved within a pool, until it returns True."""
        ...

    def submit(self, tokens: Sequence[int], new_tokens: int) -> str:
        """A new request; its id."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request now."""
        ...

    def record(
        self,
        writer: str | frozenset[str] | None = None,
        code: str | None = None,
        *,
        late: bool = False,
        **place: Any,
    ) -> None:
        """The fault has struck: the first time counts. `late`: this step's tokens are sampled already."""
        if self.strike is None:
            self.strike = Strike(self.step + late, place, writer, code)
