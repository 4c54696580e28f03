"""State facts: what was known of a recurrent state when a check fired there; its causes and report are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LyingState:
    """What the last declared event has left in an entry.

    absorbed: tokens that the state has absorbed, drafts included;  drafted: of these, the last ones that were drafts
    writer:   request whose tokens they are;  uid: the same as records have it
    kind:     of the forward that left it, or "move", "load"; empty: nobody has written since it was granted
    chain:    after what it has absorbed, unsigned; 0 where it was not asked for
    """

    absorbed: int = 0
    drafted: int = 0
    writer: str | None = None
    uid: int = 0
    kind: str = ""
    step: int = 0
    chain: int = 0


@dataclass(frozen=True)
class StateFacts:
    """Beside the violation: what lies in the entry, whose it is, and where the right state lies.

    wanted:    tokens that the state should have absorbed; None where that is not the question
    lies:      the state that lies there
    owner:     request that the entry is granted to; is_shared: a prefix cache may hand it out; is_free: nobody has it
    generation: of its grant
    elsewhere: another entry of the same request whose state has absorbed what was wanted; None: there is none
    elsewhere_step: of that one, when it was written
    first_difference: position from which the tokens that it has absorbed are others; None: they are the same
    same_tokens: they are the same under another root: salt or adapter
    bytes_of:  whose bytes lie there now, in words; empty: not known
    bytes_source: "null", "entry" or "zero" with it
    last_ran:  step of the row's last forward before this one, where the device keeps no more; None: not known
    history:   grants, copies, publications and frees of the entry, oldest first
    """

    wanted: int | None = None
    lies: LyingState = field(default_factory=LyingState)
    owner: str | None = None
    is_shared: bool = False
    is_free: bool = False
    generation: int = 0
    elsewhere: int | None = None
    elsewhere_step: int = 0
    first_difference: int | None = None
    same_tokens: bool = False
    bytes_of: str = ""
    bytes_source: str = ""
    last_ran: int | None = None
    history: tuple[str, ...] = ()
