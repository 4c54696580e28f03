"""The checks of this version: code, short name, plain sentence, and which finding speaks first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One check: its code, its name in reports, and what a hit means in one sentence."""

    code: str
    name: str
    sentence: str


_ALL = (
    Code("W1", "write out of range", "a forward was told to write a slot that the pool does not have"),
    Code("W4", "duplicate write", "one forward writes the same slot, or the same layer of it, twice"),
    Code("W5", "write position", "an entry is written at a position that is not its parent's plus one"),
    Code("R1", "slot out of range", "attention was told to read a slot that the pool does not have"),
    Code("R2", "null slot", "a live row reads a null slot, which belongs to padding"),
    Code("R3", "record damaged", "the canary's own record of this slot was overwritten"),
    Code("R12", "unwritten slot", "the slot was not written, or not by every layer, since its page was granted"),
    Code("R7", "stale page", "the row points at a page that was given back, or never granted"),
    Code("R8", "foreign slot", "the row points at a page that was granted to another request"),
    Code("W6", "wrong input", "a forward was given a token that is not the request's own at that position"),
    Code("R4", "wrong position", "the slot holds a token of another position than the row expects there"),
    Code("R5", "chain break", "the slot holds a token that does not continue the token before it"),
    Code("R10", "row length", "the row is not as long as what the request has committed and this forward adds"),
    Code("R11", "future", "the slot was written by a later step than that of its reader"),
    Code("R9", "content changed", "bytes of K or V are not those that were written"),
    Code("R13", "tree mask", "a tree node sees something else than the prefix and its own ancestors"),
    Code("P1", "poison damaged", "somebody wrote into a page that belonged to nobody"),
    Code("H1", "canary not running", "tokens became final that no forward with canary hooks has written"),
    Code("R6", "wrong row", "the row is consistent, but it is not this request's: its tokens differ"),
)

#: Codes by name; the order is the order in which findings at one slot speak: W first, then R as listed.
CODES: dict[str, Code] = {code.code: code for code in _ALL}
RANK: dict[str, int] = {code.code: rank for rank, code in enumerate(_ALL)}
#: Checks of the bytes; the others are checks of identity.
CONTENT_CODES = frozenset({"R9"})
