"""Dumper: when and where a dump is written: at a finding, at SIGUSR1, or when somebody asks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from kvcanary.errors import DumpError

if TYPE_CHECKING:
    from kvcanary.config import CanaryConfig
    from kvcanary.findings import Finding
    from kvcanary.recorder import Recorder

MOST_DUMPS = 16  # that findings may write, so that a flood does not fill a disk
SUFFIX = ".kvdump"
_events = structlog.get_logger("kvcanary")


class Dumper:
    """Writes dumps into `config.dump_dir`. What goes wrong meanwhile is told, and stops nobody."""

    def __init__(
        self, config: CanaryConfig, recorder: Recorder, source: Callable[[Sequence[Finding], str], dict[str, Any]]
    ) -> None:
        self._config, self._recorder, self._source = config, recorder, source
        self._num_dumps = 0
        self._is_asked = False
        self._former: Any = None

    def on_finding(self, findings: Sequence[Finding]) -> str | None:
        """A dump for these, while there are not too many; its path."""
        if self._num_dumps >= MOST_DUMPS or not findings:
            return None
        return self._into_folder(findings, "finding", findings[0].code)

    def listen(self) -> None:
        """From now on SIGUSR1 asks for a dump, unless somebody else listens; signals come to the main thread only."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._config.dump_dir is None or not is_main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            return
        self._former = signal.signal(signal.SIGUSR1, self._ask)

    def close(self) -> None:
        """Listen no more."""
        if self._former is not None and signal.getsignal(signal.SIGUSR1) == self._ask:
            signal.signal(signal.SIGUSR1, self._former)
            self._former = None

    def tick(self) -> None:
        """A step was checked: write what a signal has asked for."""
        if self._is_asked:
            self._is_asked = False
            self._into_folder((), "signal", "SIGUSR1")

    def write(self, path: Path, findings: Sequence[Finding], trigger: str) -> Path:
        """DumpError where nothing is recorded, OSError where the file cannot be written."""
        if not self._recorder.is_on:
            raise DumpError("there is nothing to dump: give ring some steps, and dump after arm()")
        from kvcanary.dumps.writing import Source, write_dump

        write_dump(Source(**self._source(findings, trigger)), path)
        _events.info("kvcanary.dump", path=str(path), trigger=trigger, bytes=path.stat().st_size)
        return path

    def _ask(self, number: int, frame: Any) -> None:
        self._is_asked = True

    def _into_folder(self, findings: Sequence[Finding], trigger: str, why: str) -> str | None:
        folder = self._config.dump_dir
        if folder is None or not self._recorder.is_on:
            return None
        self._num_dumps += 1
        step = findings[0].step if findings else self._recorder.step
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = f"step{step}-{why}-{os.getpid()}-{self._num_dumps}{SUFFIX}"
            return str(self.write(Path(folder) / name, findings, trigger))
        except Exception as error:  # a dump must never be what stops an engine, or hides a finding
            _events.error(
                "kvcanary.dump_failed", folder=folder, trigger=trigger, error=f"{type(error).__name__}: {error}"
            )
            return None
