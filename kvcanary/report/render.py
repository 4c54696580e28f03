"""Report: the one screen that a finding prints, and the same as data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from kvcanary.pools.launch_site import site_name
from kvcanary.report.finding import Finding, next_command

#: What the text shows of a GPU, by the key that must be there.
_NVML = {
    "driver": "driver {driver}",
    "ecc_corrected": "ECC corrected {ecc_corrected}",
    "ecc_uncorrected": "ECC uncorrected {ecc_uncorrected}",
    "remapped_rows": "remapped rows {remapped_rows}",
    "remap_pending": "a row waits to be remapped",
    "last_xid": "last Xid {last_xid}",
    "address": "address {address}, word {word} of the row",
}
RED, BOLD, PLAIN = "\x1b[31m", "\x1b[1m", "\x1b[0m"
SHOWN_FINDINGS = 2  # whole on the screen; the next ones are one line each
SHOWN_HEADLINES = 8
OUTSIDE = frozenset({"R1", "W1"})  # no such slot
PLACELESS = frozenset({"H1", "H2"})  # they are about the canary, not about a slot


@dataclass(frozen=True)
class Report:
    """Findings of one check, what was done about them, and the counters at that moment.

    dump: the file that has more, or None.  rank: of the worker that has them, where there are several
    """

    findings: tuple[Finding, ...]
    action: str
    counters: Mapping[str, int]
    dump: str | None = None
    rank: int | None = None

    def text(self, colour: bool = False) -> str:
        """One screen, the class and the place first."""
        lines = [line for finding in self.findings[:SHOWN_FINDINGS] for line in _finding_lines(finding, colour)]
        others = self.findings[SHOWN_FINDINGS:]
        lines += [f"kvcanary: ERROR: {_headline(finding)}" for finding in others[:SHOWN_HEADLINES]]
        if len(others) > SHOWN_HEADLINES:
            lines.append(f"kvcanary: and {len(others) - SHOWN_HEADLINES} more findings")
        lines.append(_line("action", self.action))
        lines.append(_line("rank", "" if self.rank is None else str(self.rank)))
        lines.append(_line("dump", self.dump or ""))
        lines.append(_line("next", next_command(self.findings[0], self.dump) if self.findings else ""))
        lines.append(_summary(len(self.findings), self.counters))
        return "\n".join(filter(None, lines))

    def to_dict(self) -> dict[str, Any]:
        """The findings as their events have them, and what they share."""
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "action": self.action,
            "counters": dict(self.counters),
            "dump": self.dump,
            "rank": self.rank,
        }

    def print(self, stream: TextIO) -> None:
        """Print to a stream, in colour only on a terminal and never with NO_COLOR."""
        stream.write(self.text(colour=wants_colour(stream)) + "\n")


def wants_colour(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    environ = os.environ if environ is None else environ
    return stream.isatty() and not environ.get("NO_COLOR")


def _headline(finding: Finding) -> str:
    """`content changed (R9): target pool, slot 4711 (page 294, offset 7), layer 12, V, head 0, dim 33, bit 21`."""
    places = [f"{finding.pool} pool"]
    if finding.slot < 0 and "resource" in finding.found:
        return f"{finding.name} ({finding.code}): {finding.found['resource']}"
    if finding.code in PLACELESS:
        places.append(site_name(*finding.site))
    elif finding.entry is not None:
        places = [f"{finding.pool} states", *([f"entry {finding.entry}"] if finding.entry >= 0 else [])]
    elif finding.code != "L1" or finding.slot >= 0:  # an event may name requests alone
        places.append(f"slot {finding.slot} (page {finding.page}, offset {finding.offset})")
    if finding.layer is not None:
        places.append(f"layer {finding.layer}" if len(finding.layers) == 1 else f"layers {_few(finding.layers)}")
    if finding.part is not None:
        places += [finding.part, f"head {finding.head}", f"dim {finding.dim}"]
        places.append(f"bit {finding.bit}" if finding.bit is not None else f"byte {finding.byte}")
    return f"{finding.name} ({finding.code}): {', '.join(places)}"


def _finding_lines(finding: Finding, colour: bool) -> list[str]:
    head = f"kvcanary: ERROR: {_headline(finding)}"
    causes = []
    for rank, cause in enumerate(finding.causes, 1):
        causes.append(f"{rank}. {cause.text} ({cause.family}, {cause.basis})")
        causes += [f"   {text}" for text in cause.evidence]
    labelled: dict[str, Sequence[str]] = {
        "meaning": [finding.sentence],
        "expected": [_pairs(finding.expected)],
        "found": [_pairs(finding.found)],
        "bytes": [f"{answer.text} ({answer.basis})" for answer in finding.bytes_of[:1]],
        "reader": [_reader(finding)],
        "writer": [_writer(finding)],
        "owner": [_owner(finding)],
        "launch": [f"{site_name(*finding.site)}, step {finding.step}; {_since(finding)}"],
        "blast": [_blast(finding)],
        "hardware": [_hardware(finding.hardware)],
        "cause": causes,
        "evidence": finding.evidence,
    }
    lines = [
        _line("" if number else label, text) for label, texts in labelled.items() for number, text in enumerate(texts)
    ]
    return [f"{BOLD}{RED}{head}{PLAIN}" if colour else head, *filter(None, lines)]


def _line(label: str, text: str) -> str:
    return f"  {label:<9} {text}" if text else ""


def _reader(finding: Finding) -> str:
    if finding.reader is None:
        return ""
    position = "" if finding.position is None else f", position {finding.position}"
    return f"{finding.reader!r}{position}"


def _writer(finding: Finding) -> str:
    if finding.write_site is None:
        return "" if _has_no_slot(finding) else "nobody has declared a write of this slot"
    nobody = "padding" if finding.code == "W9" else "a request that ended long ago"
    name = nobody if finding.writer is None else repr(finding.writer)
    last = f"{name}, {site_name(*finding.write_site)}, step {finding.write_step}"
    return f"undeclared write; the last declared one is {last}" if finding.undeclared else last


def _owner(finding: Finding) -> str:
    if _has_no_slot(finding):
        return ""
    return "; ".join(finding.history[-3:]) if finding.history else "the page was never granted"


def _has_no_slot(finding: Finding) -> bool:
    """Outside of its pool, or about no place of it."""
    return finding.code in OUTSIDE | PLACELESS or finding.slot < 0


def _since(finding: Finding) -> str:
    good = "not known" if finding.last_good_step is None else f"at step {finding.last_good_step}"
    return f"last good {good}, first bad at step {finding.first_bad_step}"


def _blast(finding: Finding) -> str:
    if not finding.readers:
        return ""
    return f"{_few([repr(name) for name in finding.readers])}; {finding.exposed_tokens} tokens exposed"


def _hardware(told: Mapping[str, Any]) -> str:
    """Of a GPU, with what its driver said at that moment; of a CPU nothing that a reader does not know."""
    if "gpu_uuid" not in told:
        return ""
    parts = [f"{told['gpu_uuid']} ({told['pci_bus_id']}) of {told['hostname']}, pid {told['pid']}"]
    parts += [text for name, text in _NVML.items() if told.get(name) not in (None, False)]
    return "; ".join(part.format(**told) for part in parts)


def _pairs(values: Mapping[str, Any]) -> str:
    shown = {name: _few(value) if isinstance(value, list) else value for name, value in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value not in (None, ""))


def _few(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:4]))
    return shown if len(values) <= 4 else f"{shown} and {len(values) - 4} more"


def _summary(findings: int, counters: Mapping[str, int]) -> str:
    plural = "finding" if findings == 1 else "findings"
    counted = ", ".join(f"{value} {name}" for name, value in counters.items())
    return f"kvcanary: {findings} {plural}, {counted}"
