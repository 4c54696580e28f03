"""Records: sealing what forwards have written, and comparing what rows read with what was sealed.

constants: Keys.constants
table:     [rows, 8] int64, the records of all pools as the canary writes them; live: the same, as engines' stray writes
           can reach them, or `table` again where they lie on a device
judged:    [rows] bool, entries that were found to be their requests' truth
"""

import numpy as np

from kvcanary.native import layout
from kvcanary.native.jit import longs_at, loop, view
from kvcanary.native.layout import FORWARD, POOL
from kvcanary.native.plans import plan_of
from kvcanary_kernels.record import layout as at
from kvcanary_kernels.record.formulas import chain_step, mix_of, seal_column
from kvcanary_kernels.record.layout import COLUMNS, LOAD_FAILED, MASK_32, RESERVED

NODE_SHIFT = 48  # of a branch or node in STEP_SITE


mix, step_of, _seal_column = loop()(mix_of), loop()(chain_step), loop()(seal_column)


@loop("void(int64[::1], int64, int64, int64, int64, int64[::1])")
def chain_tokens(tokens, first_position, value, multiplier, key, chains):
    """The chain values of consecutive tokens, [n] out; `value` is the predecessor's. As `chain_host` of the kernels."""
    for i in range(tokens.shape[0]):
        value = step_of(value, mix(tokens[i], first_position + i, key), multiplier)
        chains[i] = value


@loop()
def _seal(row, record, pool_term, constants):
    """Of one record, `seal.seal_values` and what its pool adds."""
    seal = pool_term + constants[at.SEAL_START] + constants[at.SEAL_SLOT_KEY] * row
    for i in range(at.TOKEN_POSITION, at.STEP_SITE + 1):
        seal += _seal_column(record[i], constants[at.SEAL_KEYS + 2 * i], constants[at.SEAL_KEYS + 2 * i + 1])
    return seal


@loop()
def _write(row, record, seal, table, live, judged):
    """One record under this seal; whether an entry is rewritten that was judged."""
    for i in range(at.SEAL):
        table[row, i] = live[row, i] = record[i]
    table[row, at.SEAL] = live[row, at.SEAL] = seal
    return judged[row]


@loop("void(int64[::1], int64[:, ::1], int64[::1])")
def seal_records(rows, records, constants):
    """Seal records [n, 8], whose last column is what the pool adds to the seal, in place."""
    for i in range(rows.shape[0]):
        records[i, at.SEAL] = _seal(rows[i], records[i], records[i, at.SEAL], constants)


@loop("boolean(int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], boolean[::1])")
def write_records(rows, records, table, live, judged):
    """Sealed records [n, 8]; whether one was judged before."""
    rewritten = False
    for i in range(rows.shape[0]):
        rewritten |= _write(rows[i], records[i], records[i, at.SEAL], table, live, judged)
    return rewritten


