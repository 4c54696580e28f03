"""Ctrl-C in the middle of a command: one sentence, exit code 130, what there is of a result, and nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvcanary_tools.campaign import soak as soaking

Child = subprocess.Popen[str]
SCRIPT = "from kvcanary_tools.__main__ import run; run()"  # what the console script does
SAID = {"capture_output": True, "text": True, "check": False}
MOST_SECONDS = 60  # for a beginning, and for an end, on a busy machine
SENTENCES = {"demo": "kvcanary: interrupted", "inject": "interrupted: 1 of "}


@pytest.fixture(autouse=True)
def heeds_interrupts() -> Iterator[None]:
    """A shell that starts tests in the background has them ignore Ctrl-C, and all that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def completes(child: Child) -> bool:
    """The first tokens have been shown."""
    return "   > " in child.stdout.readline()


def has_workers(child: Child) -> bool:
    """Both have been started; it takes them seconds to import what they need."""
    time.sleep(0.05)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text()
    return len(children.split()) >= 3  # one more tracks what they share


@pytest.mark.parametrize(
    ("arguments", "is_amidst"),
    [(["demo"], completes), (["inject", "bits", "--workers", "2", "--json", "matrix.json"], has_workers)],
    ids=["demo", "inject"],
)
def test_one_interrupt_ends_it(tmp_path: Path, arguments: list[str], is_amidst: Callable[[Child], bool]) -> None:
    """A terminal sends it to all processes of the group: no traceback of any of them, and files are whole."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + MOST_SECONDS
        while not is_amidst(child):
            assert child.poll() is None
            assert time.monotonic() < end
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=MOST_SECONDS)  # no process is left that could write there
    finally:
        child.kill()
    assert child.returncode == 130
    assert said.strip().startswith(SENTENCES[arguments[0]])  # behind the ^C that a terminal shows
    assert said.strip().count("\n") == 0
    files = [path.name for path in tmp_path.iterdir()]
    assert files == (["matrix.json"] if "--json" in arguments else [])
    assert all(not json.loads((tmp_path / name).read_text())["meta"]["complete"] for name in files)


def test_soak_tells_what_there_is(kvcanary, monkeypatch, tmp_path):
    """The ledger of the engines that have ended, and that it is not all."""
    run_one = soaking._run_one

    def interrupted(ledger, faults, rate, rng, number):
        if ledger.engines == 2:
            raise KeyboardInterrupt
        run_one(ledger, faults, rate, rng, number)

    monkeypatch.setattr(soaking, "_run_one", interrupted)
    file = tmp_path / "ledger.json"
    result = kvcanary("soak", "bits.flip", "--minutes", "5", "--json", str(file))
    ledger = json.loads(file.read_text())
    assert result.exit_code == 130
    assert (ledger["engines"], ledger["complete"]) == (2, False)
    assert "2 engines" in result.stdout
    assert result.stderr.startswith("interrupted: ")


def test_one_that_an_import_swallowed_is_one(kvcanary, monkeypatch):
    """Torch goes on when its import of numpy is interrupted; what fails of that later is no defect of ours."""

    def import_by_half() -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("kvcanary_tools.health.sections", import_by_half)
    result = kvcanary("doctor")
    assert (result.exit_code, result.stderr) == (130, "kvcanary: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_before_the_program_was_read_has_its_sentence() -> None:
    """While click is still being imported, long before anything could remember it."""
    early = (
        "import signal, sys; sys.meta_path.insert(0, type('_', (), {'find_spec': lambda *_: signal.raise_signal(2)}))"
    )
    ended = subprocess.run([sys.executable, "-c", f"import kvcanary_tools.__main__; {early}; {SCRIPT}"], **SAID)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "kvcanary: interrupted\n")
