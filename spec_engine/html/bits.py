"""Expected and found side by side: as bits where both are known, else as values by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HEX = re.compile(r"0x[0-9a-f]{1,16}")
WITHHELD = "withheld"


def compared(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What a template draws of a finding's two sides.

    rows:     by name the value expected and the one found, None where a side has none, and whether they differ
    octets:   eight bits at a time, the highest first: numbers of the first and last one, and of each bit both sides;
              empty unless both sides have `bits`
    differs:  numbers of the bits that differ, ascending
    withheld: whether a side was left out, as dumps do without `--kv-canary-dump-content`
    """
    octets, differs = _octets(expected.get("bits"), found.get("bits"))
    names = [name for name in dict.fromkeys([*expected, *found]) if not (name == "bits" and octets)]
    sides = [(name, expected.get(name), found.get(name)) for name in names]
    shown = [side for side in sides if WITHHELD not in side[1:]]
    rows = [_row(*side) for side in shown]
    return {"rows": rows, "octets": octets, "differs": differs, "withheld": len(shown) < len(sides)}


def _row(name: str, expected: Any, found: Any) -> dict[str, Any]:
    left, right = _short(expected), _short(found)
    if left == right and expected != found:
        left, right = expected, found  # they differ behind the digits that are shown
    return {"name": name.replace("_", " "), "expected": left, "found": right, "differs": expected != found}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.9g}" if isinstance(value, float) else value


def _octets(expected: Any, found: Any) -> tuple[list[dict[str, Any]], list[int]]:
    if not all(isinstance(side, str) and HEX.fullmatch(side) for side in (expected, found)):
        return [], []
    width = -(-max(len(expected), len(found), 4) // 2) * 8 - 8  # digits, without 0x, in whole bytes
    left, right = int(expected, 16), int(found, 16)
    bits = [
        {"number": number, "expected": left >> number & 1, "found": right >> number & 1}
        for number in range(width - 1, -1, -1)
    ]
    octets = [{"high": part[0]["number"], "low": part[-1]["number"], "bits": part} for part in _eights(bits)]
    return octets, [bit["number"] for bit in reversed(bits) if bit["expected"] != bit["found"]]


def _eights(bits: list[dict[str, int]]) -> list[list[dict[str, int]]]:
    return [bits[start : start + 8] for start in range(0, len(bits), 8)]
