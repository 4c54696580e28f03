"""Request tokens: tokens and chain values of requests, by the addresses of their cards (native/layout.py)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.native.jit import longs_at, loop
from kvcanary.native.layout import (
    CHAIN_AHEAD,
    CHAIN_CARD,
    CHAIN_COUNT,
    CHAIN_KEY,
    CHAIN_MULTIPLIER,
    CHAIN_OFFSET,
    CHAIN_ROOT,
    CHAIN_VALUES,
    CHAIN_WRITTEN,
    COMMITTED_LEN,
    LEFT_TO_BOOKS,
    NO_ROOM,
    NUM_TOKENS_KNOWN,
    NUM_UNHEARD,
    NUM_UNLANDED,
    REQUEST_CARD,
    ROW_CHAINS,
    ROW_LENGTHS,
    ROW_NUMBERS,
    ROW_ROOTS,
    ROW_UIDS,
    ROW_UNHEARD,
    TOKEN_STEPS,
    TOKENS_KNOWN,
    TOKENS_ROOM,
    UID_KNOWN,
    UNHEARD_CARD,
    UNHEARD_STEPS,
    UNHEARD_TOKENS,
    UNKNOWN,
)
from kvcanary.native.records import mix


@loop()
def chain_of(request, pool):
    """What is known of a request's row in a pool, by the address of its card."""
    return longs_at(request + 8 * (REQUEST_CARD + CHAIN_CARD * pool), CHAIN_CARD)


@loop()
def final_len(chain, committed_len):
    """`Request.final_len`."""
    return min(committed_len + chain[CHAIN_AHEAD], chain[CHAIN_WRITTEN])


@loop()
def put_tokens(request, tokens, count, step):
    """So many follow; the caller knows that there is room."""
    first = request[NUM_TOKENS_KNOWN]
    known, steps = longs_at(request[TOKENS_KNOWN], first + count), longs_at(request[TOKEN_STEPS], first + count)
    for i in range(count):
        known[first + i], steps[first + i] = tokens[i], step
    request[NUM_TOKENS_KNOWN] = first + count


@loop("int64(int64, int64, int64, int64, int64)")
def append_tokens(n, cards, counts, tokens, step):
    """Tokens that follow, n requests one after another. Those that the device has told before are there already.

    cards, counts: addresses of [n];  tokens: address of [sum of counts]
    NO_ROOM: nothing was done. LEFT_TO_BOOKS: of some request the device has told others
    """
    own, new, total = longs_at(cards, n), longs_at(counts, n), 0
    for number in range(n):
        request = longs_at(own[number], REQUEST_CARD)
        if request[NUM_UNHEARD] == 0 and request[NUM_TOKENS_KNOWN] + new[number] > request[TOKENS_ROOM]:
            return NO_ROOM
        total += new[number]
    told, at, found = longs_at(tokens, total), 0, 0
    for number in range(n):
        request, count = longs_at(own[number], REQUEST_CARD), new[number]
        if request[NUM_UNHEARD] == 0:
            put_tokens(request, told[at:], count, step)
        else:
            steps, behind = longs_at(request[UNHEARD_STEPS], UNHEARD_CARD * request[NUM_UNHEARD]), 0
            for one in range(request[NUM_UNHEARD]):
                behind += steps[UNHEARD_CARD * one + UNHEARD_TOKENS]
            is_same = steps[UNHEARD_TOKENS] == count
            known = longs_at(request[TOKENS_KNOWN], request[NUM_TOKENS_KNOWN])
            for i in range(count if is_same else 0):
                is_same = is_same and known[request[NUM_TOKENS_KNOWN] - behind + i] == told[at + i]
            if not is_same:
                found = LEFT_TO_BOOKS
        at += count
    return found


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


@loop("boolean(int64, int64, int64)")
def grow_chain(card, place, length):
    """Whether the tokens of so many entries of a row are known; then its chain is.

    place: in the request's card, of the chain's own
    """
    known, _ = _grown(longs_at(card, REQUEST_CARD), longs_at(card + 8 * place, CHAIN_CARD), length)
    return known


@loop()
def _known_len(request, chain, most):
    """Entries whose tokens the host knows, of a row that may go on by what `most` steps have accepted behind them."""
    length, committed_len = final_len(chain, request[COMMITTED_LEN]), request[COMMITTED_LEN]
    if request[NUM_UNLANDED] == 0:
        return length
    goes_on = request[NUM_UNLANDED] <= most and length == committed_len + chain[CHAIN_AHEAD]
    if goes_on and request[NUM_TOKENS_KNOWN] == committed_len + 1:
        return request[NUM_TOKENS_KNOWN] - chain[CHAIN_OFFSET]
    return UNKNOWN


@loop("int64(int64, int64, int64, int64, int64)")
def tell_rows(n, cards, pool, most, rows):
    """What is known of rows of n requests in a pool; how many of their lengths are UNKNOWN.

    most: steps that may have accepted what the host has not learned yet;  rows: [ROW_NUMBERS, n], out
    """
    own, told, unknown = longs_at(cards, n), longs_at(rows, ROW_NUMBERS * n), 0
    for number in range(n):
        request, chain = longs_at(own[number], REQUEST_CARD), chain_of(own[number], pool)
        length = _known_len(request, chain, most)
        is_known, value = _grown(request, chain, max(length, 0))
        if not is_known:
            length = UNKNOWN
        unknown += length == UNKNOWN
        told[ROW_UIDS * n + number], told[ROW_ROOTS * n + number] = request[UID_KNOWN], chain[CHAIN_ROOT]
        told[ROW_LENGTHS * n + number], told[ROW_CHAINS * n + number] = length, value
        told[ROW_UNHEARD * n + number] = request[NUM_UNLANDED] > 0 and length != UNKNOWN
    return unknown
