"""Our engine beside vLLM on one GPU: ``python -m kvcanary_tools.bench.vllm.beside``; needs vllm.

Both have Llama-3-8B's shape in bf16 with random weights of one distribution, pages of 16, no prefix cache, at most
8,192 prompt tokens a forward and captured decode steps; vLLM runs in this process, with its own scheduler ahead of the
device as by default. An engine of ours, without a canary and then with the default one, takes turns with vLLM, round by
round, the first of a round by turns too: prefills of 4,032 tokens, then decode steps of requests of 4,096. A prefill is
timed from the host until every prompt is forwarded, a decode step over STEPS of them, with the device idle before and
after; in vLLM requests decode while others still wait for their prefill, so ours are let run until contexts are equal.
What was measured is written after every part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

import torch

from kvcanary_tools.bench.common import machine, progress, save, settled, spread
from kvcanary_tools.bench.gpu import step
from kvcanary_tools.bench.gpu.device import device, give_back
from kvcanary_tools.bench.gpu.prefill import CHUNK, FEW_TOKENS
from spec_engine.metrics import Metrics
from spec_engine.models.decoder import Decoder
from spec_engine.sampling import SamplingParams

SIZES = (1, 64)  # requests
CANARIES = ("off", "rolling")
PREFILL_LEN = 4032
PREFILL_ROUNDS, DECODE_ROUNDS = {1: 8, 64: 2}, 4
DEADLINE = 230.0  # seconds after which no new round begins
NAME = "gpu_beside_vllm"
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}

Prompts = Sequence[Sequence[int]]


class Served(Protocol):
    """An engine that is measured; its context is the mean number of entries that a request's next token reads."""

    def prefill(self, prompts: Prompts) -> float:
        """Seconds; nothing of them is left."""

    def fill(self, prompts: Prompts) -> None:
        """These are in decode from now on."""

    def decode(self) -> float:
        """Seconds of a step, over step.STEPS of them."""

    def advance(self) -> None:
        """One step."""

    def clear(self) -> None:
        """No request is left."""

    @property
    def context(self) -> float: ...


def main(deadline: float = DEADLINE) -> None:
    started = time.perf_counter()

    def is_late() -> bool:
        return time.perf_counter() - started > deadline

    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.vllm.beside measures a CUDA device, and there is none here")
    if find_spec("vllm") is None:
        sys.exit("kvcanary_tools.bench.vllm.beside needs the package vllm, which is not installed")
    theirs = Theirs()
    progress(f"vllm is there after {time.perf_counter() - started:.0f} s")
    model = step.random_decoder(step.LLAMA_8B)
    result: dict[str, Any] = {
        "what": "milliseconds, vLLM and ours by turns in one process, Llama-3-8B's shape, bf16; ratio: ours / vLLM's",
        "machine": machine() | device() | theirs.settings,
        "steps": step.STEPS,
        "rows": [],
    }
    for size in SIZES:
        for canary in CANARIES:
            ours = Ours(canary, size, model)
            for row in compare(size, theirs, ours, PREFILL_ROUNDS[size], is_late):
                row = {"requests": size, "canary": canary, **row}
                result["rows"].append(row)
                save(NAME, result)
                print(reported(row), flush=True)
            ours.clear()
            del ours
            give_back()


def reported(row: dict) -> str:
    """A line of the table."""
    ratio = row["ratio"]
    times = f"vLLM {row['vllm_ms']:.3f} ms, ours {row['ours_ms']:.3f} ms"
    spreads = f"x{ratio['median']:.4f} ({ratio['min']:.4f} to {ratio['max']:.4f})"
    return f"{row['of']} of {row['requests']} x {row['tokens']:.0f}, canary {row['canary']}: {times}, {spreads}"


def compare(
    size: int, theirs: Served, ours: Served, prefill_rounds: int, is_late: Callable[[], bool] = lambda: False
) -> Iterator[dict]:
    """Prefills by turns, then decode steps by turns, as far as time allows."""
    draws = random.Random(0)

    def prompts(num: int, length: int) -> Prompts:
        return [[draws.randrange(step.LLAMA_8B["vocab_size"]) for _ in range(length)] for _ in range(num)]

    for served in (theirs, ours):
        served.prefill(prompts(min(size, 2), PREFILL_LEN))  # compiles
    turns = _turns(theirs, ours, prefill_rounds, lambda served: served.prefill(prompts(size, PREFILL_LEN)), is_late)
    yield {"of": "prefill", "tokens": PREFILL_LEN, **turns}
    if is_late():
        return
    for served in (theirs, ours):
        served.fill(prompts(size, step.PROMPT_LEN))
        for _ in range(step.WARM_STEPS):
            served.advance()
    align(theirs, ours)
    contexts = {"context": {"vllm": theirs.context, "ours": ours.context}}
    turns = _turns(theirs, ours, DECODE_ROUNDS, lambda served: served.decode(), is_late)
    theirs.clear()
    yield {"of": "decode", "tokens": step.PROMPT_LEN, **contexts, **turns}


def align(one: Served, other: Served) -> None:
    """Both have come as far, to a token."""
    while (ahead := one.context - other.context) >= 1 or ahead <= -1:
        (other if ahead > 0 else one).advance()


