"""What the always-on host checks cost: ``python -m kvcanary_tools.bench.embedded.host_checks``.

Every check of `kvcanary.invariants`, and every function of the engine that prepares one (`check_...`), is replaced by
one that keeps its time; the outermost counts. Embedded model, EAGLE-3 trees, canary off, 20 held-out prompts x 64
tokens, batch 1 and 8, one thread, processor time. Two shares are stated: of the whole time of a step, and of that time
without models and attention, which on a GPU the host does not wait for. Keeping time costs time too, so both are upper
bounds.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from unittest.mock import patch

import torch

from kvcanary_tools.bench.common import PROMPTS, machine, progress, save
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.kv_memory import KVMemory
from spec_engine.models.embedded import load_excerpts

NEW_TOKENS = 64
BATCH_SIZES = (1, 8)
ALLOWED_PERCENT = 1.0


class Clock:
    """Seconds inside some functions, those that they call not counted twice."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._depth = 0.0, 0, 0

    def around(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args, **kwargs):
            if self._depth:
                return function(*args, **kwargs)
            self._depth, started = 1, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - started
                self.calls, self._depth = self.calls + 1, 0

        return timed


def main() -> None:
    torch.set_num_threads(1)
    result = measure([excerpt.prompt for excerpt in load_excerpts()[:PROMPTS]])
    save("host_checks", result)
    print("batch   checks a step   us a step   % of the step   % without models")
    for row in result["rows"]:
        shares = f"{row['percent_of_step']:13.2f}   {row['percent_without_models']:16.2f}"
        print(f"{row['batch']:5d}   {row['checks_per_step']:13.1f}   {row['checks_us_per_step']:9.1f}   {shares}")


def measure(prompts: Sequence[str], new_tokens: int = NEW_TOKENS) -> dict:
    """Time in the checks over the time of all steps, by batch size."""
    rows = []
    for batch in BATCH_SIZES:
        rows.append(run(prompts, new_tokens, batch))
        progress(str(rows[-1]))
    return {
        "what": "time in always-on host checks / time of all steps, prefill included",
        "machine": machine(),
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "rows": rows,
    }


def run(prompts: Sequence[str], new_tokens: int, batch: int) -> dict:
    engine = Engine(EngineConfig(prefix_cache=False, max_running_requests=batch))
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    engine.generate(prompts[:batch], params)  # a warm-up
    checks, models, steps = Clock(), Clock(), Clock()
    engine.step = steps.around(engine.step)
    with timed_checks(checks), timed_models(models, engine):
        engine.generate(prompts, params)
    return {
        "batch": batch,
        "steps": steps.calls,
        "step_us": round(1e6 * steps.seconds / steps.calls, 1),
        "models_us_per_step": round(1e6 * models.seconds / steps.calls, 1),
        "checks_per_step": round(checks.calls / steps.calls, 1),
        "checks_us_per_step": round(1e6 * checks.seconds / steps.calls, 1),
        "percent_of_step": round(100 * checks.seconds / steps.seconds, 3),
        "percent_without_models": round(100 * checks.seconds / (steps.seconds - models.seconds), 3),
    }


@contextmanager
def timed_checks(clock: Clock) -> Iterator[None]:
    """Every check, wherever a module of engine or canary has imported it."""
    with patch.object(KVMemory, "check_accounting", clock.around(KVMemory.check_accounting)):
        changed = [(module, name, value) for module, name, value in all_checks()]
        for module, name, value in changed:
            setattr(module, name, clock.around(value))
        try:
            yield
        finally:
            for module, name, value in changed:
                setattr(module, name, value)


@contextmanager
def timed_models(clock: Clock, engine: Engine) -> Iterator[None]:
    """The forwards of target and head, attention included."""
    with (
        patch.object(engine.model, "forward", clock.around(engine.model.forward)),
        patch.object(engine.head, "forward", clock.around(engine.head.forward)),
    ):
        yield


def all_checks() -> list[tuple[object, str, FunctionType]]:
    """Module, name and function of every ``check_...`` of engine and invariants, import by import."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("kvcanary", "spec_engine")]
    return [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("check_")
        and isinstance(value, FunctionType)
        and (value.__module__.startswith(("kvcanary.invariants.", "spec_engine.")))
    ]


if __name__ == "__main__":
    main()
