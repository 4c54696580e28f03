"""Layout: cards, where compiled loops find by one address each what is known of a pool, a forward and a request."""

from __future__ import annotations

#: Of a pool, [POOL_CARD] int64, filled once: numbers, and addresses of arrays that stay where they are.
(
    SLOTS,
    NULL_SLOTS,
    PAGE_SIZE,
    WINDOW,  # 0: none
    VOCABULARY,  # 0: not known
    TOKEN_OFFSET,
    AHEAD,
    POOL_ID,
    BASE,
    SEAL_TERM,
    LAYERS,
    LOW_LAYERS,
    HIGH_LAYERS,
    WORDS,  # of a row of one layer
    PARTS,
    ADDRESSES,  # [parts, layers] of slot 0
    LAYOUT,  # [parts, PIECE_FIELDS]
    KEYS,
    STARTS,  # [layers] of lane a
    START_B,
    CONTENT_A,
    RECORDS,
    EXPECTED,
    SEEN_SLOTS,
    WRITERS,  # 0: pages are not known to the loops
    POOL_CARD,
) = range(26)
PIECE_FIELDS = 8

#: Of a forward, [HEAD] int64 in front of its plan.
(
    POOL,
    ENTRIES,
    ROWS,
    WIDTH,
    REQUESTS,
    KIND,  # one of these: GUESSES, LAGS, or neither
    INDEX,
    STEP,
    SITE,
    HAS_PARENTS,
    HAS_LINEAGE,  # it lies in the place of parents
    HAS_STARTS,
    IDS,
    NUM_IDS,
    MASK,  # 0: none
    NODES,
    LANES,  # 0: nobody compares the bytes
    BEFORE,  # address of the chain values of the draft forward before, which the lineage names; 0: none
    NUM_BEFORE,
    SEEN,  # what sealing it has seen
    HEAD,
) = range(21)
OTHER, GUESSES, LAGS = range(3)
KINDS = {"draft": GUESSES, "extend": LAGS}

#: What a loop says of a plan, in the low bits of the address of its head.
CONTRADICTS, REFUSES, ADDRESS = 1, 2, ~7

#: Of a request in a pool, [FACTS] int64, while forwards that wait are judged.
(
    UID,
    GRANTED,  # slots of its row
    NUM_GRANTED,
    TOKENS,
    NUM_TOKENS,
    TRUTHS,  # chain values, with room for all tokens
    NUM_TRUTHS,
    ROOT,
    COMMITTED,
    ROW_LEN,  # that forwards have written
    KNOWN,  # entries of the row that were judged and not rewritten since
    JUDGED,  # entries of the longest row that these forwards read: 0, and so on, before they are looked at
    JUDGED_STEP,
    FIRST_ID,
    FACTS,
) = range(15)

