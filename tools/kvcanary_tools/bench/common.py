"""What every benchmark shares: interleaved runs, the machine's description, the JSON file."""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median

import structlog
import torch

from kvcanary_tools import heap
from kvcanary_tools.files import lines_of
from spec_engine import Engine, SamplingParams
from spec_engine.metrics import Metrics

RESULTS = Path(__file__).parent / "results"
NUM_THREADS = 2
PROMPTS = 20
NEW_TOKENS = 128
PAIRS = 5
Rounds = dict[str, list[float]]  # seconds by round, of every engine by name


@dataclass(frozen=True)
class Timing:
    """Seconds of one pass over the prompts, and what it produced."""

    prefill_seconds: float
    step_seconds: float
    tokens: int
    accepted_length: float

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.step_seconds


def run_pass(
    engines: dict[str, Engine], batches: Sequence[list[str]], new_tokens: int | None = None
) -> dict[str, Timing]:
    """Complete every batch of prompts with every engine, the engines taking turns batch by batch.

    new_tokens: of each prompt; None: NEW_TOKENS.
    """
    params = SamplingParams(max_new_tokens=new_tokens or NEW_TOKENS, ignore_eos=True)
    for engine in engines.values():
        engine.metrics = Metrics()
    for turn, batch in enumerate(batches):
        order = list(engines.values())
        for engine in order if turn % 2 == 0 else reversed(order):  # neither always runs on the other's warm caches
            engine.generate(batch, params)
    return {name: _timing(engine.metrics) for name, engine in engines.items()}


@contextmanager
def settled() -> Iterator[None]:
    """The heap is settled within, as in `kvcanary serve`: a search for garbage would stop steps."""
    heap.settle()
    try:
        yield
    finally:
        gc.unfreeze()


def _timing(metrics: Metrics) -> Timing:
    return Timing(metrics.prefill_seconds, metrics.decode_seconds, metrics.tokens_emitted, metrics.accepted_length)


def ratios(passes: Sequence[dict[str, Timing]], over: str, under: str, seconds: Callable[[Timing], float]) -> dict:
    """Median and spread of ``seconds(over) / seconds(under)`` over the passes."""
    return spread([seconds(timings[over]) for timings in passes], [seconds(timings[under]) for timings in passes])


def spread(over: Sequence[float], under: Sequence[float]) -> dict:
    """Median, least and largest of the ratios, pair by pair."""
    values = [one / other for one, other in zip(over, under, strict=True)]
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def mean_over(orders: Sequence[Rounds]) -> Rounds:
    """Of every round the mean over these orders."""
    return {name: [fmean(each) for each in zip(*(own[name] for own in orders), strict=True)] for name in orders[0]}


def added(over: Sequence[float], under: Sequence[float]) -> dict:
    """Median, least and largest of the differences, pair by pair; of seconds, in microseconds."""
    values = [1e6 * (one - other) for one, other in zip(over, under, strict=True)]
    return {"median": round(median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def reported(spreads: dict[str, dict[str, float]]) -> str:
    """What `spread` gave, by name, as the end of a line of a table."""
    return "".join(f"   {name} x{s['median']:.4f} ({s['min']:.4f} to {s['max']:.4f})" for name, s in spreads.items())


def machine() -> dict:
    """Device, threads and versions: what a figure means nothing without."""
    return {
        "device": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kvcanary": version("kvcanary"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def save(name: str, result: dict, path: Path | None = None) -> None:
    """Write ``results/NAME.json``, or another file."""
    path = RESULTS / f"{name}.json" if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines_of(result) + "\n", encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)


def events_to_stderr() -> None:
    """A command's data alone goes to stdout. For the process of a command: settings of structlog are global."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
