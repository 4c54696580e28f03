"""A mock draft for a real model: it knows what follows, because every continuation was computed beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_engine.memory.recurrent import RecurrentPool
from spec_engine.mock.draft import AcceptLen, MockDraft
from spec_engine.mock.oracle import TokenOracle
from spec_engine.mock.target import MockModel
from spec_engine.models.decoder import Decoder, DecoderOutput
from spec_engine.models.hybrid import HybridDecoder


class KnownText(NamedTuple):
    """A prompt and its greedy continuation, ``tokens``, with the final hidden state of all but the last, [n - 1, H]."""

    prompt: list[int]
    tokens: list[int]
    hidden: Tensor

    @property
    def continuation(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


@torch.inference_mode()
def known_text(model: Decoder, prompt: Sequence[int], count: int) -> KnownText:
    """Plain greedy decoding of ``count`` tokens with dense attention: no engine, no pages, no drafts."""
    tokens, kv, hidden, states = list(prompt), DenseKV(), [], _states_of(model)
    new = torch.tensor(tokens, device=model.embed_weight.device)
    for _ in range(count):
        positions = torch.arange(len(tokens) - len(new), len(tokens), device=new.device)
        own = () if states is None else ((), states.chain([1], [len(new)]))
        hidden.append(model(new, positions, kv, *own).hidden)
        new = model.logits(hidden[-1][-1:]).argmax(-1)
        tokens += new.tolist()
    return KnownText(list(prompt), tokens, torch.cat(hidden))


def _states_of(model: Decoder) -> RecurrentPool | None:
    """Of one request in row 1, where the model has recurrent layers."""
    if not isinstance(model, HybridDecoder):
        return None
    weight = model.embed_weight
    where = {"dtype": weight.dtype, "device": weight.device}
    return RecurrentPool(num_layers=model.num_state_layers, num_rows=1, max_nodes=1, size=model.state_size, **where)


class KnownDraft(MockDraft):
    """A MockDraft whose target is a Decoder: forced accepted lengths with real attention and real logits.

    Which text a row belongs to, and where it stands, is read off the target's hidden state: it is the nearest of all
    ``texts``. ``accept_len`` may be a function of (number of the text, committed length).
    is_second: a wrong token is always a little likelier than the true one, so that accepted paths go through other
    branches than the first and skip nodes. A tree of all candidates, topk 2 or more, still holds them.
    """

    def __init__(
        self, target: Decoder, texts: Sequence[KnownText], accept_len: AcceptLen, *, is_second: bool = False
    ) -> None:
        config = target.config
        oracle = TableOracle(config.vocab_size, [text.tokens for text in texts])
        positions = config.max_position_embeddings
        super().__init__(MockModel(oracle, max_positions=positions, dtype=target.embed_weight.dtype), accept_len)
        self.is_second = is_second
        self._known = torch.cat([text.hidden for text in texts])
        places = [(number, place) for number, text in enumerate(texts) for place in range(len(text.hidden))]
        self._places = torch.tensor(places, device=self._known.device)

    def features(self, output: DecoderOutput) -> Tensor:
        texts, positions = self._places[torch.cdist(output.hidden, self._known).argmin(1)].unbind(1)
        zero = torch.zeros_like(positions)
        return torch.stack((texts, positions + 1, zero, zero + 1), -1).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        if not self.is_second:
            return logits
        best, wrong = logits.topk(2).values[:, :1], logits.topk(2).indices[:, 1:]
        knows = best > 0  # else there is no true one
        return logits.scatter(1, wrong, torch.where(knows, best + 0.1, logits.gather(1, wrong)))


class TableOracle(TokenOracle):
    """The tokens of known texts; token 0 behind their ends."""

    def __init__(self, vocab_size: int, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(0, vocab_size)
        width = max(len(tokens) for tokens in texts) + 1
        self._table = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in texts])

    def tokens(self, requests: Tensor, positions: Tensor) -> Tensor:
        table = self._table.to(positions.device)
        return table[requests.clamp(0, len(table) - 1), positions.clamp(0, table.shape[1] - 1)]


class DenseKV:
    """One sequence, kept whole: every token attends all before it and itself."""

    def __init__(self) -> None:
        self._stored: dict[int, Tensor] = {}  # by layer, [2, kv_heads, length, head_dim]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = torch.stack((k, v)).transpose(1, 2)
        old = self._stored.get(layer, new[:, :, :0])
        self._stored[layer] = stored = torch.cat((old, new), 2)
        length = stored.shape[2]
        seen = torch.ones(len(q), length, dtype=torch.bool, device=q.device).tril(length - len(q))
        keys, values = stored
        queries = q.transpose(0, 1)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True).transpose(0, 1)
