"""A small pool under a canary of its own, whose decode is a replay over static buffers, for faults of what is captured.

No engine is needed: the captured body runs again, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcanary.faults.target import Target

if TYPE_CHECKING:
    from torch import Tensor

    from kvcanary.captured.buffers import Batch, StaticBuffers
    from kvcanary.captured.substep import CapturedSubstep
    from kvcanary.manager.manager import CanaryManager
    from kvcanary.pools.views import PoolView

NAME, LIVE = "replayed", "live"
LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 2, 4, 4, 2, 8
ROWS, INDICES = 3, 16  # of the captured batch, one of which is live
PROMPT_LEN = 3
FIRST = PAGE_SIZE  # slot of the row's first entry
Change = Callable[["StaticBuffers"], None]  # of what a replay finds in its buffers


def replay(target: Target, change: Change) -> None:
    """A prompt is written, and its next token by a replay in whose buffers something is changed."""
    import torch

    from kvcanary.captured.buffers import StaticBuffers, empty_batch
    from kvcanary.pools.views import PoolView

    k, v = ([torch.zeros(PAGES * PAGE_SIZE, HEADS, DIM) for _ in range(LAYERS)] for _ in range(2))
    with own_canary(target, PoolView(NAME, k, v, PAGE_SIZE)) as canary:
        buffers = StaticBuffers.allocate(ROWS, PROMPT_LEN + ROWS, INDICES)
        substeps = {kind: canary.registry.add(NAME, kind, 0, buffers) for kind in ("prefill", "decode")}
        for substep in substeps.values():
            buffers.fill(empty_batch(buffers))
            _forward(substep)
        canary.arm()
        canary.admit(LIVE, list(range(PROMPT_LEN + 1)))
        canary.on_alloc(LIVE, [1])
        _step(canary, substeps["prefill"], 0, PROMPT_LEN, lambda buffers: None)
        _step(canary, substeps["decode"], PROMPT_LEN, PROMPT_LEN + 1, change)


@contextmanager
def own_canary(target: Target, view: PoolView) -> Iterator[CanaryManager]:
    """Over a pool of the fault's own, with the settings of the one that the target has."""
    from kvcanary.manager.manager import CanaryManager

    canary = CanaryManager(replace(target.canary.config, content="full", mode="raise"), [view])
    try:
        yield canary
    finally:
        canary.detach()


def _step(canary: CanaryManager, substep: CapturedSubstep, start: int, end: int, change: Change) -> None:
    """One replay that writes positions [start, end), and the check behind it."""
    canary.begin_step(canary.step + 1)
    canary.registry.load(substep, _batch(canary, start, end))
    if substep.buffers is not None:
        change(substep.buffers)
    _forward(substep)
    canary.collect(canary.end_step())


def _batch(canary: CanaryManager, start: int, end: int) -> Batch:
    import torch

    from kvcanary.captured.buffers import Batch

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    uid = canary.session.ledger.known([LIVE])[0].uid
    return Batch(
        indptr=numbers(0, end),
        indices=FIRST + torch.arange(end),
        bounds=numbers(0, end - start),
        slots=FIRST + torch.arange(start, end),
        tokens=torch.arange(start, end),
        positions=torch.arange(start, end),
        prefix_lens=numbers(start),
        uids=numbers(uid),
    )


def _forward(substep: CapturedSubstep) -> None:
    """The captured body: K and V follow from token, position and layer."""
    import torch

    forward = substep.forward
    place = torch.arange(HEADS * DIM).view(HEADS, DIM)
    seeds = (131 * forward.tokens + 7 * forward.positions)[:, None, None].float()
    substep.open()
    for layer in range(LAYERS):
        substep.store(layer, (seeds + layer + place).sin(), (seeds + layer - place).cos())
    substep.close()
