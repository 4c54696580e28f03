"""Layout: structs and plans of int64 that compiled loops and Python share, each by one address, and loops' answers."""

from __future__ import annotations

from array import array
from collections import namedtuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcanary_kernels.record.formats import Format
from kvcanary_kernels.record.rows import Piece


def struct(name: str, fields: str) -> Any:
    """Places of a struct's fields by name, from 0 on, and its `size`: numbers, which loops take as constants.

    Python reads `struct[REQUEST.num_tokens]`, loops read `view(REQUEST, struct).num_tokens` (native/jit.py).
    """
    names = fields.split()
    return namedtuple(name, [*names, "size"])(*range(len(names) + 1))  # type: ignore[misc]


def filled(struct: Any, **fields: int) -> array[int]:
    """The numbers of a struct: these fields, and zeros."""
    return array("q", struct._replace(**dict.fromkeys(struct._fields, 0) | fields)[:-1])


def flags(count: int) -> list[int]:
    """So many distinct bits."""
    return [1 << bit for bit in range(count)]


#: Of a pool, filled once: numbers, and addresses of arrays that stay where they are.
#: window, vocabulary: 0: none, not known;  words: of a row of one layer;  addresses: [parts, layers] of slot 0
#: formats: [parts, FORMAT];  asks_finite: whether what is stored must be finite
#: layout: [parts, PIECE];  starts: [layers] of fingerprint a;  writers: 0: pages are not known to the loops
POOL = struct(
    "Pool",
    "num_slots null_slots page_size window vocabulary token_offset ahead pool_id base seal_term layers low_layers "
    "high_layers words parts addresses layout keys starts start_b content_a records seen_slots writers formats "
    "asks_finite",
)
#: How one part of a row lies: `Piece` of the kernels.
PIECE = struct("PartOfRow", " ".join(Piece._fields))
#: How to see that an element of such a part is not finite: `Format` of the kernels.
FORMAT = struct("FormatOfPart", " ".join(Format._fields))
#: Of K or V, [batch, heads, n, dim], whose heads lie apart: bytes from row to row of the batch, from head to head, from
#: entry to entry; words a head.
HEADS = struct("Heads", "address batch_step head_step entry_step words heads")

#: Of a forward, in front of its plan (PlanLayout).
#: kind: GUESSES, LAGS or OTHER;  ids, num_ids: of the slots that it reads
#: nodes: entries that every row must write, as many as its tree mask says; -1: any
#: has_lineage: it lies in the place of parents;  mask: 0: none
#: fingerprints: 0: nobody compares the bytes;  before, num_before: chain values of the draft forward before, which the
#: lineage names, 0: none;  seen: what sealing it has seen;  not_finite: 1 + layer * entries + entry of the first
#: that was stored with an element that is NaN or infinite
FORWARD = struct(
    "Head",
    "pool entries rows width requests kind index step site has_parents has_lineage ids num_ids mask nodes "
    "fingerprints before num_before seen not_finite",
)
#: What `loops.take_plan` makes such a plan of: fields of FORWARD as they become, then addresses of tensors, 0 where
#: there is none; behind them of each request its uid and committed length.
#: count: entries that every row writes, where `written` is 0
ASKED = struct(
    "Asked",
    " ".join(FORWARD._fields[: FORWARD.fingerprints])
    + " slots tokens positions parents lineage indptr written count starts prefixes",
)
OTHER, GUESSES, LAGS = range(3)
KINDS = {"draft": GUESSES, "extend": LAGS}

#: What a loop says of a plan, in the low bits of the address of its head.
CONTRADICTS, REFUSES = flags(2)
ADDRESS = ~7

#: Of a request in a pool, while forwards that wait are judged.
#: granted: slots of its row;  truths: chain values, with room for all tokens;  row_len: that forwards have written
#: known: entries of the row that were judged and not rewritten since
#: judged: entries of the longest row that these forwards read: 0, and so on, before they are looked at
FACT = struct(
    "Fact",
    "uid granted num_granted tokens num_tokens truths num_truths root committed_len row_len known judged judged_step "
    "first_id",
)

