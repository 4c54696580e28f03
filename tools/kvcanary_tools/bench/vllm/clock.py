"""Where the time of a canary inside vLLM goes: microseconds of each hook, the functions behind them, the kernels."""

from __future__ import annotations

import cProfile
import io
import pstats
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvcanary_kernels
from kvcanary.adapters.hosted.replacements import Replacements

KERNEL = re.compile(r"^def (_\w+_kernel)\(", re.MULTILINE)


@contextmanager
def clocked() -> Iterator[dict[str, list[float]]]:
    """What handles replace meanwhile counts, by hook, calls and seconds of its own (without the engine's)."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    replace = Replacements.replace

    def timed(self: Replacements, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        replace(self, owner, name, _timed(wrapper, spent[name]))

    with patch.object(Replacements, "replace", timed):
        yield spent


def _timed(wrapper: Callable[..., Any], cell: list[float]) -> Callable[..., Any]:
    def around(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inner = 0.0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inner
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                inner += time.perf_counter() - start

        start = time.perf_counter()
        try:
            return wrapper(run, *args, **kwargs)
        finally:
            cell[0] += 1
            cell[1] += time.perf_counter() - start - inner

    return around


def reported(spent: dict[str, list[float]], seconds: float) -> dict[str, Any]:
    """Microseconds a call by hook, and the share of the run that all of them took."""
    calls = {name: {"calls": count, "us": 1e6 * own / count} for name, (count, own) in spent.items() if count}
    return {"hooks": calls, "share_of_run": sum(own for _, own in spent.values()) / seconds, "run_s": seconds}


def functions(run: Callable[[], Any], most: int = 45) -> str:
    """The functions of the canary that took most, and of all."""
    made = cProfile.Profile()
    made.runcall(run)
    out = io.StringIO()
    stats = pstats.Stats(made, stream=out).strip_dirs()
    for order, pattern in (("tottime", ()), ("cumtime", ())):
        stats.sort_stats(order).print_stats(most, *pattern)
    full = pstats.Stats(made, stream=out)
    full.sort_stats("cumtime").print_stats("kvcanary", most)
    return out.getvalue()


def our_kernels() -> set[str]:
    """Names of the canary's kernels."""
    folder = Path(kvcanary_kernels.__file__).parent
    return {name for path in folder.rglob("*.py") for name in KERNEL.findall(path.read_text(encoding="utf-8"))}


def kernels(run: Callable[[], Any]) -> dict[str, Any]:
    """Microseconds of the GPU by kernel, ours and the ten others that took most, and of all together."""
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as made:
        run()
    seconds = time.perf_counter() - start
    rows = sorted(((e.key, e.count, e.self_device_time_total) for e in made.key_averages()), key=lambda row: -row[2])
    names = our_kernels()
    ours = [row for row in rows if row[0] in names]
    others = [row for row in rows if row not in ours]
    total = sum(row[2] for row in rows)
    return {"run_s": seconds, "all_us": total, "ours_us": sum(r[2] for r in ours), "ours": ours, "others": others[:10]}
