"""The EAGLE-1/2 head: one decoder layer over the token's embedding and the target's hidden state.

At position p it reads the embedding of token p+1 and the target's final hidden state of position p, and
returns an estimate of the hidden state of position p+1: the target's own lm_head turns it into logits, and
the next draft step takes it in place of the target's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_engine.models.config import CheckpointError, ModelConfig
from spec_engine.models.decoder import Decoder, DecoderLayer, DecoderOutput, KVAccess, RotaryTable, is_fused


class Eagle(nn.Module):
    kind = "eagle"
    token_offset, ahead = 1, 0  # slot p holds token p+1, so there are as many rows as committed tokens

    def __init__(
        self, config: ModelConfig, target: Decoder, fc_bias: bool = False, own_embedding: bool = False
    ) -> None:
        super().__init__()
        check_fits(config, target)
        hidden = config.hidden_size
        self.config = config
        self.num_layers, self.num_kv_heads, self.head_dim = 1, config.num_kv_heads, config.head_dim
        self.tap_layers: tuple[int, ...] = ()
        self.num_draft_vocab = config.vocab_size
        self.fc_weight = nn.Parameter(torch.empty(hidden, 2 * hidden))
        self.fc_bias = nn.Parameter(torch.empty(hidden)) if fc_bias else None
        self.layer = DecoderLayer(config, 0, input_norm=False)
        self.embed_weight = nn.Parameter(torch.empty(config.vocab_size, hidden)) if own_embedding else None
        self.rotary = own_rotary(config, target)
        self._target = (target,)  # a tuple, so that the target is no submodule of its head

    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, kv: KVAccess) -> Tensor:
        (target,) = self._target
        embedding = F.embedding(input_ids, target.embed_weight if self.embed_weight is None else self.embed_weight)
        x = linear(torch.cat((embedding, hidden), -1), self.fc_weight, self.fc_bias)
        rotary = target.rotary if self.rotary is None else self.rotary
        return self.layer(x, rotary(positions), kv)

    def features(self, output: DecoderOutput) -> Tensor:
        return output.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target[0].logits(hidden)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        return ids

    def hf_names(self) -> dict[str, list[tuple[str, int]]]:
        names = {"fc_weight": [("fc.weight", self.config.hidden_size)]}
        if self.fc_bias is not None:
            names["fc_bias"] = [("fc.bias", self.config.hidden_size)]
        if self.embed_weight is not None:
            names["embed_weight"] = [("embed_tokens.weight", self.config.vocab_size)]
        return names | self.layer.hf_names("layer.", "layers.0.")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, size] times the transpose of weight [m, size], plus bias [m]; by our kernels where nobody trains it."""
    if not is_fused(x) or weight.requires_grad:
        return F.linear(x, weight, bias)
    from spec_engine.models import fused  # an engine on a CPU loads no kernels

    return fused.linear(x, weight, bias)


def check_fits(config: ModelConfig, target: Decoder) -> None:
    """Raises where a head cannot stand on this target."""
    theirs = target.config
    for name, ours, wanted in (
        ("hidden_size", config.hidden_size, theirs.hidden_size),
        ("target_hidden_size", config.target_hidden_size, theirs.hidden_size),
        ("vocab_size", config.vocab_size, theirs.vocab_size),
    ):
        if ours != wanted:
            raise CheckpointError(f"the draft head's {name} must be the target's, got {ours} and {wanted}")


def own_rotary(config: ModelConfig, target: Decoder) -> RotaryTable | None:
    """The head's angles for every position of the target, None where they are the target's own."""
    theirs = target.config
    own, targets = ((one.rope, one.head_dim, one.rotary_dim) for one in (config, theirs))
    if own == targets:
        return None
    return RotaryTable(config.rope, config.head_dim, theirs.max_position_embeddings, config.rotary_dim)
