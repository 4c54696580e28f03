"""The llama-family decoder: Llama, Mistral, Qwen2 and Qwen3, over a flat list of tokens.

The decoder knows nothing of pages or batches. It calls `kv.attend(layer, q, k, v)` once a layer, and whoever
stands behind that (the paged pool, a dense cache, training) decides where keys and values live.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_engine.models.config import ModelConfig, RopeScaling, rope_frequencies


class KVAccess(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v of this forward's tokens and returns the attention of q over what it may see.

        q: [n, heads, head_dim], k and v: [n, kv_heads, head_dim], q and k already rotated.
        Returns [n, heads, head_dim].
        """
        ...


class DecoderOutput(NamedTuple):
    hidden: Tensor  # [n, hidden_size], after the final norm; of the wanted tokens alone, where not all are
    taps: Tensor | None  # [n, hidden_size * len(tap_layers)], the residual stream at the input of those layers


class Decoder(nn.Module):
    """Tokens and positions in, hidden states out; `logits` is apart so that only wanted rows are projected."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_weight = _weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm_weight = _weight(config.hidden_size)
        self.lm_head_weight = (
            self.embed_weight if config.tie_word_embeddings else _weight(config.vocab_size, config.hidden_size)
        )
        self.rotary = RotaryTable(config.rope, config.head_dim, config.max_position_embeddings, config.rotary_dim)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVAccess,
        tap_layers: tuple[int, ...] = (),
        wanted: Tensor | None = None,
    ) -> DecoderOutput:
        """``wanted``: [m] int64, the tokens whose hidden states are asked for; None: all.

        Of the others the last layer keeps keys and values alone: most of a layer, where a prompt's end is wanted.
        """
        last = self.config.num_layers - 1
        hidden = F.embedding(input_ids, self.embed_weight)
        rotation = self.rotary(positions)
        taps = []
        for layer in self.layers:
            if layer.layer in tap_layers:
                taps.append(hidden)
            hidden = layer(hidden, rotation, kv, wanted if layer.layer == last else None)
        hidden = rms_norm(hidden, self.norm_weight, self.config.rms_norm_eps)
        return DecoderOutput(hidden, torch.cat(taps, -1) if taps else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size], by our kernels in float32, else in the model's own numbers."""
        return (_kernels().logits if is_fused(hidden) else F.linear)(hidden, self.lm_head_weight)

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint; a tied matrix counts once, also where it is laid out twice in memory."""
        tied = {"lm_head_weight"} if self.config.tie_word_embeddings else set()
        return sum(weight.numel() for name, weight in self.named_parameters() if name not in tied)

    def hf_names(self) -> dict[str, list[tuple[str, int]]]:
        """Parameter name -> the tensors of a Hugging Face checkpoint, with their rows, that it stacks."""
        config = self.config
        names = {"embed_weight": [("model.embed_tokens.weight", config.vocab_size)]}
        for number, layer in enumerate(self.layers):
            names |= layer.hf_names(f"layers.{number}.", f"model.layers.{number}.")
        names["norm_weight"] = [("model.norm.weight", config.hidden_size)]
        if not config.tie_word_embeddings:
            names["lm_head_weight"] = [("lm_head.weight", config.vocab_size)]
        return names


class MixingLayer(nn.Module):
    """What every layer has around what mixes its tokens: the norm before, output product, residuals, norm and MLP."""

    def __init__(self, config: ModelConfig, layer: int, input_norm: bool = True) -> None:
        super().__init__()
        self.config, self.layer, self.eps = config, layer, config.rms_norm_eps
        self.norm_shape = (config.hidden_size,)
        self.input_norm_weight = _weight(config.hidden_size) if input_norm else None
        #: Sums a product over all ranks, in place, where each holds a part of the layer.
        self.reduce: Callable[[Tensor], object] | None = None

    def add_output(self, mixed_size: int) -> None:
        """The weights behind what mixes, of which a token has so many numbers."""
        config, hidden = self.config, self.config.hidden_size
        self.o_weight = _weight(hidden, mixed_size)
        self.o_bias = _weight(hidden) if config.o_bias else None
        self.post_norm_weight = _weight(hidden)
        self.gate_up_weight = _weight(2 * config.intermediate_size, hidden)
        self.down_weight = _weight(hidden, config.intermediate_size)

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Output product, residual, norm, MLP, residual; mixed: [n, ...] of mixed_size numbers."""
        if is_fused(mixed):
            return _kernels().finish(self, hidden, mixed)
        hidden = hidden + self._summed(F.linear(mixed.flatten(1), self.o_weight, self.o_bias))
        x = F.rms_norm(hidden, self.norm_shape, self.post_norm_weight, self.eps)
        gate, up = F.linear(x, self.gate_up_weight).chunk(2, -1)
        return hidden + self._summed(F.linear(F.silu(gate) * up, self.down_weight))

    def _summed(self, product: Tensor) -> Tensor:
        if self.reduce is not None:
            self.reduce(product)
        return product


