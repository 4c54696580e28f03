"""The other side of `KVAccess` while training: plain dense attention, for the very modules that the engine serves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_engine.models.decoder import Decoder


class CausalKV:
    """Rows of equal length, each attending causally within itself; nothing is kept."""

    def __init__(self, batch: int, length: int, dropout: float = 0.0) -> None:
        self.batch, self.length, self.dropout = batch, length, dropout

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.reshape(self.batch, self.length, *x.shape[1:]).transpose(1, 2).to(v.dtype) for x in (q, k, v))
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2).flatten(0, 1)
        return F.dropout(out, self.dropout) if self.dropout else out


class ChainKV:
    """Training-time test of a draft head: every position starts a chain of drafts of its own.

    Call 0 is the true shifted sequence, causal. Call j holds the j-th draft token of each chain: row p attends
    true positions 0..p and the chain's own earlier calls 1..j.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.reshape(self.batch, self.length, *x.shape[1:]).transpose(1, 2).to(v.dtype) for x in (q, k, v))
        self.keys.append(k.repeat_interleave(group, 1))
        self.values.append(v.repeat_interleave(group, 1))
        scale = q.shape[-1] ** -0.5
        scores = q @ self.keys[0].transpose(-1, -2) * scale
        future = torch.ones(self.length, self.length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) * scale for key in self.keys[1:]]
        weights = torch.cat([scores, *own], -1).float().softmax(-1).to(v.dtype)
        out = weights[..., : self.length] @ self.values[0]
        for j, value in enumerate(self.values[1:]):
            out = out + weights[..., self.length + j, None] * value
        return out.transpose(1, 2).flatten(0, 1)


class CacheKV:
    """A dense cache [layers, batch, max_len]: a token sees the cached tokens at positions up to its own."""

    def __init__(self, model: Decoder, batch: int, max_len: int, dtype: torch.dtype) -> None:
        config = model.config
        shape = (config.num_layers, batch, max_len, config.num_kv_heads, config.head_dim)
        device = model.embed_weight.device
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = torch.arange(batch, device=device)[:, None]
        self.columns = torch.arange(max_len, device=device)
        self.group = config.num_heads // config.num_kv_heads

    def place(self, positions: Tensor) -> None:
        """The [batch, n] positions of the next forward."""
        self.positions = positions
        seen = self.columns <= positions[..., None]  # [batch, n, max_len]
        self.mask = seen[:, None].repeat(1, 1, self.group, 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        batch, n = self.positions.shape
        keys[self.rows, self.positions] = k.reshape(batch, n, *k.shape[1:]).to(keys.dtype)
        values[self.rows, self.positions] = v.reshape(batch, n, *v.shape[1:]).to(keys.dtype)
        # Query heads of one KV head become more queries of it: [batch, kv_heads, group * n, head_dim].
        heads, head_dim = q.shape[1:]
        grouped = q.reshape(batch, n, heads // self.group, self.group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(
            grouped.to(keys.dtype), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self.mask
        )
        return out.unflatten(2, (self.group, n)).permute(0, 3, 1, 2, 4).reshape(batch * n, heads, head_dim).to(q.dtype)


@torch.no_grad()
def continue_greedily(model: Decoder, prompts: list[Tensor], num_new: int, dtype: torch.dtype) -> Tensor:
    """The target's own greedy continuation of each prompt, [len(prompts), num_new]."""
    device = model.embed_weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    cache = CacheKV(model, len(prompts), longest + num_new, dtype)
    # Short rows are padded behind their end; a position is overwritten before anything may see it.
    positions = torch.arange(longest, device=device).expand(len(prompts), longest)
    cache.place(positions)
    hidden = model(ids.flatten(), positions.flatten(), cache).hidden.unflatten(0, ids.shape)
    last = hidden[cache.rows[:, 0], lengths - 1]
    tokens = []
    for step in range(num_new):
        token = model.logits(last).argmax(-1)
        tokens.append(token)
        if step + 1 < num_new:
            cache.place((lengths + step)[:, None])
            last = model(token, lengths + step, cache).hidden
    return torch.stack(tokens, 1)
