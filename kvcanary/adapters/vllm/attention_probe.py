"""What attention inside vLLM really reads: known entries in blocks that nobody has, by the layer's own forward.

Before a worker serves, a few short forwards go through its first and its last layer of attention: a prompt, a chunk
behind it, one token a row. Block tables and lengths are ours; how they are read is vLLM's: its metadata builder, its
kernel, its scales. What comes out says which entries were read (kvcanary/probe/known.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.report import pool_state
from kvcanary.adapters.vllm.compatibility import BACKEND, COMMON, CONTEXT, PROBED_SIDE
from kvcanary.pools.views import PoolView
from kvcanary.probe.forwards import ProbeForward, least_budget, probe_pages
from kvcanary.probe.misread import Misread
from kvcanary.probe.reader import misread_violation, probe_pool

PATHS = ("prefill", "chunk", "decode")
ROWS, ROWS_APART = 3, 2  # of its largest forward, and those that have pages in no order
#: What makes attention of a layer another function: of its implementation.
OTHERWISE = ("sinks", "alibi_slopes", "logits_soft_cap")


class ProbedLayers:
    """`kvcanary.probe.reader.Attend` over layers of one pool.

    layers: by name, as in the pool's view;  builder: of their metadata;  vllm_config: of the worker
    """

    def __init__(self, layers: Mapping[str, Any], builder: Any, vllm_config: Any) -> None:
        self._layers, self._builder, self._vllm_config = list(layers.items()), builder, vllm_config
        self._size = int(builder.kv_cache_spec.block_size)
        self._metadata_of = import_module(BACKEND).CommonAttentionMetadata
        self._within = import_module(CONTEXT).set_forward_context

    def __call__(self, forward: ProbeForward, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        name, own = self._layers[layer]
        device = own.kv_cache.device
        slots = torch.tensor(forward.written, dtype=torch.int64, device=device)
        metadata = self._builder.build(common_prefix_len=0, common_attn_metadata=self._common(forward, slots))
        values = [value.flatten(1).to(device) for value in (q, k, v)]
        with self._within({name: metadata}, self._vllm_config, slot_mapping={name: slots}):
            return own(*values).view(q.shape)

    def _common(self, forward: ProbeForward, slots: Tensor) -> Any:
        """vLLM's metadata of such a batch."""
        lens, starts = [*map(len, forward.slots)], [0, *accumulate(forward.num_new)]
        width = max(-(-length // self._size) for length in lens)
        blocks = [[slot // self._size for slot in row[:: self._size]] for row in forward.slots]
        table = [[*own, *[0] * (width - len(own))] for own in blocks]
        host = {"query_start_loc_cpu": starts, "seq_lens_cpu_upper_bound": lens}
        here = {"query_start_loc": starts, "seq_lens": lens, "block_table_tensor": table}
        given: dict[str, Any] = {name: torch.tensor(own, dtype=torch.int32) for name, own in host.items()}
        given |= {name: torch.tensor(own, dtype=torch.int32, device=slots.device) for name, own in here.items()}
        given |= {
            "num_reqs": len(lens), "num_actual_tokens": len(slots), "max_query_len": max(forward.num_new),
            "max_seq_len": max(lens), "slot_mapping": slots, "causal": True,
            "positions": torch.tensor(forward.positions(), device=slots.device),
        }  # fmt: skip
        return self._metadata_of(**{name: own for name, own in given.items() if name in _names(self._metadata_of)})


def _names(kind: Any) -> set[str]:
    return {one.name for one in fields(kind)}


def why_not(layers: Sequence[Any], view: PoolView, spec: Any, builder: Any, vllm_config: Any) -> str | None:
    """Why layers of a pool cannot be asked; None: they can.

    layers: the first and the last of the view;  spec: of vLLM's group;  builder: of their metadata
    """
    if not view.v:
        return "its layers keep no K and V of their own"
    if "Chunked" in type(spec).__name__ or "Cross" in type(spec).__name__:
        return f"what layers of a {type(spec).__name__} see was not tried"
    for layer in layers:
        odd = [name for name in OTHERWISE if _is_given(getattr(layer.impl, name, None))]
        if odd:
            return f"its layers have {odd[0]}"
        if getattr(layer, "calculate_kv_scales", False):
            return "its layers take their scales from what they see first"
        shape = layer.num_kv_heads, layer.head_size
        if shape != (view.kv_heads, view.head_dim) or getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
            return "K and V differ in size"
    if view.page_size % builder.kv_cache_spec.block_size:
        return "its blocks are larger than the pages of the pool"
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "a forward asks all workers of data parallelism"
    scheduler, num_pages = vllm_config.scheduler_config, probe_pages(view.page_size)
    longest = view.page_size * (num_pages // ROWS_APART)
    has_room = scheduler.max_num_batched_tokens >= least_budget(view.page_size)
    has_room &= vllm_config.model_config.max_model_len >= longest
    if not has_room or scheduler.max_num_seqs < ROWS or view.num_pages < _first_page(view) + num_pages:
        return f"two rows of {longest} entries in blocks of {view.page_size} are more than this worker has room for"
    unknown = _required() - _GIVEN
    return f"its metadata ask for {', '.join(sorted(unknown))}" if unknown else None


_GIVEN = {*COMMON, "query_start_loc_cpu", "num_reqs", "max_query_len", "max_seq_len"}


def _required() -> set[str]:
    kind = import_module(BACKEND).CommonAttentionMetadata
    return {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, int | float) and not value)


def _first_page(view: PoolView) -> int:
    """The first that is not the null block's."""
    return -(-view.null_slots // view.page_size)


def probe_layers(canary: PagedCanary, runner: Any, vllm_config: Any, groups: Sequence[Any]) -> None:
    """Ask the layers of every pool that the target stores, and tell what is wrong. KVCorruptionError in mode raise.

    groups: vLLM's, as the canary's are numbered
    """
    gone, coverage = missing(PROBED_SIDE), canary.coverage
    for group, own in zip(canary.groups, groups, strict=True):
        for pool in [pool for pool in group.layers if not pool.is_late]:
            try:
                layers = {name: runner.compilation_config.static_forward_context[name] for name in pool.names}
                ends = [*layers.values()][:: max(len(layers) - 1, 1)]
                builder = _builder_of(runner, pool.names[0])
                reason = "; ".join(gone) or why_not(ends, pool.view, own.kv_cache_spec, builder, vllm_config)
                found = None if reason else probe(layers, pool.view, builder, group.window, vllm_config)
            except Exception as error:  # of a backend that was not made for such a batch
                reason, found = f"{type(error).__name__}: {error}", None
            coverage.reader_probes += not reason
            coverage.not_probed = reason or coverage.not_probed
            if found is not None:
                violation = misread_violation(pool_state(canary, group, pool), canary.step, *found)
                canary.response.answer([violation], canary.step, coverage)


def _builder_of(runner: Any, layer: str) -> Any:
    """Who makes the metadata of a layer."""
    own = next(own for groups in runner.attn_groups for own in groups if layer in own.layer_names)
    return own.get_metadata_builder()


def probe(
    layers: Mapping[str, Any], view: PoolView, builder: Any, window: int, vllm_config: Any
) -> tuple[ProbeForward, int, Misread] | None:
    """What the first forward that reads something else than its row has read; None: all is right.

    layers: by name, of which `why_not` says nothing;  builder: of their metadata;  window: of the group, 0: none
    """
    attend, first = ProbedLayers(layers, builder, vllm_config), next(iter(layers.values()))
    pages = range(_first_page(view), _first_page(view) + probe_pages(view.page_size))
    scale, most = float(first.impl.scale), int(vllm_config.scheduler_config.max_num_batched_tokens)
    kind = vllm_config.model_config.dtype
    return probe_pool(view, attend, pages, first.num_heads, PATHS, scale, kind, window or None, most)