class DecoderLayer(MixingLayer):
    """Attention. q, k, v are one product and so are gate and up: on a CPU the calls cost more than the arithmetic."""

    def __init__(self, config: ModelConfig, layer: int, input_size: int | None = None, input_norm: bool = True) -> None:
        super().__init__(config, layer, input_norm)
        hidden, heads_size = config.hidden_size, config.num_heads * config.head_dim
        self.head_split = (config.num_heads + config.num_kv_heads, config.num_kv_heads)
        self.qk_split = (config.num_heads, config.num_kv_heads)
        self.num_heads_all = config.num_heads + 2 * config.num_kv_heads
        self.half_dim = config.head_dim // 2
        self.qkv_weight = _weight(config.qkv_size, input_size or hidden)
        self.qkv_bias = _weight(config.qkv_size) if config.qkv_bias else None
        self.q_norm_weight = _weight(config.head_dim) if config.qk_norm else None
        self.k_norm_weight = _weight(config.head_dim) if config.qk_norm else None
        self.add_output(heads_size)
        self.gate_weight = _weight(heads_size, hidden) if config.output_gate else None

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], kv: KVAccess, wanted: Tensor | None = None
    ) -> Tensor:
        """hidden [n, size] -> the same of every token, or of those ``wanted`` [m]; all keys and values are stored."""
        q, k, v = self.project(hidden, rotation)
        attention = kv.attend(self.layer, q, k, v)
        if self.gate_weight is not None and self.input_norm_weight is not None:
            x = rms_norm(hidden, self.input_norm_weight, self.eps)
            attention = attention * F.linear(x, self.gate_weight).sigmoid().view_as(attention)
        if wanted is not None:
            hidden, attention = hidden[wanted], attention[wanted]
        return self.finish(hidden, attention)

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, the joint product and the rotation: x [n, input_size] -> q, k, v by head."""
        if is_fused(x):
            return _kernels().project(self, x, rotation)
        if self.input_norm_weight is not None:
            x = rms_norm(x, self.input_norm_weight, self.eps)
        qkv = F.linear(x, self.qkv_weight, self.qkv_bias).view(x.shape[0], self.num_heads_all, 2 * self.half_dim)
        qk, v = qkv.split_with_sizes(self.head_split, 1)
        if self.q_norm_weight is not None:
            qk = self._normed(qk)
        cos, sin = rotation
        qk = torch.addcmul(qk * cos, qk.roll(self.half_dim, -1), sin)
        q, k = qk.split_with_sizes(self.qk_split, 1)
        return q, k, v

    def _normed(self, qk: Tensor) -> Tensor:
        q, k = qk.split_with_sizes(self.qk_split, 1)
        shape = (2 * self.half_dim,)
        q = F.rms_norm(q, shape, self.q_norm_weight, self.eps)
        return torch.cat((q, F.rms_norm(k, shape, self.k_norm_weight, self.eps)), 1)

    def hf_names(self, ours: str, theirs: str) -> dict[str, list[tuple[str, int]]]:
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, mlp = config.hidden_size, config.intermediate_size
        names = {
            "input_norm_weight": [("input_layernorm.weight", hidden)],
            "qkv_weight": [(f"self_attn.{p}_proj.weight", rows) for p, rows in (("q", q), ("k", kv), ("v", kv))],
            "qkv_bias": [(f"self_attn.{p}_proj.bias", rows) for p, rows in (("q", q), ("k", kv), ("v", kv))],
            "q_norm_weight": [("self_attn.q_norm.weight", config.head_dim)],
            "k_norm_weight": [("self_attn.k_norm.weight", config.head_dim)],
            "gate_weight": [("self_attn.gate_proj.weight", q)],
            "o_weight": [("self_attn.o_proj.weight", hidden)],
            "o_bias": [("self_attn.o_proj.bias", hidden)],
            "post_norm_weight": [("post_attention_layernorm.weight", hidden)],
            "gate_up_weight": [("mlp.gate_proj.weight", mlp), ("mlp.up_proj.weight", mlp)],
            "down_weight": [("mlp.down_proj.weight", hidden)],
        }
        present = {name for name, parameter in self.named_parameters() if parameter is not None}
        return {
            ours + name: [(theirs + part, rows) for part, rows in parts]
            for name, parts in names.items()
            if name in present
        }


class RotaryTable(nn.Module):
    """cos and signed sin of every position, so that a forward looks its angles up once.

    With sin negated in the first half, rotating is `x * cos + roll(x, head_dim / 2) * sin`. Positions past the last
    take its angles: draft tokens may lie past the end of the context, and none of those is ever committed.
    """

    table: Tensor  # [max_positions, 2 * head_dim]

    def __init__(self, rope: RopeScaling, head_dim: int, max_positions: int, rotary_dim: int = 0) -> None:
        """``rotary_dim``: numbers of a head that are rotated, the first half of them those of its first half; 0: all"""
        super().__init__()
        self.head_dim = head_dim
        table = _rotary_table(rope, head_dim, rotary_dim or head_dim, max_positions)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.clamp_max(len(self.table) - 1)
        rows = F.embedding(positions, self.table).view(positions.shape[0], 2, 1, self.head_dim)
        cos, sin = rows.unbind(1)
        return cos, sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, size] over the root of its mean square, times weight [size]."""
    return _kernels().normed(x, weight, eps) if is_fused(x) else F.rms_norm(x, weight.shape, weight, eps)


def is_fused(x: Tensor) -> bool:
    """Whether our kernels compute a layer: on a GPU, outside of training, below float64."""
    return x.is_cuda and not x.requires_grad and x.dtype is not torch.float64


@cache
def _kernels() -> ModuleType:
    """A decoder on a CPU loads none."""
    from spec_engine.models import fused

    return fused


def _rotary_table(rope: RopeScaling, head_dim: int, rotary_dim: int, max_positions: int) -> Tensor:
    # float32 angles, as transformers computes them, whatever the model's dtype.
    turned = rope_frequencies(rope, rotary_dim)
    still = [0.0] * (head_dim // 2 - len(turned))
    frequencies = torch.tensor([*turned, *still], dtype=torch.float32, device="cpu")
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device="cpu"), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), -1)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))
