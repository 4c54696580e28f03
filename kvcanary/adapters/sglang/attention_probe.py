"""What attention inside SGLang really reads: known entries in slots that nobody has, by the layer's own forward.

As in vLLM (kvcanary/adapters/vllm/attention_probe.py): before a server answers, a prompt, a chunk behind it and one
token a row go through the first and the last layer of its pool, and of a draft's. Rows of `req_to_token` and lengths
are ours; how they are read is SGLang's: its backend's metadata, its kernel, its scales. Layers with a window are asked
in slots that the map shows, of other numbers than rows name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.hosted.probing import PATHS, ROWS, Found, ask, free_pages, is_given, too_large
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Layers
from kvcanary.adapters.sglang.compatibility import BATCH, CONTEXT, NEEDED_OF, PROBES
from kvcanary.pools.views import PoolView
from kvcanary.probe.forwards import ProbeForward
from kvcanary.probe.reader import probe_pool

#: What makes attention of a layer another function.
OTHERWISE = ("logit_cap", "is_cross_attention", "use_irope")


def probe_layers(canary: PagedCanary, runner: Any, server_args: Any, slot_maps: Sequence[Tensor | None]) -> None:
    """Ask the layers of every group. KVCorruptionError in mode raise. slot_maps: by group, as of `Part`"""
    for group, slot_map in zip(canary.groups, slot_maps, strict=True):
        [pool] = group.layers
        ask(canary, group, pool, functools.partial(_Asked, runner, server_args, pool, group.window, slot_map))


class _Asked:
    """Layers of one pool.

    window:   of them, 0: they see all tokens;  slot_map: where they keep the slots that rows name, None: there
    """

    def __init__(self, runner: Any, server_args: Any, layers: Layers, window: int, slot_map: Tensor | None) -> None:
        names, view = layers.names, layers.view
        self._window, self._map = window, slot_map
        known = {f"layer {own.layer_id}": own for own in runner.model.modules() if hasattr(own, "tp_q_head_num")}
        self._layers, self._runner, self._view = [known[name] for name in names], runner, view
        chunk = getattr(server_args, "chunked_prefill_size", None) or 0
        self._budget = chunk if chunk > 0 else int(runner.req_to_token_pool.req_to_token.shape[1])

    def why_not(self) -> str | None:
        """Why they cannot be asked; None: they can."""
        view = self._view
        if gone := missing(NEEDED_OF[PROBES]):
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
                return probe_pool(self._view, attend, pages, first.tp_q_head_num, PATHS, *own)
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
        table, own, backend = (
            self._runner.req_to_token_pool.req_to_token,
            self._layers[layer],
            self._runner.attn_backend,
        )
        for row, slots in enumerate(forward.slots):
            names = [self._named[slot] for slot in slots]
            table[1 + row, : len(slots)] = torch.tensor(names, dtype=table.dtype, device=table.device)
        batch, values = self._made(forward, table.device), [value.flatten(1).to(table.device) for value in (q, k, v)]
        with self._context.forward_context(self._context.ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata(batch)
            return own(*values, batch).view(q.shape)  # type: ignore[no-any-return]

    def _made(self, forward: ProbeForward, device: torch.device) -> Any:
        """SGLang's batch."""
        lens, new, modes = [*map(len, forward.slots)], forward.num_new, self._batch.ForwardMode
        past = [length - more for length, more in zip(lens, new, strict=True)]
        written = [self._named[slot] for slot in forward.written]
        ints, longs = (
            functools.partial(torch.tensor, dtype=kind, device=device) for kind in (torch.int32, torch.int64)
        )
        given: dict[str, Any] = {
            "forward_mode": modes.DECODE if forward.path == "decode" else modes.EXTEND, "batch_size": len(lens),
            "input_ids": longs([0] * sum(new)), "req_pool_indices": longs(range(1, 1 + len(lens))),
            "seq_lens": longs(lens), "seq_lens_cpu": torch.tensor(lens), "out_cache_loc": longs(written),
            "seq_lens_sum": sum(lens), "orig_seq_lens": ints(lens), "positions": longs(forward.positions()),
            "req_to_token_pool": self._runner.req_to_token_pool, "token_to_kv_pool": self._runner.token_to_kv_pool,
            "attn_backend": self._runner.attn_backend,
            "spec_algorithm": getattr(self._runner, "spec_algorithm", None),
        }  # fmt: skip
        if forward.path != "decode":
            given |= {
                "extend_num_tokens": sum(new), "extend_seq_lens": ints(new), "extend_prefix_lens": ints(past),
                "extend_start_loc": ints([0, *accumulate(new)][:-1]), "extend_seq_lens_cpu": [*new],
                "extend_prefix_lens_cpu": past,
            }  # fmt: skip
        made = self._batch.ForwardBatch(**{name: own for name, own in given.items() if name in self._names})
        translator = self._runner.kv_index_translator
        translator.own_plan(made).bind(made, translator)  # slots of every pool, as backends look them up
        return made
