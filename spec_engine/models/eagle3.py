"""The EAGLE-3 head: one layer over three fused hidden states of the target, with a vocabulary of its own.

At position p it reads the embedding of token p+1 and features of position p: the target's residual stream
at three layers, fused by `fc`, or in later draft steps this layer's own output before its norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_engine.models.config import CheckpointError, ModelConfig
from spec_engine.models.decoder import Decoder, DecoderLayer, DecoderOutput, KVAccess, is_fused, rms_norm
from spec_engine.models.eagle import check_fits, linear, own_rotary


class Eagle3(nn.Module):
    kind = "eagle3"
    token_offset, ahead = 1, 0
    d2t: Tensor  # [num_draft_vocab] int64, target id minus draft id
    t2d: Tensor  # [vocab_size] bool, whether a target id has a draft id

    def __init__(self, config: ModelConfig, target: Decoder, own_embedding: bool = False) -> None:
        super().__init__()
        check_fits(config, target)
        hidden = config.hidden_size
        self.config = config
        self.num_layers, self.num_kv_heads, self.head_dim = 1, config.num_kv_heads, config.head_dim
        self.tap_layers = config.tap_layers or default_tap_layers(target.config.num_layers)
        self.num_draft_vocab = config.draft_vocab_size
        _check_taps(self.tap_layers, target.config.num_layers)
        self.fc_weight = nn.Parameter(torch.empty(hidden, hidden * len(self.tap_layers)))
        self.embed_norm_weight = nn.Parameter(torch.empty(hidden))
        self.hidden_norm_weight = nn.Parameter(torch.empty(hidden))
        self.layer = DecoderLayer(config, 0, input_size=2 * hidden, input_norm=False)
        self.norm_weight = nn.Parameter(torch.empty(hidden))
        self.lm_head_weight = nn.Parameter(torch.empty(config.draft_vocab_size, hidden))
        self.embed_weight = nn.Parameter(torch.empty(config.vocab_size, hidden)) if own_embedding else None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary = own_rotary(config, target)
        self._target = (target,)

    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, kv: KVAccess) -> Tensor:
        (target,) = self._target
        embedding = F.embedding(input_ids, target.embed_weight if self.embed_weight is None else self.embed_weight)
        rotary = target.rotary if self.rotary is None else self.rotary
        q, k, v = self.layer.project(self._joined(embedding, hidden), rotary(positions))
        return self.layer.finish(hidden, kv.attend(0, q, k, v))

    def _joined(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Both, each normed by its own weight, side by side: [n, 2 * hidden_size]."""
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        parts = ((embedding, self.embed_norm_weight), (hidden, self.hidden_norm_weight))
        if not is_fused(embedding) or self.embed_norm_weight.requires_grad:
            return torch.cat([F.rms_norm(part, (size,), weight, eps) for part, weight in parts], -1)
        from kvcanary_kernels.engine.layers import norm  # an engine on a CPU loads no kernels

        joined = embedding.new_empty(len(embedding), 2 * size)
        for (part, weight), out in zip(parts, joined.split(size, -1), strict=True):
            norm(part, weight, eps, normed=out)
        return joined

    def features(self, output: DecoderOutput) -> Tensor:
        if output.taps is None:
            raise ValueError(f"an EAGLE-3 head needs the target's forward to tap layers {self.tap_layers}, got no taps")
        return linear(output.taps, self.fc_weight)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(rms_norm(hidden, self.norm_weight, self.config.rms_norm_eps), self.lm_head_weight)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        return ids + self.d2t[ids]

    def check_vocabulary(self) -> None:
        """CheckpointError unless d2t maps draft ids to distinct target ids and t2d marks exactly those."""
        vocab_size = self.config.vocab_size
        ids = self.to_target_ids(torch.arange(self.num_draft_vocab, device=self.d2t.device))
        stray = ids[(ids < 0) | (ids >= vocab_size)]
        if len(stray):
            raise CheckpointError(f"d2t must map into the target's {vocab_size} tokens, it maps to {int(stray[0])}")
        twice = len(ids) - len(ids.unique())
        if twice:
            raise CheckpointError(f"d2t must map draft tokens to distinct target tokens, {twice} are mapped to twice")
        differing = int((marks(self.d2t, vocab_size) != self.t2d).sum())
        if differing:
            raise CheckpointError(f"t2d must mark exactly the tokens that d2t maps to, {differing} of them differ")

    def hf_names(self) -> dict[str, list[tuple[str, int]]]:
        config = self.config
        names = {
            "fc_weight": [("fc.weight", config.hidden_size)],
            "embed_norm_weight": [("midlayer.input_layernorm.weight", config.hidden_size)],
            "hidden_norm_weight": [("midlayer.hidden_norm.weight", config.hidden_size)],
            "norm_weight": [("norm.weight", config.hidden_size)],
            "lm_head_weight": [("lm_head.weight", config.draft_vocab_size)],
            "d2t": [("d2t", config.draft_vocab_size)],
            "t2d": [("t2d", config.vocab_size)],
        }
        if self.embed_weight is not None:
            names["embed_weight"] = [("embed_tokens.weight", config.vocab_size)]
        return names | self.layer.hf_names("layer.", "midlayer.")


def marks(d2t: Tensor, vocab_size: int) -> Tensor:
    """t2d: which target tokens have a draft token, `[vocab_size] bool`; ids out of range mark nothing."""
    ids = torch.arange(d2t.numel(), device=d2t.device) + d2t.flatten().long()
    return torch.isin(torch.arange(vocab_size, device=d2t.device), ids)


def default_tap_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer."""
    return (2, num_layers // 2, num_layers - 3)


def _check_taps(tap_layers: tuple[int, ...], num_layers: int) -> None:
    if list(tap_layers) != sorted(set(tap_layers)) or not all(0 <= layer < num_layers for layer in tap_layers):
        raise CheckpointError(
            f"tapped layers must ascend within the target's {num_layers} layers, got {list(tap_layers)}"
        )
