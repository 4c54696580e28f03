"""W6: the tokens that forwards are fed, against those of their requests, an oracle, and the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, compress, count, repeat
from operator import add, getitem, ne

import numpy as np

from kvcanary.calls.entries import fired_writes
from kvcanary.calls.model_call import ModelCall
from kvcanary.calls.violation_log import ViolationBatch
from kvcanary.ledger.ledger import Request
from kvcanary.pools.spans import is_span_id

TokenOf = Callable[[str, int], int | None]


@dataclass(frozen=True)
class Oracle:
    """Somebody who knows tokens before the host does: a test that computed them, or a run that is repeated.

    token_of:       (request id, position) -> its token; None where even the oracle does not know
    judges_guesses: also what draft forwards and tree nodes behind the root are fed
    """

    token_of: TokenOf
    judges_guesses: bool = False


def judge_tokens(forward: ModelCall, oracle: Oracle | None = None) -> list[ViolationBatch]:
    """W6 for every entry whose input is another token than its request has there, or no token at all.

    Without an oracle that judges them, draft guesses have no truth.
    """
    wrong = _outside_vocabulary(forward)
    if forward.kind != "draft" or oracle is not None:
        tokens, width, written = forward.planned.tokens.tolist(), forward.width, forward.written
        judged = written if forward.parents is None else [min(count, 1) for count in written]
        owners = forward.requests if width == 1 else [owner for owner in forward.requests for _ in range(width)]
        *firsts, _ = accumulate(written, initial=0)
        places = list(map(forward.pool.view.token_offset.__add__, forward.begins))
        spans = map(slice, places, map(add, places, judged))
        known = [owner.tokens[span].tolist() for owner, span in zip(owners, spans, strict=True)]
        fed = map(getitem, repeat(tokens), map(slice, firsts, map(add, firsts, map(len, known))))
        suspects = compress(count(), map(ne, known, fed))
        for row in suspects if oracle is None else range(len(written)):
            first = firsts[row]
            wrong += _wrong_in_row(forward, row, first, tokens[first : first + written[row]], oracle)
    return [fired_writes("W6", forward, np.array(sorted(set(wrong))))] if wrong else []


def _outside_vocabulary(forward: ModelCall) -> list[int]:
    """Guesses and padding too: whatever is fed must be a token."""
    size, tokens = forward.pool.view.vocab_size, forward.planned.tokens
    if size is None:
        return []
    is_outside = (tokens.view(np.uint64) >= size) & ~is_span_id(tokens)  # unsigned, -1 is huge
    return np.flatnonzero(is_outside).tolist() if np.count_nonzero(is_outside) else []


def _wrong_in_row(forward: ModelCall, row: int, first: int, tokens: list[int], oracle: Oracle | None) -> list[int]:
    """Entries of one row that were fed something else than what the host knows, or the oracle."""
    request, place = forward.request_of(row), forward.begins[row] + forward.pool.view.token_offset
    judged = len(tokens) if forward.parents is None else min(len(tokens), 1)  # a tree's root is no guess
    judged = 0 if forward.kind == "draft" else judged
    known = request.tokens[place : place + judged].tolist()
    wrong = []
    if tokens[: len(known)] != known:
        wrong = [first + entry for entry, token in enumerate(known) if token != tokens[entry]]
    if oracle is not None:
        asked = range(first + len(known), first + (len(tokens) if oracle.judges_guesses else judged))
        wrong += [entry for entry in asked if _contradicts(oracle, forward, request, entry)]
    return wrong


def _contradicts(oracle: Oracle, forward: ModelCall, request: Request, entry: int) -> bool:
    """Whether the oracle knows another token; what an extend forward is fed beyond acceptance has none."""
    pool, position = forward.pool, int(forward.planned.positions[entry])
    if forward.kind == "extend" and position >= request.most_final(pool.pool_id):
        return False
    token = oracle.token_of(request.request_id, position + pool.view.token_offset)
    return token is not None and token != int(forward.planned.tokens[entry])
