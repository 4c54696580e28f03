"""Request tokens: tokens and chain values of requests, by the addresses of their structs (native/layout.py)."""

from kvcanary.native.jit import longs_at, loop, nth, view
from kvcanary.native.layout import LEFT_TO_LEDGER, NO_ROOM, REQUEST, ROW_CHAIN, ROWS, UNCOLLECTED, UNKNOWN
from kvcanary.native.records import mix, step_of
from kvcanary.pools import slot_maps

_final_of = loop()(slot_maps.final_len)


@loop()
def chain_of(request, pool):
    """What is known of a request's row in a pool, by the address of its struct."""
    return view(ROW_CHAIN, request + 8 * (REQUEST.size + ROW_CHAIN.size * pool))


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
def append_tokens(n, structs, counts, tokens, step):
    """Tokens that follow, n requests one after another. Those that the device has reported before are there already.

    structs, counts: addresses of [n];  tokens: address of [sum of counts]
    NO_ROOM: nothing was done. LEFT_TO_LEDGER: of some request the device has reported others
    """
    own, new, total = longs_at(structs, n), longs_at(counts, n), 0
    for number in range(n):
        request = view(REQUEST, own[number])
        if request.num_uncollected == 0 and request.num_tokens + new[number] > request.tokens_room:
            return NO_ROOM
        total += new[number]
    numbers, at, found = longs_at(tokens, total), 0, 0
    for number in range(n):
        request, count = view(REQUEST, own[number]), new[number]
        if request.num_uncollected == 0:
            put_tokens(request, numbers[at:], count, step)
        else:
            behind = 0
            for one in range(request.num_uncollected):
                behind += nth(UNCOLLECTED, request.uncollected, one).tokens
            is_same = view(UNCOLLECTED, request.uncollected).tokens == count
            known = longs_at(request.tokens, request.num_tokens)
            for i in range(count if is_same else 0):
                is_same = is_same and known[request.num_tokens - behind + i] == numbers[at + i]
            if not is_same:
                found = LEFT_TO_LEDGER
        at += count
    return found


@loop()
def _grown(request, chain, length):
    """Whether the tokens of so many entries are known: then the chain is as `chain_tokens` gives it; its last value."""
    count, offset = chain.count, chain.offset
    if length > count and length + offset > request.num_tokens:
        return False, 0
    values, first = longs_at(chain.values, length), min(count, length)
    tokens, value = longs_at(request.tokens, request.num_tokens), values[first - 1] if first else chain.root
    for position in range(first, length):
        value = step_of(value, mix(tokens[position + offset], position, request.mix_key), request.multiplier)
        values[position] = value
    chain.count = max(count, length)
    return True, value


@loop("boolean(int64, int64, int64)")
def grow_chain(struct, place, length):
    """Whether the tokens of so many entries of a row are known; then its chain is.

    place: in the request's struct, of the chain's own
    """
    known, _ = _grown(view(REQUEST, struct), view(ROW_CHAIN, struct + 8 * place), length)
    return known


@loop()
def _known_len(request, chain, most):
    """Entries whose tokens the host knows, of a row that may go on by what `most` steps have accepted behind them."""
    length, committed_len = final_len(chain, request.committed_len), request.committed_len
    if request.num_pending_acceptances == 0:
        return length
    goes_on = request.num_pending_acceptances <= most and length == committed_len + chain.ahead
    if goes_on and request.num_tokens == committed_len + 1:
        return request.num_tokens - chain.offset
    return UNKNOWN


@loop("int64(int64, int64, int64, int64, int64)")
def describe_rows(n, structs, pool, most, rows):
    """What is known of rows of n requests in a pool; how many of their lengths are UNKNOWN.

    most: steps that may have accepted what the host has not learned yet;  rows: [ROWS.size, n], out
    """
    own, numbers, unknown = longs_at(structs, n), longs_at(rows, ROWS.size * n), 0
    for number in range(n):
        request, chain = view(REQUEST, own[number]), chain_of(own[number], pool)
        length = _known_len(request, chain, most)
        is_known, value = _grown(request, chain, max(length, 0))
        if not is_known:
            length = UNKNOWN
        unknown += length == UNKNOWN
        numbers[ROWS.uids * n + number], numbers[ROWS.roots * n + number] = request.uid, chain.root
        numbers[ROWS.lengths * n + number], numbers[ROWS.chains * n + number] = length, value
        numbers[ROWS.uncollected * n + number] = request.num_pending_acceptances > 0 and length != UNKNOWN
    return unknown
