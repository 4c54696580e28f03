"""Ranks under torchrun: which of them this process is, and how all of them run what the first one is asked for."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from kvcanary.ranks import RanksDisagreeError
from spec_engine.engine import Engine
from spec_engine.errors import ConfigError
from spec_engine.request import TokenEvent

#: What torchrun tells each process that it starts.
RANK, NUM_RANKS, LOCAL_RANK = "RANK", "WORLD_SIZE", "LOCAL_RANK"
IDLE = timedelta(days=3650)  # nobody asks for anything: the others wait


@dataclass(frozen=True)
class Ranks:
    """This process among those that hold parts of one model.

    compares: gloo, of the agreement of ranks (`Engine(ranks=...)`);  calls: gloo, by which the first tells the others
    """

    rank: int
    compares: dist.ProcessGroup
    calls: dist.ProcessGroup


def num_ranks() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ[NUM_RANKS]) if dist.is_torchelastic_launched() else 1  # others set WORLD_SIZE too


def join_ranks(device: str) -> Ranks | None:
    """Meet the other processes that torchrun has started; None where it has not, or started one alone.

    From then on "cuda" is the GPU of this rank. ConfigError where the machine has fewer GPUs than ranks.
    """
    if num_ranks() == 1:
        return None
    is_cuda, local = device.startswith("cuda"), int(os.environ[LOCAL_RANK])
    if is_cuda and local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local} of this machine needs a GPU of its own, there are {torch.cuda.device_count()}",
            "start as many processes as there are GPUs: torchrun --nproc-per-node N",
        )
    if is_cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    groups = dist.new_group(backend="gloo"), dist.new_group(backend="gloo", timeout=IDLE)
    return Ranks(int(os.environ[RANK]), *groups)


class Leader:
    """Stands for the engine of the first rank: what changes it is told to the others before each step.

    They are called in the same order between the same steps, so that their engines decide alike.
    """

    def __init__(self, engine: Engine, calls: dist.ProcessGroup) -> None:
        self._engine, self._group = engine, calls
        self._calls: list[tuple[str, Any, Any]] = []  # since the last step

    @property
    def engine(self) -> Engine:
        """This object, as who serves knows it."""
        return cast(Engine, self)

    def submit(self, *args: Any, **kwargs: Any) -> str:
        """As of the engine; what is refused is nobody else's business."""
        request_id = self._engine.submit(*args, **kwargs)
        self._calls.append(("submit", args, kwargs))
        return request_id

    def cancel(self, request_id: str) -> TokenEvent | None:
        """As of the engine."""
        self._calls.append(("cancel", (request_id,), {}))
        return self._engine.cancel(request_id)

    def step(self) -> list[TokenEvent]:
        """As of the engine, on all ranks."""
        self._tell([*self._calls, ("step", (), {})])
        self._calls.clear()
        return self._engine.step()

    def end(self) -> None:
        """The others may end."""
        self._tell(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _tell(self, calls: list[tuple[str, Any, Any]] | None) -> None:
        dist.broadcast_object_list([calls], dist.get_global_rank(self._group, 0), self._group)


def follow(engine: Engine, calls: dist.ProcessGroup) -> None:
    """Run what the first rank is asked for, until it ends. Signals are for the first rank, which finishes its work.

    What the engine raises; RanksDisagreeError where the first rank has ended without a word.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    first, told = dist.get_global_rank(calls, 0), [None]
    while True:
        try:
            dist.broadcast_object_list(told, first, calls)
        except RuntimeError as error:
            raise RanksDisagreeError(
                "the first rank has ended without a word", step=engine.metrics.num_steps
            ) from error
        if told[0] is None:
            return
        for name, args, kwargs in told[0]:
            getattr(engine, name)(*args, **kwargs)
