"""The hybrid decoder of Qwen3.5: three of four layers are a gated delta net with one state a request, no attention.

Like attention, such a layer knows nothing of requests: it calls `states.advance(layer, ...)`, and who stands behind it
keeps the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcanary_kernels.engine.delta_shape import DeltaShape, DeltaWeights
from spec_engine.models.config import CheckpointError, ModelConfig
from spec_engine.models.decoder import Decoder, DecoderLayer, DecoderOutput, KVAccess, MixingLayer, rms_norm


class StateAccess(Protocol):
    def advance(
        self, layer: int, x: Tensor, gates: Tensor, weights: DeltaWeights, shape: DeltaShape, eps: float
    ) -> Tensor:
        """What each token of this forward reads of the state after it, [n, shape.values]; arguments of `gated_delta`.

        The state before is that of the token before in its row, of the parent in a tree, or the request's own.
        """
        ...


def shape_of_size(size: int) -> DeltaShape:
    """One head, keys of one number, and the shortest convolution with which a state has ``size`` numbers."""
    for width in range(2, size):
        v_dim, rest = divmod(size - 2 * (width - 1), width)
        if rest == 0 and v_dim > 0:
            return DeltaShape(1, 1, 1, v_dim, width)
    raise CheckpointError(
        f"no gated delta net of one head has a state of {size} numbers: take an even number, 4 at least"
    )


class HybridDecoder(Decoder):
    """A Decoder whose layers ``config.delta_layers`` keep a state of ``config.delta.size`` numbers.

    Attention layers and others are counted apart: `num_kv_layers` is the depth of the KV pool, `num_state_layers` that
    of the RecurrentPool.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[int] = (), size: int = 0) -> None:
        """``layers``, ``size``: of a config that names none, which keep a state, of one head and so many numbers."""
        if layers:
            config = replace(config, delta=shape_of_size(size), delta_layers=tuple(layers))
        super().__init__(config)
        shape, layers = config.delta, config.delta_layers
        if shape is None or not layers:
            raise CheckpointError(f"a hybrid model must have layers with a gated delta net, got {shape} in {layers}")
        if not set(layers) <= set(range(config.num_layers)):
            raise CheckpointError(
                f"layers with a gated delta net must lie within the model's {config.num_layers}, got {list(layers)}"
            )
        if config.full_layers:
            raise CheckpointError(
                "attention layers of a hybrid model must have one window or none, "
                f"layers {list(config.full_layers)} see everything beside others with a window"
            )
        self.state_size = shape.size
        self.state_parts = {"conv": shape.window, "matrix": shape.size - shape.window}
        self.num_state_layers = len(set(layers))
        self.num_kv_layers = config.num_layers - self.num_state_layers
        kv_layers, state_layers = count(), count()
        self.layers = nn.ModuleList(
            DeltaLayer(config, shape, next(state_layers)) if layer in layers else DecoderLayer(config, next(kv_layers))
            for layer in range(config.num_layers)
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVAccess,
        tap_layers: tuple[int, ...],
        states: StateAccess,
        wanted: Tensor | None = None,
    ) -> DecoderOutput:
        hidden = F.embedding(input_ids, self.embed_weight)
        rotation = self.rotary(positions)
        taps = []
        for number, layer in enumerate(self.layers):
            if number in tap_layers:
                taps.append(hidden)
            hidden = layer(hidden, states) if isinstance(layer, DeltaLayer) else layer(hidden, rotation, kv)
        if wanted is not None:
            hidden = hidden[wanted]
        hidden = rms_norm(hidden, self.norm_weight, self.config.rms_norm_eps)
        return DecoderOutput(hidden, torch.cat(taps, -1) if taps else None)


class DeltaLayer(MixingLayer):
    """A gated delta net; inputs of the convolution, gates, and what corrects and decays are one product."""

    def __init__(self, config: ModelConfig, shape: DeltaShape, layer: int) -> None:
        super().__init__(config, layer)
        self.shape = shape
        self.in_split = shape.channels, shape.values + 2 * shape.v_heads
        self.in_weight = nn.Parameter(torch.empty(sum(self.in_split), config.hidden_size))
        self.conv_weight = nn.Parameter(torch.empty(shape.channels, shape.width))
        self.decay_weight, self.shift_weight = (nn.Parameter(torch.empty(shape.v_heads)) for _ in range(2))
        self.read_norm_weight = nn.Parameter(torch.empty(shape.v_dim))
        self.add_output(shape.values)

    def forward(self, hidden: Tensor, states: StateAccess) -> Tensor:
        """hidden [n, size] -> the same of every token; the states move on."""
        x = hidden if self.input_norm_weight is None else rms_norm(hidden, self.input_norm_weight, self.eps)
        x, gates = F.linear(x, self.in_weight).split_with_sizes(self.in_split, 1)
        weights = DeltaWeights(self.conv_weight, self.decay_weight, self.shift_weight, self.read_norm_weight)
        return self.finish(hidden, states.advance(self.layer, x, gates, weights, self.shape, self.eps))

    def hf_names(self, ours: str, theirs: str) -> dict[str, list[tuple[str, int]]]:
        shape, hidden, mlp = self.shape, self.config.hidden_size, self.config.intermediate_size
        v_heads = shape.v_heads
        return {
            ours + name: [(theirs + part, rows) for part, rows in parts]
            for name, parts in {
                "input_norm_weight": [("input_layernorm.weight", hidden)],
                "in_weight": [
                    (f"linear_attn.in_proj_{part}.weight", rows)
                    for part, rows in (("qkv", shape.channels), ("z", shape.values), ("b", v_heads), ("a", v_heads))
                ],
                "conv_weight": [("linear_attn.conv1d.weight", shape.channels)],
                "decay_weight": [("linear_attn.A_log", v_heads)],
                "shift_weight": [("linear_attn.dt_bias", v_heads)],
                "read_norm_weight": [("linear_attn.norm.weight", shape.v_dim)],
                "o_weight": [("linear_attn.out_proj.weight", hidden)],
                "post_norm_weight": [("post_attention_layernorm.weight", hidden)],
                "gate_up_weight": [("mlp.gate_proj.weight", mlp), ("mlp.up_proj.weight", mlp)],
                "down_weight": [("mlp.down_proj.weight", hidden)],
            }.items()
        }
