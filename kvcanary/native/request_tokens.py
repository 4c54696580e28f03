"""Request tokens: tokens and chain values of requests, by the addresses of their cards (native/layout.py)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from kvcanary.native.jit import chain_at, longs_at, loop, request_at, unheard_at
from kvcanary.native.layout import LEFT_TO_BOOKS, NO_ROOM, REQUEST, ROW_CHAIN, ROWS, UNHEARD, UNKNOWN
from kvcanary.native.records import mix, step_of
from kvcanary.pools import slot_maps

_final_of = loop()(slot_maps.final_len)


@loop()
def chain_of(request, pool):
    """What is known of a request's row in a pool, by the address of its card."""
    return chain_at(request + 8 * (REQUEST.size + ROW_CHAIN.size * pool))


@loop()
def final_len(chain, committed_len):
    """`Request.final_len`."""
    return _final_of(committed_len, chain.ahead, chain.written)


@loop()
def put_tokens(request, tokens, count, step):
    """So many follow; the caller knows that there is room."""
    first = request.num_tokens
    known, steps = longs_at(request.tokens, first + count), longs_at(request.token_steps, first + count)
    for i in range(count):
        known[first + i], steps[first + i] = tokens[i], step
    request.num_tokens = first + count


@loop("int64(int64, int64, int64, int64, int64)")
def append_tokens(n, cards, counts, tokens, step):
    """Tokens that follow, n requests one after another. Those that the device has told before are there already.

    cards, counts: addresses of [n];  tokens: address of [sum of counts]
    NO_ROOM: nothing was done. LEFT_TO_BOOKS: of some request the device has told others
    """
    own, new, total = longs_at(cards, n), longs_at(counts, n), 0
    for number in range(n):
        request = request_at(own[number])
        if request.num_unheard == 0 and request.num_tokens + new[number] > request.tokens_room:
            return NO_ROOM
        total += new[number]
    told, at, found = longs_at(tokens, total), 0, 0
    for number in range(n):
        request, count = request_at(own[number]), new[number]
        if request.num_unheard == 0:
            put_tokens(request, told[at:], count, step)
        else:
            behind = 0
            for one in range(request.num_unheard):
                behind += unheard_at(request.unheard + 8 * UNHEARD.size * one).tokens
            is_same = unheard_at(request.unheard).tokens == count
            known = longs_at(request.tokens, request.num_tokens)
            for i in range(count if is_same else 0):
                is_same = is_same and known[request.num_tokens - behind + i] == told[at + i]
            if not is_same:
                found = LEFT_TO_BOOKS
        at += count
    return found


@loop()
def _grown(request, chain, length):
    """Whether the tokens of so many entries are known: then the chain is as `chain_tokens` gives it; its last value."""
    count, value, offset = chain.count, chain.root, chain.offset
    if length > count and length + offset > request.num_tokens:
        return False, 0
    values = longs_at(chain.values, length)
    tokens, first = longs_at(request.tokens, request.num_tokens), min(count, length)
    if first:
        value = values[first - 1]
    for position in range(first, length):
        value = step_of(value, mix(tokens[position + offset], position, request.mix_key), request.multiplier)
        values[position] = value
    chain.count = max(count, length)
    return True, value


@loop("boolean(int64, int64, int64)")
def grow_chain(card, place, length):
    """Whether the tokens of so many entries of a row are known; then its chain is.

    place: in the request's card, of the chain's own
    """
    known, _ = _grown(request_at(card), chain_at(card + 8 * place), length)
    return known


@loop()
def _known_len(request, chain, most):
    """Entries whose tokens the host knows, of a row that may go on by what `most` steps have accepted behind them."""
    length, committed_len = final_len(chain, request.committed_len), request.committed_len
    if request.num_unlanded == 0:
        return length
    goes_on = request.num_unlanded <= most and length == committed_len + chain.ahead
    if goes_on and request.num_tokens == committed_len + 1:
        return request.num_tokens - chain.offset
    return UNKNOWN


@loop("int64(int64, int64, int64, int64, int64)")
def tell_rows(n, cards, pool, most, rows):
    """What is known of rows of n requests in a pool; how many of their lengths are UNKNOWN.

    most: steps that may have accepted what the host has not learned yet;  rows: [ROWS.size, n], out
    """
    own, told, unknown = longs_at(cards, n), longs_at(rows, ROWS.size * n), 0
    for number in range(n):
        request, chain = request_at(own[number]), chain_of(own[number], pool)
        length = _known_len(request, chain, most)
        is_known, value = _grown(request, chain, max(length, 0))
        if not is_known:
            length = UNKNOWN
        unknown += length == UNKNOWN
        told[ROWS.uids * n + number], told[ROWS.roots * n + number] = request.uid, chain.root
        told[ROWS.lengths * n + number], told[ROWS.chains * n + number] = length, value
        told[ROWS.unheard * n + number] = request.num_unlanded > 0 and length != UNKNOWN
    return unknown