#: Of a request as long as it lives, and behind it of each of its chains a ROW_CHAIN.
#: tokens, token_steps: addresses of tokens, and of the steps in which they became known; tokens_room have room there
#: num_in_flight: captured forwards with its rows of which the host has not learned yet
#: num_pending_acceptances: captured steps with its rows that accept what the host has not learned yet
#: unheard: address of steps (UNHEARD) that are in the books and that the engine has not declared yet, oldest first
#: row: address of the slots of its row;  owned_len: entries that are the request's own; ALL
#: row_lacks: 1 where pages of what is final were given back, and it has not begun anew
REQUEST = struct(
    "RequestCard",
    "tokens token_steps num_tokens tokens_room multiplier mix_key uid num_chains is_live committed_len commit_step "
    "final_pages num_in_flight num_pending_acceptances uncollected num_uncollected uncollected_room row num_row "
    "row_room owned_len row_lacks",
)
#: values: their address, with as much room;  offset: entry p holds token p + this
#: written: entries of the row that forwards have written;  reads: address of its QUEUE
#: tail_page, tail_grant: the last page whose unwritten end was looked at, and the grant in which it was
ROW_CHAIN = struct("RowChain", "values count root offset ahead written reads tail_page tail_grant")
LACKING_BITS = 32  # above numbers of lengths that are UNKNOWN: whether rows lack pages of what is to be read
UNKNOWN = -1  # length of a row that the host does not know, or of a chain one of whose tokens it does not
#: Of a step that the engine has not declared: tokens, committed length before it, and after it.
UNCOLLECTED = struct("UnheardStep", "tokens before after")
#: Of a queue of re-reads: positions [0, length) are in it, as a ring of ranges, oldest re-read first; their number, how
#: many have room, which is the first, and their address.
QUEUE = struct("Queue", "length num_ranges room first ranges")
#: Of a range: positions [start, end), and the step in which their bytes were known good.
RANGE = struct("Range", "start end step")
RANGES_TO_SPARE = 2  # one that joins, and one that a re-read cuts off
#: Of ranges that are read, and whose they are.
TAKEN = struct("Taken", "row start end step")
ITS_SHARE, ALL = -1, 1 << 62  # positions of a row that are read: as many as bring it round in time, or all
#: Of rows whose last page is looked at.
ROW_END = struct("RowEnd", "row length page")
#: What `loops.list_ends` lists of slots: the grant that each is in, position and row.
LISTED = struct("Listed", "slots grants positions rows")
#: What `loops.take_slice` says: slots, ranges, and how many steps the oldest of them has waited.
SLICE = struct("Slice", "slots ranges wait")
#: Of rows that a captured forward is launched with, [ROWS.size, requests]: those of `RowTruth`, then
#: committed lengths. Behind them the sum of those that the engine had declared; UNKNOWN: rows are as the engine knows
#: them.
ROWS = struct("Rows", "uids lengths chains roots uncollected committed")
#: Of a place to which these numbers go for a forward: the address of its step, that of the first
#: part, of how many rows each part is, how many of the parts, and as how many rows a request counts.
SPREAD = struct("Spread", "step at room parts width")
#: What a loop says of what is told of requests: nothing was done; what it is to be judged by the rules, and done then;
#: some entries become final that no forward has written; pages of some rows may be final.
NO_ROOM, LEFT_TO_LEDGER, NOT_WRITTEN, PAGES_FINAL = flags(4)

#: Of a captured forward, numbers that stay: where parts of the message about its runs begin.
#: parents, mask: NOWHERE: none;  entries: that it has room for
#: number: of the substep in its registry; NOWHERE: its forward comes once, and is left to the rules
#: step: where the message has the step and turn of its run;  turn: in which it was launched last
LINE = struct(
    "Line",
    "pool bounds starts ends tokens parents safe mask entries width nodes kind number header step turn",
)
NOWHERE = -1
ROWS_FULL = -2  # a row has no room for slots

#: Of the books, addresses: states of pages; by record whether it was judged, and whether it was learned.
BOOKS = struct("Books", "states judged learned")

#: What a loop says of a message, below the number of its entries.
LEFT_TO_RULES, PAGES_FRESH, REWRITES = LINE_FLAGS = flags(3)
MESSAGE_BITS = len(LINE_FLAGS)

#: Of a run of a captured forward that was launched.
#: message_struct: address of its substep's LINE;  message: its address
#: reads: entries that its rows read, as the engine knew their lengths;  structs: address of the requests' addresses
#: rows: address of what was known of the rows; the same for forwards that were launched together
#: written: address, by request; 0: as many as the step before it accepts;  accepted: address of what that has accepted
#: keep: numbers that are kept of it where it is clean: of its message from the first on, then what was accepted
#: seen: 0; then what the loop says of it: these bits, and above them what it says of the message
RUN = struct("Run", "message_struct message reads requests structs turn step rows written accepted places keep seen")
HAS_RUN, IS_SHORT = RUN_FLAGS = flags(2)
RUN_BITS = len(RUN_FLAGS)
PLACE_BITS = 32  # of a request's number in a run