#: Of a request as long as it lives, [REQUEST_CARD], and behind it of each of its chains [CHAIN_CARD] int64.
(
    TOKENS_KNOWN,  # their address
    TOKEN_STEPS,  # address of the steps in which they became known
    NUM_TOKENS_KNOWN,
    TOKENS_ROOM,  # tokens that have room there
    CHAIN_MULTIPLIER,
    CHAIN_KEY,
    UID_KNOWN,
    NUM_CHAINS,
    IS_LIVE,
    COMMITTED_LEN,
    COMMIT_STEP,
    FINAL_PAGES,
    NUM_IN_THE_AIR,  # captured forwards with its rows of which the host has not learned yet
    NUM_UNLANDED,  # captured steps with its rows that accept what the host has not learned yet
    UNHEARD_STEPS,  # address of steps that are in the books and of which the engine has not told yet, oldest first
    NUM_UNHEARD,
    UNHEARD_ROOM,
    ROW_SLOTS,  # address of the slots of its row
    NUM_ROW_SLOTS,
    ROW_ROOM,  # slots that have room there
    OWNED_LEN,  # entries that are the request's own; ALL
    ROW_LACKS,  # 1 where pages of what is final were given back, and it has not begun anew
    REQUEST_CARD,
) = range(23)
(
    CHAIN_VALUES,  # their address, with as much room
    CHAIN_COUNT,
    CHAIN_ROOT,
    CHAIN_OFFSET,  # entry p holds token p + this
    CHAIN_AHEAD,
    CHAIN_WRITTEN,  # entries of the row that forwards have written
    CHAIN_READS,  # address of the queue of looks, [QUEUE_CARD]
    TAIL_PAGE,  # the last page whose unwritten end was looked at, and the grant in which it was
    TAIL_GRANT,
    CHAIN_CARD,
) = range(10)
LACKING_BITS = 32  # above numbers of lengths that are UNKNOWN: whether rows lack pages of what is to be read
UNKNOWN = -1  # length of a row that the host does not know, or of a chain one of whose tokens it does not
#: Of a step that the engine has not told of: tokens, committed length before it, and after it.
UNHEARD_TOKENS, UNHEARD_BEFORE, UNHEARD_AFTER, UNHEARD_CARD = range(4)
#: Of a queue of looks: positions [0, length) are in it, as a ring of ranges, oldest look first; their number, how many
#: have room, which is the first, and their address.
QUEUE_LENGTH, NUM_RANGES, RANGES_ROOM, FIRST_RANGE, RANGES, QUEUE_CARD = range(6)
#: Of a range: positions [start, end), and the step in which their bytes were known good.
RANGE_START, RANGE_END, RANGE_STEP, RANGE = range(4)
RANGES_TO_SPARE = 2  # one that joins, and one that a look cuts off
#: Of ranges that are looked at, and whose they are.
TAKEN_ROW, TAKEN_START, TAKEN_END, TAKEN_STEP, TAKEN = range(5)
ITS_SHARE, ALL = -1, 1 << 62  # positions of a row that are looked at: as many as bring it round in time, or all
END_ROW, END_LENGTH, END_PAGE, END = range(4)  # of rows whose last page is looked at
#: What `loops.take_slice` says: slots, ranges, and how many steps the oldest of them has waited.
SLICE_SLOTS, SLICE_RANGES, SLICE_WAIT, SLICE_SAID = range(4)
#: Of rows that a captured forward is launched with, [ROW_NUMBERS, requests] int64: those of `RowTruth`, then
#: committed lengths. Behind them the sum of those that the engine had told; UNKNOWN: rows are as the engine knows them.
ROW_UIDS, ROW_LENGTHS, ROW_CHAINS, ROW_ROOTS, ROW_UNHEARD, ROW_COMMITTED, ROW_NUMBERS = range(7)
#: Of a place to which these numbers go for a forward, [SPREAD_CARD] int64: the address of its step, that of the first
#: part, of how many rows each part is, how many of the parts, and as how many rows a request counts.
SPREAD_STEP, SPREAD_AT, SPREAD_SIZE, SPREAD_PARTS, SPREAD_WIDTH, SPREAD_CARD = range(6)
#: What a loop says of what is told of requests: nothing was done; what it is to be judged by the rules, and done then;
#: some entries become final that no forward has written; pages of some rows may be final.
NO_ROOM, LEFT_TO_BOOKS, NOT_WRITTEN, PAGES_FINAL = 1, 2, 4, 8

#: Of a captured forward, [LINE_CARD] int64 that stay: where parts of the line begin that tells of its runs.
(
    LINE_POOL,
    LINE_BOUNDS,
    LINE_STARTS,
    LINE_ENDS,
    LINE_TOKENS,
    LINE_PARENTS,  # NOWHERE: none
    LINE_SAFE,
    LINE_MASK,  # NOWHERE: none
    LINE_ENTRIES,  # that it has room for
    LINE_WIDTH,
    LINE_NODES,
    LINE_KIND,  # one of GUESSES, LAGS, OTHER
    LINE_NUMBER,  # of the substep in its bank; NOWHERE: its forward comes once, and is left to the rules
    LINE_HEADER,
    LINE_STEP,  # where the line tells the step and turn of its run
    LINE_TURN,  # in which it was launched last
    LINE_CARD,
) = range(17)
NOWHERE = -1
ROWS_FULL = -2  # a row has no room for slots

#: Of the books, [BOOKS_CARD] addresses: states of pages; by record whether it was judged, and whether it was learned.
BOOKS_STATES, BOOKS_JUDGED, BOOKS_LEARNED, BOOKS_CARD = range(4)

#: What a loop says of a line, below the number of its entries.
LEFT_TO_RULES, PAGES_FRESH, REWRITES, LINE_BITS = 1, 2, 4, 3

#: Of a run of a captured forward that was launched, [RUN_CARD].
(
    RUN_LINE_CARD,  # address of its substep's
    RUN_LINE,  # address of the line
    RUN_READS,  # entries that its rows read, as the engine knew their lengths
    RUN_REQUESTS,
    RUN_CARDS,  # address of their addresses
    RUN_TURN,
    RUN_STEP,
    RUN_ROWS,  # address of what was known of the rows; the same for forwards that were launched together
    RUN_WRITTEN,  # address, by request; 0: as many as the step before it accepts
    RUN_ACCEPTED,  # address of what that has accepted
    RUN_PLACES,
    RUN_KEEP,  # numbers that are kept of it where it is clean: of its line from the first on, then what was accepted
    RUN_SEEN,  # 0; then what the loop says of it: these bits, and above them what it says of the line
    RUN_CARD,
) = range(14)
HAS_RUN, IS_SHORT, RUN_BITS = 1, 2, 2
PLACE_BITS = 32  # of a request's number in a run

