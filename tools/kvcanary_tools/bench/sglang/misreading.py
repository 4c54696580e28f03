"""Faults in what SGLang's attention reads, there while its canary asks it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def rows_shifted(query: Any, batch: Any) -> Any:
    """Each row reads by the table of the one before it."""
    batch.req_pool_indices = batch.req_pool_indices.roll(1)
    return query


def one_less(query: Any, batch: Any) -> Any:
    """A decoding row leaves out its last entry."""
    if batch.forward_mode.is_decode():
        batch.seq_lens = batch.seq_lens - 1
    return query


def scaled_twice(query: Any, batch: Any) -> Any:
    return query * 2


MISREADINGS: dict[str, Callable[[Any, Any], Any]] = {
    harm.__name__: harm for harm in (rows_shifted, one_less, scaled_twice)
}


OF_DRAFT = "draft_"  # in front of a name: in the draft's attention


@contextmanager
def misreading(host: Any, name: str) -> Iterator[None]:
    """The backend reads otherwise; name: "" for as it should."""
    runner, harm = host.scheduler.tp_worker.model_runner, name.removeprefix(OF_DRAFT)
    if harm != name:
        runner = host.scheduler.draft_worker.draft_worker.draft_runner
    backend = runner.attn_backend
    right = backend.forward

    def forward(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = copy.copy(forward_batch)
        return right(MISREADINGS[harm](q, batch), k, v, layer, batch, *args, **kwargs)

    if name:
        backend.forward = forward
    try:
        yield
    finally:
        if name:
            del backend.forward