#: Of a run of a captured move that was launched. message: its address, where [count] destinations, sources and
#: first columns of records lie, [count, 2] bitmaps of layers that differ, and the step
#: keep: numbers that are kept of it where it is clean, of its message from the first on
MOVE = struct("Move", "pool message count turn keep")

#: What `loops.collect_quiet` goes by: books; headers as they were taken last, counts in front of a header's runs, and
#: its size; what is said of pages as runs are collected (FINAL), and besides (SAID).
QUIET = struct("Quiet", "tables seen counts header page_size final said")
#: What it answers of a step: it is left to the rules, all of it is done, pages have still to follow, or requests lack
#: room for what was accepted, and it goes on from there when it is called again.
NOT_QUIET, ALL_DONE, HAS_MORE, LACKS_ROOM = range(4)
#: What it says besides: end: of the runs that were read, from which it goes on;  seen: of any of them, as RUN.seen
#: has it, without numbers of entries;  place: where `loops.finalise_runs` stands;  ran_*: what has run, as `settle`
#: counts Then sums of all quiet steps since somebody has counted them; writers: steps that wrote.
SAID = struct("Said", "end seen place ran_rows ran_written ran_read forwards entries reads writers")

#: What a loop says of forwards that are not clean.
PLANS_WRONG, READS_WRONG = SETTLED_FLAGS = flags(2)
SEALED_BITS = len(SETTLED_FLAGS)  # above these, what sealing has seen

#: Of the states of pages: its arrays' addresses, [pages] each, and of a table which states are writable.
#: num_published: pages that a prefix cache holds
PAGES = struct(
    "Pages",
    "states owners writers generations references published holders num_pages writable_states num_states num_published",
)
#: What an event does to a page: nothing yet, its state alone, its owner too, or a new generation begins or ends.
ASKS, STAYS, CHANGES_OWNER, BEGINS, ENDS = range(5)
#: Of pages as runs are collected: what `loops.follow_event` takes for those that become final; how many have room
#: at two addresses, which they are and the uids of their rows, and how many are there. Then how many that were written
#: for the first time have room, at which address, and how many are there.
FINAL = struct("Final", "struct following room pages uids num_final fresh_room fresh num_fresh")
ILLEGAL = 255  # in the place of a state that follows: the event may not happen
NOT_A_WRITER = -3  # in `PAGES.writers`: equal to no uid and to no kind of owner

#: What the loop that seals a forward has seen: an entry that was judged, a position that is not the parent's plus one,
#: a null slot, a page that is written for the first time, a row that does not read what its lineage goes on from.
REWRITTEN, MISPLACED, NULL_WRITTEN, PAGE_FRESH, ASTRAY = flags(5)
#: And the one that moves records: REWRITTEN, or an entry that nobody has written; their bits.
BLANK = MISPLACED
MOVED_BITS = 2


class PlanLayout(
    namedtuple(
        "PlanLayout",
        "slots tokens positions parents bounds written starts owns begins skipped prefixes who chains end",
    )
):
    """Where arrays of int64 begin, one behind the other, counted from the plan's first number.

    slots, tokens, positions, parents:           [entries]
    bounds:                                      [rows + 1], where rows begin in the indices that they read
    written, starts, owns, begins, skipped:      [rows]
    prefixes:                                    [requests]; the plan ends behind them
    who:    [requests * 2] uids and committed lengths;  chains: [entries] values, once sealed; both behind the plan
    """

    def part(self, plan: NDArray[np.int64], name: str) -> NDArray[np.int64]:
        """The array of that name, in place."""
        at = self._fields.index(name)
        return plan[self[at] : self[at + 1]]


def plan_layout(entries: int, rows: int, requests: int) -> PlanLayout:
    """Of a forward that writes `entries` and whose requests have so many `rows`."""
    bounds = 4 * entries
    row = bounds + rows + 1
    prefixes = row + 5 * rows
    who, chains = prefixes + requests, prefixes + 3 * requests
    of_entries, of_rows = (0, entries, 2 * entries, 3 * entries), (row, row + rows, row + 2 * rows, row + 3 * rows)
    return PlanLayout(*of_entries, bounds, *of_rows, row + 4 * rows, prefixes, who, chains, chains + entries)
