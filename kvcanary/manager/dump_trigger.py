"""DumpTrigger: when and where a dump is written: at a finding, at SIGUSR1, or when somebody asks."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from kvcanary.errors import DumpError

if TYPE_CHECKING:
    from kvcanary.config import CanaryConfig
    from kvcanary.recorder.recorder import Recorder
    from kvcanary.report.finding import Finding

MOST_DUMPS = 16  # that findings may write, so that a flood does not fill a disk
SUFFIX = ".kvdump"
_events = structlog.get_logger("kvcanary")


LISTENERS: weakref.WeakSet[DumpTrigger] = weakref.WeakSet()


class DumpTrigger:
    """Writes dumps into `config.dump_dir`. What goes wrong meanwhile is told, and stops nobody.

    is_asked: whether a signal has asked for one since the last `tick`
    """

    def __init__(
        self, config: CanaryConfig, recorder: Recorder, source: Callable[[Sequence[Finding], str], dict[str, Any]]
    ) -> None:
        self._config, self._recorder = config, recorder
        self._source = weakref.WeakMethod(source)  # a manager goes with its last user, and frees its pools then
        self._num_dumps = 0
        self.is_asked = False

    def on_finding(self, findings: Sequence[Finding]) -> str | None:
        """A dump for these, while there are not too many; its path."""
        if self._num_dumps >= MOST_DUMPS or not findings:
            return None
        return self._into_folder(findings, "finding", findings[0].code)

    def listen(self) -> None:
        """From now on SIGUSR1 asks for a dump, unless the program has a use of its own for it."""
        is_main = threading.current_thread() is threading.main_thread()  # no other may set a handler
        if self._config.dump_dir is None or not is_main:
            return
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, _ask)
        LISTENERS.add(self)

    def close(self) -> None:
        """Listen no more. The handler stays: without one the next signal would end the process."""
        LISTENERS.discard(self)

    def tick(self) -> None:
        """A step was checked, and a signal had asked for a dump."""
        self.is_asked = False
        self._into_folder((), "signal", "SIGUSR1")

    def write(self, path: Path, findings: Sequence[Finding], trigger: str) -> Path:
        """DumpError where nothing is recorded, OSError where the file cannot be written."""
        self._write(path, findings, trigger)
        _tell(path, trigger)
        return path

    def _write(self, path: Path, findings: Sequence[Finding], trigger: str) -> None:
        source = self._source()
        if source is None or not self._recorder.is_on:
            raise DumpError("there is nothing to dump: give ring some steps, and dump after arm()")
        from kvcanary.dumps.writing import Source, write_dump

        write_dump(Source(**source(findings, trigger)), path)

    def _into_folder(self, findings: Sequence[Finding], trigger: str, why: str) -> str | None:
        folder = self._config.dump_dir
        if folder is None or not self._recorder.is_on:
            return None
        self._num_dumps += 1
        step = findings[0].step if findings else self._recorder.manager_state.checks.step
        name = f"step{step}-{why}-{os.getpid()}-{self._num_dumps}{SUFFIX}"
        return write_into(folder, name, trigger, lambda path: self._write(path, findings, trigger))


def write_into(folder: str, name: str, trigger: str, write: Callable[[Path], None]) -> str | None:
    """The path of the file that `write` made in a folder; None, and an event, where that could not be done."""
    path = Path(folder) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        _tell(path, trigger)
    except Exception as error:  # a dump must never be what stops an engine, or hides a finding
        _events.error("kvcanary.dump_failed", folder=folder, trigger=trigger, error=f"{type(error).__name__}: {error}")
        return None
    return str(path)


def _tell(path: Path, trigger: str) -> None:
    _events.info("kvcanary.dump", path=str(path), trigger=trigger, bytes=path.stat().st_size)


def _ask(number: int, frame: Any) -> None:
    """The handler of SIGUSR1: the next check of every canary writes a dump."""
    for dumper in LISTENERS:
        dumper.is_asked = True
