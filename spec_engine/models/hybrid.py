"""A toy hybrid decoder: some layers are a gated linear recurrence with one state a request instead of attention.

It exists to test what such models ask of an engine; no checkpoint format is read. Like attention, the recurrence knows
nothing of requests: it calls `states.recur(layer, decay, update)`, and who stands behind it keeps the states.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_engine.models.config import CheckpointError, ModelConfig
from spec_engine.models.decoder import Decoder, DecoderLayer, DecoderOutput, KVAccess


class StateAccess(Protocol):
    def recur(self, layer: int, decay: Tensor, update: Tensor) -> Tensor:
        """The state after each token of this forward: `decay * state before + update`, all [n, state_size].

        The state before is that of the token before in its row, of the parent in a tree, or the request's own.
        """
        ...


class HybridDecoder(Decoder):
    """A Decoder whose layers in `recurrent_layers` keep a state of `state_size` numbers.

    Attention layers and recurrent layers are counted apart: `num_kv_layers` is the depth of the KV pool,
    `num_state_layers` that of the RecurrentPool. The state of a verify's last accepted node has to be committed before
    the next forward begins, so such a model runs on the synchronous schedule.
    """

    def __init__(self, config: ModelConfig, recurrent_layers: Collection[int], state_size: int) -> None:
        super().__init__(config)
        if not set(recurrent_layers) <= set(range(config.num_layers)):
            raise CheckpointError(
                f"recurrent layers must lie within the model's {config.num_layers}, got {sorted(recurrent_layers)}"
            )
        if config.full_layers:
            raise CheckpointError(
                "attention layers of a recurrent model must have one window or none, "
                f"layers {list(config.full_layers)} see everything beside others with a window"
            )
        self.state_size, self.state_parts = state_size, {"state": state_size}
        self.num_state_layers = len(set(recurrent_layers))
        self.num_kv_layers = config.num_layers - self.num_state_layers
        kv_layers, state_layers = count(), count()
        self.layers = nn.ModuleList(
            RecurrentLayer(config, next(state_layers), state_size)
            if layer in recurrent_layers
            else DecoderLayer(config, next(kv_layers))
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
            recurrent = isinstance(layer, RecurrentLayer)
            hidden = layer(hidden, states) if recurrent else layer(hidden, rotation, kv)
        if wanted is not None:
            hidden = hidden[wanted]
        hidden = F.rms_norm(hidden, hidden.shape[-1:], self.norm_weight, self.config.rms_norm_eps)
        return DecoderOutput(hidden, torch.cat(taps, -1) if taps else None)


class RecurrentLayer(nn.Module):
    """A gated linear recurrence: state = forget * state + (1 - forget) * value, read out through a gate."""

    def __init__(self, config: ModelConfig, layer: int, state_size: int) -> None:
        super().__init__()
        self.layer, self.eps = layer, config.rms_norm_eps
        self.input_norm_weight = nn.Parameter(torch.empty(config.hidden_size))
        self.in_weight = nn.Parameter(torch.empty(3 * state_size, config.hidden_size))
        self.out_weight = nn.Parameter(torch.empty(config.hidden_size, state_size))

    def forward(self, hidden: Tensor, states: StateAccess) -> Tensor:
        x = F.rms_norm(hidden, hidden.shape[-1:], self.input_norm_weight, self.eps)
        forget, value, gate = F.linear(x, self.in_weight).chunk(3, -1)
        decay = forget.sigmoid()
        state = states.recur(self.layer, decay, (1 - decay) * value)
        return hidden + F.linear(state * F.silu(gate), self.out_weight)
