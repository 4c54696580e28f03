"""What attention inside vLLM really reads: known entries in blocks that nobody has, by the layer's own forward.

Before a worker serves, a few short forwards go through its first and its last layer of attention, and through those of
a draft: a prompt, a chunk behind it, one token a row. Block tables and lengths are ours; how they are read is vLLM's:
its metadata builder, its kernel, its scales. What comes out says which entries were read (kvcanary/probe/known.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.hosted.probing import PATHS, Found, ask, free_pages, is_given, too_large
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.vllm.compatibility import BACKEND, COMMON, CONTEXT, PROBED_SIDE
from kvcanary.pools.views import PoolView
from kvcanary.probe.forwards import ProbeForward
from kvcanary.probe.reader import probe_pool

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
            ask(canary, group, pool, make)


class _Asked:
    """Layers of one pool.

    names: of the layers;  spec: of vLLM's group;  window: of it, 0: none
    """

    def __init__(
        self, runner: Any, vllm_config: Any, names: Sequence[str], view: PoolView, spec: Any, window: int
    ) -> None:
        context = runner.compilation_config.static_forward_context
        self._layers, self._view, self._spec = {name: context[name] for name in names}, view, spec
        own = _attention_of(runner, names[0])
        self._window = window
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
        return too_large(view, self._budget, config.model_config.max_model_len, config.scheduler_config.max_num_seqs)

    def probe(self) -> Found | None:
        """What the first forward that reads something else than its row has read."""
        attend, first = ProbedLayers(self._layers, self._builder, self._vllm_config), next(iter(self._layers.values()))
        own = float(first.impl.scale), self._vllm_config.model_config.dtype, self._window or None, self._budget
        return probe_pool(self._view, attend, free_pages(self._view), first.num_heads, PATHS, *own)


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
            return own(*values).view(q.shape)  # type: ignore[no-any-return]

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
        names = {one.name for one in fields(self._metadata_of)}
        return self._metadata_of(**{name: own for name, own in given.items() if name in names})


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
