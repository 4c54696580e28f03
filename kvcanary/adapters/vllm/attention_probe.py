"""What attention inside vLLM really reads: known entries in blocks that nobody has, by the layer's own forward.

Before a worker serves, a few short forwards go through its first and its last layer of attention, and through those of
a draft: a prompt, a chunk behind it, one token a row. Block tables and lengths are ours; how they are read is vLLM's:
its metadata builder, its kernel, its scales. What comes out says which entries were read (kvcanary/probe/known.py).

Where the worker captures the forwards of one token a row, the same is asked of a graph that is captured as vLLM
captures: over a batch of nothing, whose tensors the batch that counts is written into.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from itertools import accumulate
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
from kvcanary.adapters.vllm.compatibility import BACKEND, COMMON, CONTEXT, PROBED_SIDE
from kvcanary.pools.views import PoolView
from kvcanary.probe.forwards import ProbeForward
from kvcanary.probe.reader import probe_pool
from kvcanary.records.graph_cache import Replays

#: What makes attention of a layer another function: of its implementation.
OTHERWISE = ("sinks", "alibi_slopes", "logits_soft_cap")
_GIVEN = {*COMMON, "query_start_loc_cpu", "num_reqs", "max_query_len", "max_seq_len"}


def probe_layers(canary: PagedCanary, runner: Any, vllm_config: Any, groups: Sequence[Any]) -> None:
    """Ask the layers of every pool, those of a draft as well. KVCorruptionError in mode raise.

    groups: vLLM's, as the canary's are numbered
    """
    for group, own in zip(canary.groups, groups, strict=True):
        for pool in group.layers:
            make = functools.partial(
                _Asked, runner, vllm_config, pool.names, pool.view, own.kv_cache_spec, group.window
            )
            if ask(canary, group, pool, make) and not pool.is_late and captures_decodes(vllm_config):
                ask(canary, group, pool, functools.partial(make, is_captured=True))


def captures_decodes(vllm_config: Any) -> bool:
    """Whether a worker runs attention of one token a row within its graphs."""
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    return mode is not None and mode.decode_mode().name == "FULL"


class _Asked:
    """Layers of one pool.

    names: of the layers;  spec: of vLLM's group;  window: of it, 0: none;  is_captured: in a graph
    """

    def __init__(
        self,
        runner: Any,
        vllm_config: Any,
        names: Sequence[str],
        view: PoolView,
        spec: Any,
        window: int,
        is_captured: bool = False,
    ) -> None:
        context = runner.compilation_config.static_forward_context
        self._layers, self._view, self._spec = {name: context[name] for name in names}, view, spec
        own = _attention_of(runner, names[0])
        self._window, self._is_captured = window, is_captured
        self._builder, self._vllm_config = own.get_metadata_builder(), vllm_config
        self._budget = int(vllm_config.scheduler_config.max_num_batched_tokens)

    def why_not(self) -> str | None:
        """Why they cannot be asked; None: they can."""
        view, spec, config = self._view, type(self._spec).__name__, self._vllm_config
        if gone := missing(PROBED_SIDE):
            return "; ".join(gone)
        if not view.v:
            return "its layers keep no K and V of their own"
        if "Cross" in spec:
            return f"what layers of a {spec} see was not tried"
        if self._window < 0:
            return "its layers see the chunk of a token alone, which was not tried"
        for layer in self._layers.values():
            odd = [name for name in OTHERWISE if is_given(getattr(layer.impl, name, None))]
            if odd:
                return f"its layers have {odd[0]}"
            if getattr(layer, "calculate_kv_scales", False):
                return "its layers take their scales from what they see first"
            size_v = getattr(layer, "head_size_v", layer.head_size)
            if (layer.num_kv_heads, layer.head_size, size_v) != (view.kv_heads, view.head_dim, view.head_dim):
                return "K and V differ in size"
        if view.page_size % self._builder.kv_cache_spec.block_size:
            return "its blocks are larger than the pages of the pool"
        if config.parallel_config.data_parallel_size > 1:
            return "a forward asks all workers of data parallelism"
        unknown = _required() - _GIVEN
        if unknown:
            return f"its metadata ask for {', '.join(sorted(unknown))}"
        if self._is_captured and max(config.compilation_config.cudagraph_capture_sizes, default=0) < ROWS:
            return f"no graph of {ROWS} rows is captured"
        return too_large(view, *self._room)

    @property
    def _room(self) -> tuple[int, int, int]:
        config = self._vllm_config
        return self._budget, config.model_config.max_model_len, config.scheduler_config.max_num_seqs

    def probe(self) -> Found | None:
        """What the first forward that reads something else than its row has read."""
        layers, first = ProbedLayers(self._layers, self._builder, self._vllm_config), next(iter(self._layers.values()))
        own = float(first.impl.scale), self._vllm_config.model_config.dtype, self._window or None, self._budget
        pages = free_pages(self._view, self._room, self._window)
        if not self._is_captured:
            return probe_pool(self._view, layers, pages, first.num_heads, PATHS, *own)
        captured = captured_layers(layers, self._vllm_config)
        return in_a_graph(probe_pool(self._view, captured, pages, first.num_heads, ["decode"], *own))


class ProbedLayers:
    """`kvcanary.probe.reader.Attend` over layers of one pool.

    layers: by name, as in the pool's view;  builder: of their metadata;  vllm_config: of the worker
    """

    def __init__(self, layers: Mapping[str, Any], builder: Any, vllm_config: Any) -> None:
        self._layers, self._builder, self._vllm_config = list(layers.items()), builder, vllm_config
        self.block_size = int(builder.kv_cache_spec.block_size)
        self._metadata_of = import_module(BACKEND).CommonAttentionMetadata
        self._within = import_module(CONTEXT).set_forward_context

    def __call__(self, forward: ProbeForward, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values = [value.flatten(1).to(self.device) for value in (q, k, v)]
        batch = self.batch_of(forward)
        return self.attend(layer, self.metadata_of(batch), batch.slots, values).view(q.shape)

    @property
    def device(self) -> torch.device:
        return self._layers[0][1].kv_cache.device  # type: ignore[no-any-return]

    def batch_of(self, forward: ProbeForward) -> Batch:
        lens = [*map(len, forward.slots)]
        width = max(-(-length // self.block_size) for length in lens)
        blocks = [[slot // self.block_size for slot in row[:: self.block_size]] for row in forward.slots]
        table = [[*own, *[0] * (width - len(own))] for own in blocks]
        own = [0, *accumulate(forward.num_new)], lens, table, forward.written, forward.positions()
        return Batch.of(self.device, *own)

    def metadata_of(self, batch: Batch, max_seq_len: int | None = None, is_capture: bool = False) -> Any:
        """What vLLM's builder makes of a batch.

        max_seq_len: None: of the longest row;  is_capture: a graph is about to be captured with them
        """
        given = batch.described(max_seq_len)
        names = {one.name for one in fields(self._metadata_of)}
        common = self._metadata_of(**{name: own for name, own in given.items() if name in names})
        if is_capture:
            return self._builder.build_for_cudagraph_capture(common)
        return self._builder.build(common_prefix_len=0, common_attn_metadata=common)

    def attend(self, layer: int, metadata: Any, slots: Tensor, values: Sequence[Tensor]) -> Tensor:
        """slots: [n], where values (q, k, v, [n, heads * head_dim] each) are stored."""
        name, own = self._layers[layer]
        with self._within({name: metadata}, self._vllm_config, slot_mapping={name: slots}):
            return own(*values)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Batch:
    """What vLLM's runner knows of a batch.

    starts [rows + 1], lengths [rows], table [rows, blocks] int32;  slots, positions [n] int64
    starts_here, lengths_here: the first two on the host
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    slots: Tensor
    positions: Tensor
    starts_here: Tensor
    lengths_here: Tensor

    @classmethod
    def of(cls, device: torch.device, *values: Sequence[Any]) -> Batch:
        """values: of the first five."""
        kinds = (torch.int32,) * 3 + (torch.int64,) * 2
        here = [torch.tensor(own, dtype=kind) for own, kind in zip(values, kinds, strict=True)]
        return cls(*(own.to(device) for own in here), *here[:2])

    def described(self, max_seq_len: int | None) -> dict[str, Any]:
        """By vLLM's names."""
        return {
            "query_start_loc": self.starts, "seq_lens": self.lengths, "block_table_tensor": self.table,
            "slot_mapping": self.slots, "positions": self.positions, "query_start_loc_cpu": self.starts_here,
            "seq_lens_cpu_upper_bound": self.lengths_here, "num_reqs": len(self.lengths),
            "num_actual_tokens": len(self.slots), "max_query_len": int(self.starts_here.diff().max()),
            "max_seq_len": max_seq_len or int(self.lengths_here.max()), "causal": True,
        }  # fmt: skip


