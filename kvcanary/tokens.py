"""W6: the tokens that forwards are fed, against those of their requests, an oracle, and the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcanary.entries import fired_writes
from kvcanary.forward import Forward, Ints
from kvcanary.intake import HitBatch
from kvcanary.ledger import Request

TokenOf = Callable[[str, int], int | None]


@dataclass(frozen=True)
class Oracle:
    """Somebody who knows tokens before the host does: a test that computed them, or a run that is repeated.

    token_of:       (request id, position) -> its token; None where even the oracle does not know
    judges_guesses: also what draft forwards and tree nodes behind the root are fed
    """

    token_of: TokenOf
    judges_guesses: bool = False


def judge_tokens(forward: Forward, oracle: Oracle | None = None) -> list[HitBatch]:
    """W6 for every entry whose input is another token than its request has there, or no token at all.

    Without an oracle that judges them, draft guesses have no truth.
    """
    wrong = set(_outside_vocabulary(forward).tolist())
    first = 0
    for row, count in enumerate(forward.written):
        wrong.update(first + entry for entry in _wrong_in_row(forward, row, first, count, oracle))
        first += count
    return [fired_writes("W6", forward, np.array(sorted(wrong)))] if wrong else []


def _outside_vocabulary(forward: Forward) -> Ints:
    """Guesses and padding too: whatever is fed must be a token."""
    size, tokens = forward.pool.view.vocab_size, forward.planned.tokens
    if size is None or not len(tokens):
        return np.empty(0, np.int64)
    return np.flatnonzero((tokens < 0) | (tokens >= size))


def _wrong_in_row(forward: Forward, row: int, first: int, count: int, oracle: Oracle | None) -> list[int]:
    """Entries of one row, by number in it."""
    request, place = forward.request_of(row), forward.begins[row] + forward.pool.view.token_offset
    is_draft = forward.kind == "draft"
    judged = 0 if is_draft else count if forward.parents is None else min(count, 1)  # a tree's root is no guess
    known = request.tokens[place : place + judged]
    tokens = forward.planned.tokens[first : first + count]
    wrong = [] if tokens[: len(known)].tolist() == known else np.flatnonzero(tokens[: len(known)] != known).tolist()
    if oracle is not None:
        asked = range(len(known), count if oracle.judges_guesses else judged)
        wrong += [entry for entry in asked if _contradicts(oracle, forward, request, row, first + entry)]
    return wrong


def _contradicts(oracle: Oracle, forward: Forward, request: Request, row: int, entry: int) -> bool:
    """Whether the oracle knows another token; what an extend forward is fed beyond acceptance has none."""
    pool, position = forward.pool, int(forward.planned.positions[entry])
    if forward.kind == "extend" and position >= request.most_final(pool.pool_id):
        return False
    token = oracle.token_of(request.request_id, position + pool.view.token_offset)
    return token is not None and token != int(forward.planned.tokens[entry])
