"""What attention inside SGLang really reads: known entries in slots that nobody has, by the layer's own forward.

As in vLLM (kvcanary/adapters/vllm/attention_probe.py): before a server answers, a prompt, a chunk behind it and one
token a row go through the first and the last layer of its pool, and of a draft's. Rows of `req_to_token` and lengths
are ours; how they are read is SGLang's: its backend's metadata, its kernel, its scales. Layers with a window are asked
in slots that the map shows, of other numbers than rows name.

Where SGLang has captured its decodes, the same is asked of a graph that is captured as SGLang captures, with a backend
of its own: what SGLang's own graphs hold stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.hosted.probing import (
    PATHS,
    ROWS,
    Found,
    InGraphs,
    ask,
    free_pages,
    in_a_graph,
    is_given,
    too_large,
)
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Layers
from kvcanary.adapters.sglang.compatibility import BATCH, CONTEXT, DECODES, GRAPHS, NEEDED_OF, PROBES
from kvcanary.pools.views import PoolView
from kvcanary.probe.forwards import ProbeForward
from kvcanary.probe.reader import probe_pool
from kvcanary.records.graph_cache import Replays

#: What makes attention of a layer another function.
OTHERWISE = ("logit_cap", "is_cross_attention", "use_irope")


def probe_layers(canary: PagedCanary, runner: Any, server_args: Any, slot_maps: Sequence[Tensor | None]) -> None:
    """Ask the layers of every group. KVCorruptionError in mode raise. slot_maps: by group, as of `Part`"""
    for group, slot_map in zip(canary.groups, slot_maps, strict=True):
        [pool] = group.layers
        make = functools.partial(_Asked, runner, server_args, pool, group.window, slot_map)
        if ask(canary, group, pool, make) and captures_decodes(runner):
            ask(canary, group, pool, functools.partial(make, is_captured=True))


def captures_decodes(runner: Any) -> bool:
    """Whether a runner has captured its forwards of one token a row, which no server that drafts has."""
    mode = getattr(getattr(runner, "decode_cuda_graph_runner", None), "capture_forward_mode", None)
    return mode is not None and bool(mode.is_decode())


class _Asked:
    """Layers of one pool.

    window:   of them, 0: they see all tokens;  slot_map: where they keep the slots that rows name, None: there
    is_captured: in a graph
    """

    def __init__(
        self,
        runner: Any,
        server_args: Any,
        layers: Layers,
        window: int,
        slot_map: Tensor | None,
        is_captured: bool = False,
    ) -> None:
        names, view = layers.names, layers.view
        self._window, self._map, self._is_captured = window, slot_map, is_captured
        known = {f"layer {own.layer_id}": own for own in runner.model.modules() if hasattr(own, "tp_q_head_num")}
        self._layers, self._runner, self._view = [known[name] for name in names], runner, view
        chunk = getattr(server_args, "chunked_prefill_size", None) or 0
        self._budget = chunk if chunk > 0 else int(runner.req_to_token_pool.req_to_token.shape[1])

    def why_not(self) -> str | None:
        """Why they cannot be asked; None: they can."""
        view = self._view
        if gone := missing(NEEDED_OF[PROBES] + NEEDED_OF[GRAPHS] * self._is_captured):
            return "; ".join(gone)
        if not view.v:
            return "its layers keep no K and V of their own"
        for layer in self._layers:
            odd = [name for name in OTHERWISE if is_given(getattr(layer, name, None))]
            if odd:
                return f"its layers have {odd[0]}"
            shape = layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
            if shape != (view.kv_heads, view.head_dim, view.head_dim):
                return "K and V differ in size"
        if self._map is not None and len(self._map) <= view.page_size * self._pages.stop:
            return "rows name fewer slots than its layers have"
        if self._is_captured and max(self._runner.decode_cuda_graph_runner.capture_bs, default=0) < ROWS:
            return f"no graph of {ROWS} rows is captured"
        return too_large(view, *self._room)

    @property
    def _room(self) -> tuple[int, int, int]:
        num_rows, longest = self._runner.req_to_token_pool.req_to_token.shape
        return self._budget, longest, num_rows - 1

    @property
    def _pages(self) -> range:
        return free_pages(self._view, self._room, self._window)

    def probe(self) -> Found | None:
        """What the first forward that reads something else than its row has read."""
        first, table, pages = self._layers[0], self._runner.req_to_token_pool.req_to_token, self._pages
        own = float(first.scaling), self._runner.dtype, self._window or None, self._budget
        held = table[1 : 1 + ROWS].clone()
        with _mapped(self._map, self._view, pages) as named:
            attend = ProbedLayers(self._layers, self._runner, named)
            try:
                if not self._is_captured:
                    return probe_pool(self._view, attend, pages, first.tp_q_head_num, PATHS, *own)
                captured = captured_layers(attend, self._runner)
                return in_a_graph(probe_pool(self._view, captured, pages, first.tp_q_head_num, ["decode"], *own))
            finally:
                table[1 : 1 + ROWS] = held


@contextmanager
def _mapped(slot_map: Tensor | None, view: PoolView, pages: range) -> Iterator[Mapping[int, int]]:
    """Meanwhile the map shows the slots of these pages, each page in place of the one before; gives by slot how rows
    name it. Slots of padding are where they are.
    """
    size, first = view.page_size, view.null_slots
    padding, own = range(first), [page * size + offset for page in pages for offset in range(size)]
    if slot_map is None:
        yield {slot: slot for slot in (*padding, *own)}
        return
    named = [*padding, *own[size:], *own[:size]]
    places = torch.tensor(named, device=slot_map.device)
    held = slot_map[places].clone()
    slot_map[places] = torch.tensor([*padding, *own], dtype=slot_map.dtype, device=slot_map.device)
    try:
        yield dict(zip((*padding, *own), named, strict=True))
    finally:
        slot_map[places] = held


class ProbedLayers:
    """`kvcanary.probe.reader.Attend` over layers of one pool, by rows 1 to 3 of SGLang's table.

    named: how rows name each slot
    """

    def __init__(self, layers: Sequence[Any], runner: Any, named: Mapping[int, int]) -> None:
        self._layers, self._runner, self._named = layers, runner, named
        self._batch, self._context = import_module(BATCH), import_module(CONTEXT)
        self._names = {one.name for one in fields(self._batch.ForwardBatch)}

    def __call__(self, forward: ProbeForward, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, backend = self.batch_of(forward), self._runner.attn_backend
        with self.within(backend):
            backend.init_forward_metadata(batch)
            values = [value.flatten(1).to(self.device) for value in (q, k, v)]
            return self.attend(layer, values, batch).view(q.shape)

    @property
    def device(self) -> torch.device:
        return self._runner.req_to_token_pool.req_to_token.device  # type: ignore[no-any-return]

    def within(self, backend: Any) -> Any:
        """Layers attend by it meanwhile."""
        return self._context.forward_context(self._context.ForwardContext(attn_backend=backend))

    def attend(self, layer: int, values: Sequence[Tensor], batch: Any) -> Tensor:
        """values: q, k, v, [n, heads * head_dim] each."""
        return self._layers[layer](*values, batch)  # type: ignore[no-any-return]

    def batch_of(self, forward: ProbeForward) -> Any:
        """SGLang's batch, whose rows are in its table."""
        table = self._runner.req_to_token_pool.req_to_token
        for row, slots in enumerate(forward.slots):
            names = [self._named[slot] for slot in slots]
            table[1 + row, : len(slots)] = torch.tensor(names, dtype=table.dtype, device=table.device)
        lens, written = [*map(len, forward.slots)], [self._named[slot] for slot in forward.written]
        rows = range(1, 1 + len(lens))
        made = self.made(forward.path, [*rows], lens, forward.num_new, written, forward.positions())
        translator = self._runner.kv_index_translator
        translator.own_plan(made).bind(made, translator)  # slots of every pool, as backends look them up
        return made

    def made(
        self, path: str, rows: list[int], lens: list[int], new: Sequence[int], written: list[int], places: list[int]
    ) -> Any:
        """SGLang's batch without its plan.

        rows: of the table, lens: entries of each with its new ones, new: of these;  written, places: slot and position
        of each new entry
        """
        device, modes = self.device, self._batch.ForwardMode
        past = [length - more for length, more in zip(lens, new, strict=True)]
        ints, longs = (
            functools.partial(torch.tensor, dtype=kind, device=device) for kind in (torch.int32, torch.int64)
        )
        given: dict[str, Any] = {
            "forward_mode": modes.DECODE if path == "decode" else modes.EXTEND, "batch_size": len(lens),
            "input_ids": longs([0] * sum(new)), "req_pool_indices": longs(rows),
            "seq_lens": longs(lens), "seq_lens_cpu": torch.tensor(lens), "out_cache_loc": longs(written),
            "seq_lens_sum": sum(lens), "orig_seq_lens": ints(lens), "positions": longs(places),
            "req_to_token_pool": self._runner.req_to_token_pool, "token_to_kv_pool": self._runner.token_to_kv_pool,
            "attn_backend": self._runner.attn_backend,
            "spec_algorithm": getattr(self._runner, "spec_algorithm", None),
        }  # fmt: skip
        if path != "decode":
            given |= {
                "extend_num_tokens": sum(new), "extend_seq_lens": ints(new), "extend_prefix_lens": ints(past),
                "extend_start_loc": ints([0, *accumulate(new)][:-1]), "extend_seq_lens_cpu": [*new],
                "extend_prefix_lens_cpu": past,
            }  # fmt: skip
        return self._batch.ForwardBatch(**{name: own for name, own in given.items() if name in self._names})


