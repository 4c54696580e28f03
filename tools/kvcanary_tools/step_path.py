"""The path of a step: the files of kvcanary whose code a clean decode step runs, eager and captured.

``python -m kvcanary_tools.step_path`` counts them. Whoever wants to know what a step does reads these, so fewer are
better, and those that both ways share are read once. Compiled loops count with the file in which they are written.
Embedded model without drafts, default canary; of some steps in the midst of an answer the one with the fewest files,
since others re-read bytes or grant pages as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import kvcanary
from kvcanary.native import loops
from kvcanary.native.jit import LOOPS
from spec_engine import Engine, EngineConfig, SamplingParams

ROOT = Path(kvcanary.__file__).parent
PROMPT = "def add(a, b):\n    return a + b\n"
WARM_UP, WATCHED = 60, 8  # steps


def path_of_a_step(graphs: str) -> set[str]:
    """Files, as paths below kvcanary/; `graphs`: "on" or "off", as `EngineConfig` has it."""
    engine = Engine(EngineConfig(draft="none", graphs=graphs, canary=kvcanary.CanaryConfig(mode="raise")))
    engine.submit(PROMPT, SamplingParams(max_new_tokens=2 * WARM_UP))
    for _ in range(WARM_UP):
        engine.step()
    return min((_files_of_step(engine) for _ in range(WATCHED)), key=len)


def _files_of_step(engine: Engine) -> set[str]:
    files: set[str] = set()
    entries = {id(getattr(loops, name)): made.py_func.__code__.co_filename for name, made in LOOPS.items()}

    def ran(code: CodeType, _: object = None) -> None:
        files.add(code.co_filename)

    def called(function: object) -> None:
        if id(function) in entries:
            files.add(entries[id(function)])

    with _heard(ran, called):
        engine.step()
    return {str(path.relative_to(ROOT)) for path in map(Path, files) if path.is_relative_to(ROOT)}


@contextmanager
def _heard(ran: Callable[..., None], called: Callable[[object], None]) -> Iterator[None]:
    """Every code that begins to run, and every function that is called; compiled loops with arrays are among the first.

    Since Python 3.12 numba tells `sys.monitoring` of those, and no profiler.
    """
    if sys.version_info >= (3, 12):
        watch, events = sys.monitoring, sys.monitoring.events
        watch.use_tool_id(watch.PROFILER_ID, "step_path")
        watch.register_callback(watch.PROFILER_ID, events.PY_START, ran)
        watch.register_callback(watch.PROFILER_ID, events.CALL, lambda code, offset, function, first: called(function))
        watch.set_events(watch.PROFILER_ID, events.PY_START | events.CALL)
        try:
            yield
        finally:
            watch.set_events(watch.PROFILER_ID, events.NO_EVENTS)
            watch.free_tool_id(watch.PROFILER_ID)
        return

    def profiled(frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            ran(frame.f_code)
        elif event == "c_call":
            called(function)

    sys.setprofile(profiled)
    try:
        yield
    finally:
        sys.setprofile(None)


def main() -> None:
    eager, captured = path_of_a_step("off"), path_of_a_step("on")
    for name, files in (("both", eager & captured), ("eager", eager - captured), ("captured", captured - eager)):
        print(f"{name}: {len(files)}")
        print(*(f"  {file}" for file in sorted(files)), sep="\n")
    print(f"an eager step runs code of {len(eager)} files, a captured one of {len(captured)}")


if __name__ == "__main__":
    main()
