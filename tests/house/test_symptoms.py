"""The page that starts from the symptom: its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "garbage.md"
SHOWN = re.findall(r"^```console\n\$ kvcanary (.*?)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("arguments", "expected"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_a_command_prints_what_is_shown(root: Path, arguments: str, expected: str) -> None:
    """Line by line, but for what `...` leaves out."""
    command = [sys.executable, "-m", "kvcanary_tools", *shlex.split(arguments)]
    child = subprocess.run(command, cwd=root, capture_output=True, text=True)
    rest = child.stdout
    assert rest.strip(), child.stderr
    for part in filter(None, expected.split("...\n")):
        _before, found, rest = rest.partition(part)
        assert found == part, f"not printed: {part}"


def test_every_code_of_the_page_is_one() -> None:
    """A symptom leads to checks that exist."""
    from kvcanary.codes import FED

    named = set(re.findall(r"\b[A-Z]\d{1,2}\b", PAGE.read_text())) - {"V1"}  # vLLM's runner
    assert named <= FED
    assert len(named) >= 12
