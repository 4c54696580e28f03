"""Spans: parts of a prompt whose token ids do not say what they are, and the ids that stand for what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.pools.plans import ReadPlan, WritePlan

Span = tuple[int, int, str | int | bytes]  # first position, end, what names the content
SPAN_IDS = range(0x7D << 24, 0x7E << 24)  # beyond every vocabulary, and 32-bit integers still
Ints = NDArray[np.int64]


def is_span_id(tokens: Ints) -> NDArray[np.bool_]:
    return tokens >> 24 == SPAN_IDS.start >> 24


def with_spans(token_ids: Sequence[int], spans: Sequence[Span]) -> Ints:
    """[n] int64, the tokens with those of spans replaced by ids that stand for the content: token, place and name.

    Text in front of a span keeps its ids, and so what it shares. PlanError for a span outside the tokens.
    """
    tokens = np.array(token_ids, np.int64)
    for start, end, content in spans:
        if not 0 <= start < end <= len(tokens):
            raise PlanError(
                f"a span must be a part of its {len(tokens)} tokens, got [{start}, {end}): name positions of the prompt"
            )
        key = hashlib.blake2b(repr(content).encode(), digest_size=32).digest()
        for position in range(start, end):
            name = f"{position - start} {tokens[position]}".encode()
            number = int.from_bytes(hashlib.blake2b(name, key=key, digest_size=3).digest(), "little")
            tokens[position] = SPAN_IDS.start + number
    return tokens


def embedding_spans(embeddings: Tensor, start: int = 0) -> list[Span]:
    """Spans for positions of which an engine knows no content id, only what enters layer 0: each row by its bytes.

    embeddings: [n, hidden], any dtype, those of positions start, start + 1, ...; equal content must have equal bytes,
    as rows of one encoder output that is kept have, and those of two runs of an encoder need not have
    """
    rows = embeddings.detach().contiguous().cpu().view(torch.uint8).numpy()
    names = [hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest() for row in rows]
    return [(start + place, start + place + 1, name) for place, name in enumerate(names)]


def as_admitted(write: WritePlan, read: ReadPlan, known: Sequence[tuple[Ints, Ints]], offset: int) -> WritePlan:
    """The plan with the ids that requests were admitted with, wherever an entry is fed the token that lies there.

    known: by request, the tokens that it was given and those that stand for them;  offset: the pool's `token_offset`
    """
    count = read.num_written
    width, rows = read.rows_per_request, len(known) * read.rows_per_request
    counts = count.tolist() if isinstance(count, Tensor) else [count] * rows
    tokens, positions = write.tokens.cpu().numpy().copy(), write.positions.cpu().numpy()
    first = 0
    for row, written in enumerate(counts):
        given, stands = known[row // width]
        own, places = tokens[first : first + written], positions[first : first + written] + offset
        lies = np.flatnonzero((places >= 0) & (places < len(given)))
        lies = lies[own[lies] == given[places[lies]]]
        own[lies] = stands[places[lies]]
        first += written
    return replace(write, tokens=torch.from_numpy(tokens).to(write.tokens.device))
