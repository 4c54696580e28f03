"""Running a command that the user has given, with a word of it replaced."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping

STEP, DUMP = "{step}", "{dump}"  # what stands for a step to try, and for the dump to write
SHOWN = 300  # characters of what a command that failed has said


def run(command: str, words: Mapping[str, str], timeout: float) -> int:
    """Its exit code, 0 or 1. RuntimeError for another one, which is neither good nor bad; no shell is asked."""
    arguments = shlex.split(command)
    for name, value in words.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    done = subprocess.run(arguments, capture_output=True, timeout=timeout, check=False, text=True, errors="replace")
    if done.returncode not in (0, 1):
        said = done.stderr.strip()[-SHOWN:]
        raise RuntimeError(
            f"the command ended in code {done.returncode}, 0 is good and 1 is bad: {shlex.join(arguments)}"
            + (f"\n{said}" if said else "")
        )
    return done.returncode
