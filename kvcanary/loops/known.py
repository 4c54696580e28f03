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
    NOT_KNOWN,
    NUM_TOKENS_KNOWN,
    REQUEST_CARD,
    TOKENS_KNOWN,
    TOKENS_ROOM,
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


@loop("int64(int64, int64, int64, int64, int64)")
def grow_chains(n, cards, lengths, last, place):
    """Chains of n requests, each as `chain_tokens` gives it, grown to the lengths asked for; of how many it cannot be.

    cards, lengths, last: addresses of [n]; a length becomes NOT_KNOWN where a token is not known;  last: out, the value
                          at the length, the root without entries
    place: in a request's card, of the chain's own
    """
    own, asked, values_at, unknown = longs_at(cards, n), longs_at(lengths, n), longs_at(last, n), 0
    for number in range(n):
        request, length = longs_at(own[number], place + CHAIN_CARD), max(asked[number], 0)
        chain, num_tokens = request[place:], request[NUM_TOKENS_KNOWN]
        count, value, offset = chain[CHAIN_COUNT], chain[CHAIN_ROOT], chain[CHAIN_OFFSET]
        if length > count and length + offset > num_tokens:
            asked[number] = NOT_KNOWN
            unknown += 1
            continue
        values, tokens = longs_at(chain[CHAIN_VALUES], length), longs_at(request[TOKENS_KNOWN], num_tokens)
        first, multiplier, key = min(count, length), request[CHAIN_MULTIPLIER], request[CHAIN_KEY]
        if first:
            value = values[first - 1]
        for position in range(first, length):
            value = multiplier * value + mix(tokens[position + offset], position, key)
            values[position] = value
        chain[CHAIN_COUNT] = max(count, length)
        values_at[number] = value
    return unknown
