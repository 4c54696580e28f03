"""Attention that can tell what it has read: the K/V of the mock models, and the judgement of what comes back.

One KV head of eight numbers, of which the first four count. A key is large at position 0 alone; a value is (token,
position, 1, layer). The first query head asks for position 0 and gets its value; the second asks for nothing and gets
the mean of every value that it may see. At position p that mean is (., p / 2, 1, layer) exactly when rows 0..p were
each read once. The other four numbers are a pattern of the row that no query asks for: rows differ in all their words,
as those of a real model do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_engine.models.config import CheckpointError, ModelConfig
from spec_engine.models.decoder import KVAccess

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 8
PROBED = 4  # of the numbers of a row
_LOUD = 1e4  # as a score it leaves every other position a weight of exactly 0


def mock_config(vocab_size: int, num_layers: int, max_positions: int, hidden_size: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=hidden_size,
        intermediate_size=1,
        num_layers=num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
    )


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise CheckpointError(f"a mock model's dtype must be float32 or float64, got {dtype}: token ids must be exact")


def probe(
    config: ModelConfig, dtype: torch.dtype, tokens: Tensor, positions: Tensor, kv: KVAccess
) -> tuple[Tensor, Tensor]:
    """Write this forward's rows in every layer and read: the token at position 0 and whether all was read right.

    tokens, positions: [n] int64. Returns [n] int64 and [n] bool. In float64 one wrong row among thousands shows, in
    float32 one among some hundreds.
    """
    n, place = len(tokens), positions.to(dtype)
    q = place.new_zeros(n, HEADS, HEAD_DIM)
    q[:, 0, 0] = 1.0
    k = place.new_zeros(n, KV_HEADS, HEAD_DIM)
    k[:, 0, 0] = (positions == 0) * _LOUD
    wanted = place.new_zeros(n, HEADS, PROBED)
    wanted[:, 1, 1] = place / 2
    wanted[..., 2] = 1.0
    tolerance = 16 * torch.finfo(dtype).eps * max(config.vocab_size, config.max_position_embeddings)
    intact = torch.ones(n, dtype=torch.bool, device=tokens.device)
    for layer in range(config.num_layers):
        v = torch.stack((tokens.to(dtype), place, torch.ones_like(place), torch.full_like(place, layer)), -1)
        k[:, 0, PROBED:], pattern = _pattern(tokens, place, 2 * layer), _pattern(tokens, place, 2 * layer + 1)
        got = kv.attend(layer, q, k, torch.cat((v, pattern), -1)[:, None])[..., :PROBED]
        if layer == 0:
            wanted[..., 0] = got[..., 0]
        wanted[..., 3] = layer
        intact &= ((got - wanted).abs() <= tolerance).all(-1).all(-1)  # NaN is never within
    return got[:, 0, 0].nan_to_num(-1.0).round().long(), intact


def _pattern(tokens: Tensor, place: Tensor, part: int) -> Tensor:
    """[n, HEAD_DIM - PROBED] in [-1, 1]: what lies in the rest of a row, by token, position, layer and K or V."""
    dims = torch.arange(1, HEAD_DIM - PROBED + 1, device=place.device)
    return torch.sin((1.7 * tokens + 0.3 * place + part + 1)[:, None] * dims)