#: Of a run of a captured move that was launched, [MOVE_CARD]: the address of its pool's card; that of its line, where
#: [size] destinations, sources and first columns of records lie, [size, 2] bitmaps of layers that differ, and the
#: step; the size; the turn; and numbers that are kept of it where it is clean, of its line from the first on.
MOVE_POOL, MOVE_LINE, MOVE_SIZE, MOVE_TURN, MOVE_KEEP, MOVE_CARD = range(6)

#: Of what `loops.land_quiet` goes by, [QUIET_CARD] addresses and numbers that stay: the books; headers as they were
#: taken last, counts in front of a header's runs, and its size; slots of a page; what is said of pages as runs land;
#: and what is said besides, [SAID].
(
    QUIET_BOOKS,
    QUIET_SEEN,
    QUIET_COUNTS,
    QUIET_HEADER,
    QUIET_PAGE_SIZE,
    QUIET_FINAL,
    QUIET_SAID,
    QUIET_CARD,
) = range(8)
#: What `loops.land_quiet` answers of a step: it is left to the rules, all of it is done, pages have still to follow, or
#: requests lack room for what was accepted, and it goes on from there when it is called again.
NOT_QUIET, ALL_DONE, HAS_MORE, LACKS_ROOM = range(4)
#: What it says besides, [SAID].
(
    SAID_END,  # of the runs that were heard of; it goes on from there
    SAID_SEEN,  # of any of them, as RUN_SEEN has it, without numbers of entries
    SAID_PLACE,  # where `loops.land_runs` stands
    SAID_RUNS,  # [NUM_RUNS], what has run
) = range(4)
SAID_SUMS = SAID_RUNS + 3  # of all quiet steps, since somebody has counted them:
SUM_FORWARDS, SUM_ENTRIES, SUM_READS, SUM_WRITERS, SUMS = range(5)  # the last: steps that wrote
SAID = SAID_SUMS + SUMS

#: What a loop says of forwards that are not clean.
PLANS_WRONG, READS_WRONG = 1, 2
SEALED_BITS = 2  # above these, what sealing has seen

#: Of a book of pages, [PAGE_BOOK] int64: its arrays' addresses, [pages] each, and of a table which states are writable.
(
    PAGE_STATES,
    PAGE_OWNERS,
    PAGE_WRITERS,
    PAGE_GENERATIONS,
    PAGE_REFERENCES,
    PAGE_PUBLISHED,
    PAGE_HOLDERS,
    NUM_PAGES,
    WRITABLE_STATES,
    NUM_STATES,
    NUM_PUBLISHED,  # pages that a prefix cache holds
    PAGE_BOOK,
) = range(12)
#: What an event does to a page: nothing yet, its state alone, its owner too, or a new generation begins or ends.
ASKS, STAYS, CHANGES_OWNER, BEGINS, ENDS = range(5)
#: Of pages as runs land, [FINAL_CARD]: what `loops.follow_event` takes for those that become final; how many have room
#: at two addresses, which they are and the uids of their rows, and how many are there. Then how many that were written
#: for the first time have room, at which address, and how many are there.
(
    FINAL_BOOK,
    FINAL_FOLLOWING,
    FINAL_ROOM,
    FINAL_OF,
    FINAL_UIDS,
    NUM_FINAL,
    FRESH_ROOM,
    FRESH_OF,
    NUM_FRESH,
    FINAL_CARD,
) = range(10)
ILLEGAL = 255  # in the place of a state that follows: the event may not happen
NOT_A_WRITER = -3  # in `PAGE_WRITERS`: equal to no uid and to no kind of owner

#: What the loop that seals a forward has seen: an entry that was judged, a position that is not the parent's plus one,
#: a null slot, a page that is written for the first time, a row that does not read what its lineage goes on from.
REWRITTEN, MISPLACED, NULL_WRITTEN, PAGE_FRESH, ASTRAY = 1, 2, 4, 8, 16
#: And the one that moves records: REWRITTEN, or an entry that nobody has written; their bits.
BLANK, MOVED_BITS = 2, 2