@loop(
    "int64(int64, int64[::1], int64[::1], int64[::1], int64[::1], uint8[::1], int64, int64, int64[::1], "
    "int64[:, ::1], int64[:, ::1], boolean[::1])"
)
def seal_plan(head, names, reads, roots, generations, states, low, high, constants, table, live, judged):
    """Seal all entries of one forward, each chained to its parent; what was seen (layout.py).

    head:      address of `Forward.memory`, of which `chains` are filled
    names:     [n] its slots as the plan calls them;  reads: the slots that it reads
    roots:     [rows] chain that a row continues where it reads nothing
    low, high: bitmap of the layers that it has stored
    Null slots get a chain and no record.
    """
    forward, plan = view(FORWARD, head), plan_of(head)
    pool, drafted, chains = view(POOL, forward.pool), longs_at(forward.before, forward.num_before), plan.chains
    tokens, positions, parents, owns = plan.tokens, plan.positions, plan.parents, plan.owns
    has_parents, width, base = forward.has_parents != 0, forward.width, pool.base
    record = np.zeros(COLUMNS, np.int64)
    seen = first = 0
    for row in range(forward.rows):
        above, begin, last = roots[row], plan.begins[row], owns[row] - 1
        is_read = owns[row] > plan.bounds[row]
        if is_read and 0 <= reads[last] < pool.num_slots:
            above = table[base + reads[last], at.CHAIN]
        if drafted.shape[0]:
            branch, read = parents[row], above
            above = drafted[row // width * width + branch] if 0 <= branch < width else np.int64(0)
            if above != read and is_read and pool.null_slots <= reads[last] < pool.num_slots:
                seen |= layout.ASTRAY
        for entry in range(first, first + plan.written[row]):
            parent = parents[entry] if has_parents else (entry - 1 if entry > first else -1)
            before = above if parent < 0 else chains[parent]
            mixed = mix(tokens[entry], positions[entry], constants[at.MIX_KEY])
            chains[entry] = step_of(before, mixed, constants[at.MULTIPLIER])
            wanted = positions[parent] + 1 if has_parents and parent >= 0 else begin
            wanted += 0 if has_parents else entry - first
            if positions[entry] != wanted:
                seen |= layout.MISPLACED
        first += plan.written[row]
    record[at.LAYERS_LOW], record[at.LAYERS_HIGH], first = low, high, 0
    step_site = forward.step & MASK_32 | forward.site << 32
    for row in range(forward.rows):
        for entry in range(first, first + plan.written[row]):
            slot, page = plan.slots[entry], names[entry] // pool.page_size
            table[base + slot, at.CHAIN] = chains[entry]
            if states[page] == RESERVED or states[page] == LOAD_FAILED:
                seen |= layout.PAGE_FRESH
            if slot < pool.null_slots:
                seen |= layout.NULL_WRITTEN
                continue
            node = entry - first if has_parents else 0
            record[at.TOKEN_POSITION] = tokens[entry] & MASK_32 | positions[entry] << 32
            record[at.CHAIN] = chains[entry]
            record[at.REQUEST_GENERATION] = plan.who[row // width * 2] & MASK_32 | generations[page] << 32
            record[at.STEP_SITE] = step_site + ((row % width + node) << NODE_SHIFT)
            if _write(base + slot, record, _seal(base + slot, record, pool.seal_term, constants), table, live, judged):
                seen |= layout.REWRITTEN
        first += plan.written[row]
    return seen


@loop(
    "int64(int64, int64, int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64, int64, "
    "boolean, int64[::1], int64[:, ::1], int64[:, ::1], boolean[::1])"
)
def move_records(
    origin,
    target,
    src,
    dst,
    src_names,
    dst_names,
    generations,
    owners,
    page_size,
    step_site,
    has_fingerprints,
    constants,
    table,
    live,
    judged,
):
    """Records and fingerprints follow n moved entries: the furthest position, below it what was seen (layout.py).

    -1, and nothing, where a slot is none or a null slot, or an entry stays where it is.
    origin, target:                 addresses of the pools' structs
    src, dst, src_names, dst_names: [n], all sources are read before a destination is written
    Token, position, chain and layers stay, under the grant and owner of the destination's page. A source that nobody
    has written since its page was granted arrives as a slot that was never written; a damaged one stays damaged.
    """
    n, num_pages = src.shape[0], generations.shape[0]
    source, pool = view(POOL, origin), view(POOL, target)
    layers = pool.layers if source.content_a and pool.content_a else 0
    src_slots, dst_slots, src_base, dst_base = source.num_slots, pool.num_slots, source.base, pool.base
    src_content = longs_at(source.content_a, layers * src_slots)
    dst_content = longs_at(pool.content_a, layers * dst_slots)
    records, damage = np.empty((n, COLUMNS), np.int64), np.empty((n, COLUMNS), np.int64)
    fingerprints = np.empty((n, layers), np.int64)
    for i in range(n):
        if not (source.null_slots <= src[i] < src_slots and pool.null_slots <= dst[i] < dst_slots):
            return -1
        if not (0 <= src_names[i] // page_size < num_pages and 0 <= dst_names[i] // page_size < num_pages):
            return -1
        if origin == target and src[i] == dst[i]:
            return -1
    for i in range(n):
        for column in range(COLUMNS):
            records[i, column] = table[src_base + src[i], column]
            damage[i, column] = live[src_base + src[i], column] - records[i, column]
        for layer in range(layers):
            fingerprints[i, layer] = src_content[layer * src_slots + src[i]]
    seen, furthest = 0, np.int64(0)
    for i in range(n):
        record, page, row = records[i], dst_names[i] // page_size, dst_base + dst[i]
        if (record[at.REQUEST_GENERATION] >> 32) & MASK_32 != generations[src_names[i] // page_size]:
            record[:], fingerprints[i] = 0, 0
            seen |= layout.BLANK
        else:
            furthest = max(furthest, (record[at.TOKEN_POSITION] >> 32) & MASK_32)
            uid = owners[page] if owners[page] >= 0 else record[at.REQUEST_GENERATION] & MASK_32
            record[at.REQUEST_GENERATION] = uid & MASK_32 | generations[page] << 32
            record[at.STEP_SITE] = step_site
            record[at.CONTENT_B] = record[at.CONTENT_B] if has_fingerprints and layers else 0
        if _write(row, record, _seal(row, record, pool.seal_term, constants), table, live, judged):
            seen |= layout.REWRITTEN
        for column in range(COLUMNS):
            live[row, column] += damage[i, column]
        for layer in range(layers if has_fingerprints else 0):
            dst_content[layer * dst_slots + dst[i]] = fingerprints[i, layer]
    return furthest << layout.MOVED_BITS | seen


@loop("boolean(int64, int64, int64[:, ::1], int64[:, ::1])")
def match_records(slots, n, records, expected):
    """Whether the records of n slots are bit for bit those that were written."""
    own = longs_at(slots, n)
    for i in range(n):
        slot = own[i]
        if not 0 <= slot < records.shape[0]:
            return False
        differs = np.int64(0)
        for column in range(COLUMNS):
            differs |= records[slot, column] ^ expected[slot, column]
        if differs:
            return False
    return True


@loop("boolean(int64, int64, int64[::1], int64[::1], int64, int64, int64[:, ::1], boolean[::1], boolean)")
def are_written(slots, names, chains, generations, struct, step, table, judged, marks):
    """Whether slots hold these chains, of every layer, under the current grants and of no later step.

    slots, names: addresses of the slots and of what plans call them, as many as chains
    struct:       address of the pool's;  marks: they are judged from now on
    """
    n, pool = chains.shape[0], view(POOL, struct)
    slots, names, base = longs_at(slots, n), longs_at(names, n), pool.base
    for i in range(n):
        page = names[i] // pool.page_size
        if not (0 <= slots[i] < pool.num_slots and 0 <= page < generations.shape[0]):
            return False
        record = table[base + slots[i]]
        if (
            record[at.CHAIN] != chains[i]
            or (record[at.REQUEST_GENERATION] >> 32) & MASK_32 != generations[page]
            or np.int32(step - record[at.STEP_SITE]) < 0
            or record[at.LAYERS_LOW] != pool.low_layers
            or record[at.LAYERS_HIGH] != pool.high_layers
        ):
            return False
    for i in range(n if marks else 0):
        judged[base + slots[i]] = True
    return True


@loop("int64(int64[:, ::1], int64, int64, int64, int64, int64[:, ::1], int64[::1])")
def copy_records(table, first, end, low, high, kept, partial):
    """Copy the first columns of these rows of records to the same rows of `kept`, unless it has none.

    partial: filled with the rows that some layers have written and others not; how many these are
    """
    num_partial = 0
    for row in range(first, end):
        for column in range(kept.shape[1] if kept.shape[0] else 0):
            kept[row, column] = table[row, column]
        is_whole = table[row, at.LAYERS_LOW] == low and table[row, at.LAYERS_HIGH] == high
        if not is_whole and table[row, at.STEP_SITE] >> 32:
            partial[num_partial] = row
            num_partial += 1
    return num_partial
