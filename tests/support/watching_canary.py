"""What recurrent states see of the canary of a watched engine with two rows."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.observed.state import RING
from kvcanary.calls.coverage import Coverage
from kvcanary.pools.launch_site import pack_site
from kvcanary_kernels.watch.walk import TAILS, Truth


class Launches:
    """Every forward has both rows; `chains` are those of what each stores."""

    def __init__(self, canary: Any, device: str) -> None:
        self._canary, self.numbers = canary, torch.tensor([0, 1], device=device)
        self.now = torch.zeros(6, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self.chains = torch.zeros(RING, 64, dtype=torch.int64, device=device)

    def read(self, site: tuple[str, int], num_tokens: int) -> None:
        """The next forward is there."""
        step = self._canary.step
        words = torch.tensor([2, num_tokens, step, pack_site(*site), step % RING, 0])
        self.now.copy_(words.pin_memory() if self.now.is_cuda else words, non_blocking=True)

    def beside(self, _: Any, most_rows: int, launch: Callable[[Tensor, Tensor], None]) -> None:
        launch(self.now, self.numbers[:most_rows])

    def stored_chains(self, _: Any) -> Tensor:
        return self.chains


def watching_canary(content: str, device: str = "cpu") -> Any:
    """Requests "a" and "b" have rows 0 and 1 and the numbers 11 and 12; nothing has been stored."""
    zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
    truth = Truth(zeros(2, TAILS + 2))
    truth.uids[:], truth.ends[:] = torch.tensor([11, 12]), 0
    memory = SimpleNamespace(
        seed=3, truth=truth, total=zeros(1), upload=functools.partial(_upload, device), device=torch.device(device)
    )
    canary = SimpleNamespace(
        memory=memory, step=0, events=[], beside=set(), num_rows=2, config=SimpleNamespace(content=content),
        coverage=Coverage(), groups=[0], steps=deque(maxlen=4), writers={11: "a", 12: "b"},
    )  # fmt: skip
    canary.launches = Launches(canary, device)
    return canary


def launched_by(canary: Any) -> Counter[tuple[Any, ...]]:
    """Counts what is launched from now on: by its key, but for where tensors lie, and rows that it is sized for."""
    seen, beside = Counter[tuple[Any, ...]](), canary.launches.beside

    def counted(key: tuple[Any, ...], most_rows: int, launch: Callable[[Tensor, Tensor], None]) -> None:
        seen[(*key[:3], most_rows)] += 1
        beside(key, most_rows, launch)

    canary.launches.beside = counted
    return seen


def no_rows() -> Any:
    """An empty forward, as canaries are prepared with."""
    starts, lengths = (torch.zeros(n, dtype=torch.int32) for n in (3, 2))
    return SimpleNamespace(lengths=lengths, starts=starts, num_tokens=0, numbers=())


def found_in(canary: Any) -> list[Any]:
    """The violations of the last step."""
    step = canary.steps[-1]
    events = [found for event in step.events for found in event.violations(step.number)]
    judges = sorted(canary.beside, key=lambda judge: judge.number)
    return events + [found for judge in judges for found in judge.violations(step)]


def _upload(device: str, values: Tensor) -> Tensor:
    return values if device == "cpu" else values.pin_memory().to(device, non_blocking=True)
