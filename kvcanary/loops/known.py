"""Known: tokens and chain values of requests, by the addresses of their cards (cards.py)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.cards import (
    CHAIN_CARD,
    CHAIN_COUNT,
    CHAIN_KEY,
    CHAIN_MULTIPLIER,
    CHAIN_OFFSET,
    CHAIN_ROOT,
    CHAIN_VALUES,
    NUM_TOKENS_KNOWN,
    REQUEST_CARD,
    ROW_CHAINS,
    ROW_LENGTHS,
    ROW_NUMBERS,
    ROW_ROOTS,
    ROW_UIDS,
    ROW_UNHEARD,
    TOKENS_KNOWN,
    TOKENS_ROOM,
    UID_KNOWN,
    UNKNOWN,
)
from kvcanary.loops.memory import longs_at, loop
from kvcanary.loops.records import mix


@loop("boolean(int64, int64, int64, int64)")
def append_tokens(n, cards, counts, tokens):
    """Tokens that follow, n requests one after another; whether there is room, else nothing is written.

    cards, counts: addresses of [n];  tokens: address of [sum of counts]
    """
    own, new, total = longs_at(cards, n), longs_at(counts, n), 0
    for number in range(n):
        request = longs_at(own[number], REQUEST_CARD)
        if request[NUM_TOKENS_KNOWN] + new[number] > request[TOKENS_ROOM]:
            return False
        total += new[number]
    told, at = longs_at(tokens, total), 0
    for number in range(n):
        request = longs_at(own[number], REQUEST_CARD)
        known, first = longs_at(request[TOKENS_KNOWN], request[TOKENS_ROOM]), request[NUM_TOKENS_KNOWN]
        for i in range(new[number]):
            known[first + i] = told[at + i]
        at += new[number]
        request[NUM_TOKENS_KNOWN] = first + new[number]
    return True


@loop()
def _grown(request, chain, length):
    """Whether the tokens of so many entries are known: then the chain is as `chain_tokens` gives it; its last value."""
    count, value, offset = chain[CHAIN_COUNT], chain[CHAIN_ROOT], chain[CHAIN_OFFSET]
    if length > count and length + offset > request[NUM_TOKENS_KNOWN]:
        return False, 0
    values = longs_at(chain[CHAIN_VALUES], length)
    tokens, first = longs_at(request[TOKENS_KNOWN], request[NUM_TOKENS_KNOWN]), min(count, length)
    if first:
        value = values[first - 1]
    for position in range(first, length):
        value = request[CHAIN_MULTIPLIER] * value + mix(tokens[position + offset], position, request[CHAIN_KEY])
        values[position] = value
    chain[CHAIN_COUNT] = max(count, length)
    return True, value


@loop("int64(int64, int64, int64, int64)")
def tell_rows(n, cards, place, rows):
    """What is known of rows of n requests; how many of their lengths are UNKNOWN.

    place: in a request's card, of the chain's own
    rows:  [ROW_NUMBERS, n]; in: lengths, and steps of which the host has not heard in the place of ROW_UNHEARD
    """
    own, told, unknown = longs_at(cards, n), longs_at(rows, ROW_NUMBERS * n), 0
    for number in range(n):
        request, at = longs_at(own[number], place + CHAIN_CARD), ROW_LENGTHS * n + number
        chain = request[place:]
        is_known, value = _grown(request, chain, max(told[at], 0))
        if not is_known:
            told[at] = UNKNOWN
        unknown += told[at] == UNKNOWN
        told[ROW_UIDS * n + number], told[ROW_ROOTS * n + number] = request[UID_KNOWN], chain[CHAIN_ROOT]
        told[ROW_CHAINS * n + number] = value
        told[ROW_UNHEARD * n + number] = told[ROW_UNHEARD * n + number] > 0 and told[at] != UNKNOWN
    return unknown