def captured_layers(layers: ProbedLayers, runner: Any) -> InGraphs:
    """The same, in graphs of a size that SGLang captures, with padding behind the rows."""
    size = min(size for size in runner.decode_cuda_graph_runner.capture_bs if size >= ROWS)
    backend, replays = runner._get_attention_backend(), Replays(layers.device)
    backend.init_cuda_graph_state(size, size)
    return InGraphs(layers, lambda layer, like: _Graph(layers, runner, backend, layer, size, like, replays))


class _Graph:
    """`Replayed`: attention of one layer over a batch of padding alone, into whose tensors others are written."""

    #: What a graph has of a batch, by SGLang's names; how a row of padding begins is the backend's to say.
    HELD = ("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "positions")

    def __init__(
        self,
        layers: ProbedLayers,
        runner: Any,
        backend: Any,
        layer: int,
        size: int,
        like: Sequence[Tensor],
        replays: Replays,
    ) -> None:
        """size: rows;  like: q, k and v, [any, heads * head_dim] each"""
        self._layers, self._layer, self._backend, self._size = layers, layer, backend, size
        self._fill, none = int(backend.get_cuda_graph_seq_len_fill_value()), [0] * size
        self._batch = layers.made("decode", none, [self._fill] * size, [1] * size, none, none)
        self._values = [torch.zeros(size, own.shape[1], dtype=own.dtype, device=layers.device) for own in like]
        self._out = torch.zeros_like(self._values[0])
        runner.kv_index_translator.bind_runner_slots(self._batch)
        self._view_of = import_module(DECODES).build_replay_fb_view
        self._launch = functools.partial(replays.run, layer, self._attend)
        with layers.within(backend):
            backend.init_forward_metadata_out_graph(self._batch, in_capture=True)
            for _ in range(2):  # as it is, then captured
                self._launch()

    def _attend(self) -> None:
        self._backend.init_forward_metadata_in_graph(self._batch)
        self._out.copy_(self._layers.attend(self._layer, self._values, self._batch).view(self._out.shape))

    def __call__(self, forward: ProbeForward, values: Sequence[Tensor]) -> Tensor:
        """What attention gives for the rows of a forward of one token a row."""
        own, batch = self._layers.batch_of(forward), self._batch
        n = own.batch_size
        for name in self.HELD:
            held = getattr(batch, name)
            held.fill_(self._fill if name.startswith("seq_lens") else 0)
            held[:n] = getattr(own, name)
        for held, value in zip(self._values, values, strict=True):
            held[:n] = value
        with self._layers.within(self._backend):
            self._backend.init_forward_metadata_out_graph(self._view(own))
            self._launch()
        return self._out[:n]

    def _view(self, own: Any) -> Any:
        """What SGLang's backend is told of a batch before a replay."""
        held = {name: getattr(self._batch, name) for name in self.HELD}
        buffers = SimpleNamespace(**held, encoder_lens=None, mamba_track_indices=None)
        given = {
            "forward_batch": own, "buffers": buffers, "bs": self._size, "raw_bs": own.batch_size,
            "num_tokens": self._size, "global_num_tokens_cpu": None, "seq_len_fill_value": self._fill,
            "capture_forward_mode": own.forward_mode, "is_encoder_decoder": False,
        }  # fmt: skip
        known = inspect.signature(self._view_of).parameters
        return self._view_of(**{name: one for name, one in given.items() if name in known})
