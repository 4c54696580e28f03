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


def all_kept(backend: Any, batch: Any, prepare: Callable[[Any, Any], None]) -> None:
    """Nobody tells a replay of its batch: it reads what it was captured over."""


def slots_kept(backend: Any, batch: Any, prepare: Callable[[Any, Any], None]) -> None:
    """A replay has lengths of its own, and reads slots that it was captured over."""
    before = backend.cuda_graph_kv_indices.clone()
    prepare(backend, batch)
    backend.cuda_graph_kv_indices.copy_(before)


GRAPHS = "graphs"  # as they are
#: What goes wrong before replays of a graph alone.
OF_GRAPHS = {GRAPHS: lambda backend, batch, prepare: prepare(backend, batch)} | {
    f"graphs_{harm.__name__}": harm for harm in (all_kept, slots_kept)
}


@contextmanager
def _captured(runner: Any, name: str) -> Iterator[None]:
    """A replay is told of its batch otherwise. On a CPU it is taken for one by a server that captures nothing."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    kind, held = type(runner.attn_backend), runner.decode_cuda_graph_runner
    prepare = kind.init_forward_metadata_out_graph

    def prepared(backend: Any, batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            prepare(backend, batch, in_capture=True)
        else:
            OF_GRAPHS[name](backend, batch, prepare)

    if not getattr(held, "capture_bs", ()):
        shown = SimpleNamespace(capture_forward_mode=ForwardMode.DECODE, capture_bs=[1, 2, 4, 8])
        runner.decode_cuda_graph_runner = shown
    kind.init_forward_metadata_out_graph = prepared
    try:
        yield
    finally:
        kind.init_forward_metadata_out_graph, runner.decode_cuda_graph_runner = prepare, held


@contextmanager
def misreading(host: Any, name: str) -> Iterator[None]:
    """The backend reads otherwise; name: "" for as it should."""
    runner, harm = host.scheduler.tp_worker.model_runner, name.removeprefix(OF_DRAFT)
    if name in OF_GRAPHS:
        with _captured(runner, name):
            yield
        return
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