def captured_layers(layers: ProbedLayers, vllm_config: Any) -> InGraphs:
    """The same, in graphs of a size that vLLM captures, with padding behind the rows."""
    size = min(size for size in vllm_config.compilation_config.cudagraph_capture_sizes if size >= ROWS)
    longest, replays = int(vllm_config.model_config.max_model_len), Replays(layers.device)
    return InGraphs(layers, lambda layer, like: _Graph(layers, layer, size, longest, like, replays))


class _Graph:
    """`Replayed`: attention of one layer over a batch of padding alone, into whose tensors others are written."""

    def __init__(
        self, layers: ProbedLayers, layer: int, size: int, longest: int, like: Sequence[Tensor], replays: Replays
    ) -> None:
        """size: rows;  longest: entries that a row may have;  like: q, k and v, [any, heads * head_dim] each"""
        device, width = layers.device, -(-longest // layers.block_size)
        tensors = range(size + 1), [1] * size, [[0] * width] * size, [-1] * size, [0] * size
        self._layers, self._layer, self._batch = layers, layer, Batch.of(device, *tensors)
        self._values = [torch.zeros(size, own.shape[1], dtype=own.dtype, device=device) for own in like]
        self._out = torch.zeros_like(self._values[0])
        self._metadata = layers.metadata_of(self._batch, longest, is_capture=True)
        self._launch = functools.partial(replays.run, layer, self._attend)
        for _ in range(2):  # as it is, then captured
            self._launch()

    def _attend(self) -> None:
        given = self._layers.attend(self._layer, self._metadata, self._batch.slots, self._values)
        self._out.copy_(given.view(self._out.shape))

    def __call__(self, forward: ProbeForward, values: Sequence[Tensor]) -> Tensor:
        """What attention gives for the rows of a forward of one token a row."""
        own, batch = self._layers.batch_of(forward), self._batch
        n = len(own.lengths)
        for padded, nothing in (batch.starts, n), (batch.starts_here, n), (batch.lengths, 0), (batch.lengths_here, 0):
            padded[n:] = nothing
        for name in ("starts", "lengths", "slots", "positions", "starts_here", "lengths_here"):
            given = getattr(own, name)
            getattr(batch, name)[: len(given)] = given
        batch.table[:n, : own.table.shape[1]] = own.table
        for held, value in zip(self._values, values, strict=True):
            held[:n] = value
        self._layers.metadata_of(batch)  # into what the builder keeps for graphs
        self._launch()
        return self._out[:n]


def _attention_of(runner: Any, name: str) -> Any:
    """The group of attention that a layer is in: a draft's own one, where it has one."""
    owners = getattr(runner, "speculator", None), runner
    held = [own for owner in owners for groups in getattr(owner, "attn_groups", None) or () for own in groups]
    found = [own for own in held if name in own.layer_names]
    if not found:
        raise LookupError(f"{name} is in none of the runner's groups of attention")
    return found[0]


def _required() -> set[str]:
    kind = import_module(BACKEND).CommonAttentionMetadata
    return {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