def _turns(
    theirs: Served, ours: Served, rounds: int, run: Callable[[Served], float], is_late: Callable[[], bool]
) -> dict[str, Any]:
    """Each round has both; at least one is run."""
    seconds: dict[str, list[float]] = {"vllm": [], "ours": []}
    order = [("vllm", theirs), ("ours", ours)]
    with settled():
        for number in range(rounds):
            if number and is_late():
                break
            for name, served in order if number % 2 == 0 else reversed(order):
                seconds[name].append(run(served))
    return {
        "rounds": len(seconds["ours"]),
        "vllm_ms": round(1e3 * median(seconds["vllm"]), 4),
        "ours_ms": round(1e3 * median(seconds["ours"]), 4),
        "ratio": spread(seconds["ours"], seconds["vllm"]),
    }


def _timed(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


class Ours:
    """Our engine, with room for these requests and the steps of a comparison."""

    def __init__(self, canary: str, size: int, model: Decoder, **settings: Any) -> None:
        rounds = DECODE_ROUNDS + 2
        self.num_new = step.new_tokens(rounds)
        turns = 2 if size * PREFILL_LEN <= FEW_TOKENS else 1  # room for what waits out its quarantine
        own = {
            "max_total_tokens": turns * size * (step.PROMPT_LEN + self.num_new + 4 * step.PAGE_SIZE),
            "prefill_chunk_tokens": PREFILL_LEN * (CHUNK // PREFILL_LEN),  # whole prompts
        }
        self.engine = step.make_engine(size, model, step.CANARIES[canary], rounds, **own | settings)

    def prefill(self, prompts: Prompts) -> float:
        self._submit(prompts)
        seconds = _timed(self._prefill)
        self.clear()
        return seconds

    def fill(self, prompts: Prompts) -> None:
        self._submit(prompts)
        self._prefill()

    def decode(self) -> float:
        return step.timed(self.engine)

    def advance(self) -> None:
        self.engine.step()

    def clear(self) -> None:
        for request in [*self.engine.running, *self.engine.scheduler.waiting]:
            self.engine.cancel(request.request_id)
        while self.engine.has_work:
            self.engine.step()

    @property
    def context(self) -> float:
        return mean(request.committed_len for request in self.engine.running)

    def _submit(self, prompts: Prompts) -> None:
        params = SamplingParams(max_new_tokens=self.num_new, ignore_eos=True)
        self.engine.metrics = Metrics()
        self._waiting = sum(map(len, prompts))
        for prompt in prompts:
            self.engine.submit(list(prompt), params)

    def _prefill(self) -> None:
        while self.engine.metrics.prefill_tokens < self._waiting:
            self.engine.step()


class Theirs:
    """vLLM in this process, its weights made random in place: dummy ones are nearly zero, and draw less power."""

    def __init__(self) -> None:
        os.environ |= ENVIRONMENT
        from vllm import LLM, SamplingParams

        longest = step.PROMPT_LEN + step.new_tokens(DECODE_ROUNDS + 2)
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder))
            self.llm = LLM(
                model=folder,
                load_format="dummy",
                dtype="bfloat16",
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                max_model_len=longest,
                max_num_seqs=max(SIZES),
                max_num_batched_tokens=CHUNK,
                num_gpu_blocks_override=max(SIZES) * -(-longest // step.PAGE_SIZE) + 1,
                gpu_memory_utilization=0.45,
                compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": list(SIZES)},
                seed=0,
            )
        self._params = SamplingParams
        self._engine = self.llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler, self._longest = core.scheduler, longest
        with torch.inference_mode():
            step.randomise(core.model_executor.driver_worker.worker.get_model())
        self._names: list[str] = []

    @property
    def settings(self) -> dict[str, str]:
        """What makes its figures what they are."""
        import vllm

        config = self._engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "vllm_graphs": str(config.compilation_config.cudagraph_mode),
            "vllm_async_scheduling": str(config.scheduler_config.async_scheduling),
        }

    def prefill(self, prompts: Prompts) -> float:
        self._submit(prompts, 1)
        seconds = _timed(self._finish)
        self._names.clear()
        return seconds

    def fill(self, prompts: Prompts) -> None:
        self._submit(prompts, self._longest - len(prompts[0]))
        while len(self._running) < len(prompts) or not all(one.num_output_tokens for one in self._running):
            self.advance()

    def decode(self) -> float:
        def steps() -> None:
            for _ in range(step.STEPS):
                self.advance()

        return _timed(steps) / step.STEPS

    def advance(self) -> None:
        self._engine.step()

    def clear(self) -> None:
        self._engine.abort_request(self._names, internal=True)
        self._names.clear()
        self._finish()
        for _ in range(2):  # what was in flight
            self.advance()

    @property
    def context(self) -> float:
        return mean(one.num_computed_tokens for one in self._running)

    @property
    def _running(self) -> list[Any]:
        return self._scheduler.running

    def _submit(self, prompts: Prompts, max_tokens: int) -> None:
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        self._names += self.llm.enqueue(inputs, params, use_tqdm=False)

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self.advance()


def write_config(folder: Path) -> None:
    """What vLLM reads of a checkpoint without weights."""
    own = {"model_type": "llama", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    own |= {"attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(step.LLAMA_8B | own))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds after which no new round begins")
    main(parser.parse_args().deadline)
