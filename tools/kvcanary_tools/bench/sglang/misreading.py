"""Faults in what SGLang's attention reads, there while its canary asks it; and one of its own, which is mended here."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


def rows_shifted(query: Any, batch: Any, layer: Any) -> Any:
    """Each row reads by the table of the one before it."""
    batch.req_pool_indices = batch.req_pool_indices.roll(1)
    return query


def one_less(query: Any, batch: Any, layer: Any) -> Any:
    """A decoding row leaves out its last entry."""
    if batch.forward_mode.is_decode():
        batch.seq_lens = batch.seq_lens - 1
    return query


def scaled_twice(query: Any, batch: Any, layer: Any) -> Any:
    return query * 2


def window_forgotten(query: Any, batch: Any, layer: Any) -> Any:
    layer.sliding_window_size = -1
    return query


HARMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    harm.__name__: harm for harm in (rows_shifted, one_less, scaled_twice, window_forgotten)
}
MISREADINGS = [name for name in HARMS if name != window_forgotten.__name__]  # of any layers


OF_DRAFT = "draft_"  # in front of a name: in the draft's attention
AS_IT_IS = "as_it_is"  # with a fault of SGLang's own
READING = ("forward_extend", "forward_decode")


def read_by_map(backend: Any) -> None:
    """Mend torch's attention as SGLang 0.5.23 has it: it stores into slots that the map of layers with a window shows,
    and reads these layers in the slots that rows name, which are others as soon as one of them is freed.
    """
    for name in READING:
        setattr(backend, name, functools.partial(_by_map, backend, getattr(backend, name)))


def _by_map(
    backend: Any, forward: Callable[..., Any], q: Any, k: Any, v: Any, layer: Any, *args: Any, **own: Any
) -> Any:
    pool, rows = backend.token_to_kv_pool, backend.req_to_token_pool
    if pool.layers_mapping[layer.layer_id][1]:
        shown = pool.translate_loc_from_full_to_swa(rows.req_to_token)
        backend.req_to_token_pool = SimpleNamespace(req_to_token=shown)
    try:
        return forward(q, k, v, layer, *args, **own)
    finally:
        backend.req_to_token_pool = rows


@contextmanager
def _as_it_is(backend: Any) -> Iterator[None]:
    """Without the mend, where there is one."""
    mended = {name: vars(backend).pop(name) for name in READING if name in vars(backend)}
    try:
        yield
    finally:
        vars(backend).update(mended)


@contextmanager
def misreading(host: Any, name: str) -> Iterator[None]:
    """The backend reads otherwise; name: "" for as it should."""
    runner, harm = host.scheduler.tp_worker.model_runner, name.removeprefix(OF_DRAFT)
    if harm != name:
        runner = host.scheduler.draft_worker.draft_worker.draft_runner
    backend = runner.attn_backend
    if name == AS_IT_IS:
        with _as_it_is(backend):
            yield
        return
    right = backend.forward

    def forward(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch, layer = copy.copy(forward_batch), copy.copy(layer)
        return right(HARMS[harm](q, batch, layer), k, v, layer, batch, *args, **kwargs)

    if name:
        backend.forward = forward
    try:
        yield
    finally:
        if name:
            del backend.forward
