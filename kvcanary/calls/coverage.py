"""Coverage: what one manager has checked and what not, in counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcanary.calls.violation_log import ViolationGroup


@dataclass
class Coverage:
    """Counters of one manager.

    slots_checked: entries that some forward read and whose identity was judged
    states_checked: recurrent states that a forward began from, a copy or a prefix cache took, and that were judged
    bytes_checked: bytes of K, V and recurrent states that were read again and compared
    finite_bytes_checked: bytes of null pages, and of what nobody has written on granted pages, that were looked at for
                          NaN and infinities
    max_unread_steps: longest time, in steps, that a committed byte went without a re-read
    freed_unread_bytes: committed bytes whose pages were freed without a last re-read
    fired: by code, entries at which the check fired
    only_counted: of these, those that were too many to be kept
    untold_incidents: faults that were too many in one step to be described
    announced: forwards that the engine said would run, eager ones; each must have opened its hooks
    healed: mode heal: faults that were made good
    reader_probes: times that the engine's attention was asked to read known entries
    not_probed: why it was not, where that is known
    unproved_stores: forwards of which the engine stored a layer by itself: nothing says where those bytes went before
                     they are read
    """

    forwards: int = 0
    slots_checked: int = 0
    slots_sealed: int = 0
    states_checked: int = 0
    bytes_checked: int = 0
    finite_bytes_checked: int = 0
    peak_live_bytes: int = 0
    max_unread_steps: int = 0
    freed_unread_bytes: int = 0
    unchecked: dict[str, int] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)
    only_counted: int = 0
    untold_incidents: int = 0
    announced: int = 0
    healed: int = 0
    reader_probes: int = 0
    not_probed: str = ""
    unproved_stores: int = 0

    @property
    def is_store_proved(self) -> bool:
        """Whether the canary itself wrote, where it was planned, everything that any forward stored."""
        return self.forwards > 0 and not self.unproved_stores

    def skip(self, reason: str, count: int) -> None:
        """Something was not judged; the certificate says how often, and why."""
        if count:
            self.unchecked[reason] = self.unchecked.get(reason, 0) + count

    def count_violations(self, groups: Iterable[ViolationGroup]) -> None:
        """What a violation log took, whether it was kept or only counted."""
        for group in groups:
            if group.last is not None:
                self.fired[group.last.code] = self.fired.get(group.last.code, 0) + group.count
                self.only_counted += group.count - len(group.kept)

    def totals(self) -> dict[str, int]:
        """Everything that counts upwards, flat, for the periodic event."""
        counted = (
            "forwards",
            "slots_checked",
            "slots_sealed",
            "states_checked",
            "bytes_checked",
            "finite_bytes_checked",
        )
        other = ("freed_unread_bytes", "only_counted", "untold_incidents")
        sums = {"unchecked": sum(self.unchecked.values()), "fired": sum(self.fired.values())}
        return {name: getattr(self, name) for name in (*counted, *other)} | sums

    def counters(self) -> dict[str, int]:
        """The few that close a report."""
        return {
            "forwards": self.forwards,
            "slots checked": self.slots_checked,
            "bytes re-read": self.bytes_checked,
            "not judged": sum(self.unchecked.values()),
        }
