"""One vLLM in this process, with or without the plug-in in turn: what both take, and where the time goes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kvcanary_tools.bench.vllm.clock import clocked
from kvcanary_tools.bench.vllm.model import (
    BLOCKS,
    KINDS,
    OUTPUT_TOKENS,
    POOL_BYTES,
    REQUESTS,
    SHAPES,
    make_prompts,
    write_model,
)
from kvcanary_tools.bench.vllm.turns import agreement, by_step, stepped, throughput

WARM_UPS = 2
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def draft_always(runner: Any) -> None:
    """Propose the last token again, where too little matches what was generated: each row that decodes has all drafts.

    runner: of n-grams, which proposes at times only
    """
    propose = runner.drafter.propose

    def always(*args: Any, **kwargs: Any) -> Any:
        drafts, sampled = propose(*args, **kwargs), next(own for own in args if isinstance(own, list))
        most = runner.drafter.k
        return [[*own, *row[-1:] * most][:most] for own, row in zip(drafts, sampled, strict=True)]

    runner.drafter.propose = always


class Bench:
    """One vLLM in this process, with or without the plug-in."""

    def __init__(
        self, folder: Path, size: str, drafts: str | None, deadline: float, kind: str = "dense", **engine: Any
    ) -> None:
        """drafts: `eagle` or `ngram`"""
        self.started, self.deadline = time.perf_counter(), deadline
        model = KINDS[kind].write(folder / "model", size)
        speculative = {}
        if drafts == "ngram":
            speculative["speculative_config"] = N_GRAMS
        if drafts == "eagle":
            draft = write_model(folder / "draft", SHAPES[size] | {"num_hidden_layers": 1}, is_draft=True)
            speculative["speculative_config"] = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 3}
        self.say("checkpoint")
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        own = {"num_gpu_blocks_override": BLOCKS} | KINDS[kind].engine | engine
        self.llm = LLM(
            model=str(model), skip_tokenizer_init=True, enable_prefix_caching=True, max_model_len=2048,
            max_num_seqs=256, max_num_batched_tokens=2048, gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=POOL_BYTES, disable_log_stats=False, seed=0, **speculative, **own,
        )  # fmt: skip
        core = self.llm.llm_engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker
        loaded = KINDS[kind].loaded
        if loaded is not None:
            loaded(self.worker.model_runner.model)
        self.runner, self.scheduler = self.worker.model_runner, core.scheduler
        if drafts == "ngram":
            draft_always(self.runner)
        self.is_plugged = hasattr(self.worker, "kvcanary")  # by the entry point, where KVCANARY_MODE asked for it
        self.say(f"engine with {type(self.runner).__module__}")

    @property
    def attention(self) -> list[str]:
        """The implementations of attention that layers have, each once."""
        layers = self.runner.compilation_config.static_forward_context.values()
        return sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")})

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s] {what}", flush=True)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() - self.started > self.deadline

    @contextmanager
    def watched(self, mode: str = "raise", content: str = "rolling", is_heard: bool = False) -> Iterator[Any]:
        """is_heard: the scheduler tells of blocks, as where the plug-in is there from the start"""
        from kvcanary import CanaryConfig
        from kvcanary.adapters.vllm.block_pool import follow
        from kvcanary.adapters.vllm.worker import attach

        self.llm.reset_prefix_cache()
        handle = attach(self.worker, CanaryConfig(mode=mode, content=content, ring=0))
        with ExitStack() as stack:
            stack.callback(handle.detach)
            if is_heard:
                stack.callback(follow())
            yield handle

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """What faults are tried on."""
        return make_prompts(count, seed)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, **sampling: Any) -> list[Any]:
        params = self.sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [output.outputs[0] for output in self.llm.generate(asked, params, use_tqdm=False)]

    def run(
        self, prompts: Sequence[Sequence[int]], tokens: int = OUTPUT_TOKENS, **sampling: Any
    ) -> tuple[list[Any], float]:
        """From an empty prefix cache; outputs and seconds."""
        self.llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = self.generate(prompts, tokens, **sampling)
        return outputs, time.perf_counter() - start

    def preemptions(self) -> int | None:
        values = [metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions"]
        return int(sum(values)) if values else None

    def compare(self, pairs: int, seconds: float) -> Iterator[dict[str, Any]]:
        """Interleaved pairs with and without, each side at least so many seconds; what was measured after each."""

        prompts, seconds_of_run = make_prompts(), 1.0
        result: dict[str, Any] = {"requests": REQUESTS, "on_off": [], "off_off": [], "findings": 0, "entries_judged": 0}
        if self.is_plugged:  # as users have it: from the start, and it saw warm-up
            self.run(prompts)
            result["plugged_at_start"] = self.worker.kvcanary.report()
            self.worker.kvcanary.detach()
        result["hooks_us"] = []  # of a step; not while turns are compared, since clocks cost too
        for _ in range(WARM_UPS):
            _, seconds_of_run = self.run(prompts)
            with clocked() as hooks, self.watched(mode="log", is_heard=True), stepped(self.llm.llm_engine) as spent:
                self.run(prompts)
            result["hooks_us"].append(1e6 * sum(own for _, own in hooks.values()) / len(spent))
        result["runs_a_side"] = runs = 2 * max(1, math.ceil(seconds / seconds_of_run / 2))
        before, tokens = self.preemptions(), {}
        steps: dict[bool, list[list[tuple[float, float]]]] = {False: [], True: []}
        for pair in range(pairs):
            for name in ("off_s", "on_s", "waits"):
                result.setdefault(name, []).append([])
            tokens[pair, False], tokens[pair, True] = [], []
            for number in range(2 * runs):  # without, with, with, without, and so on: drifts hit both
                is_on = number % 4 in (1, 2)
                with self.watched(mode="log", is_heard=True) if is_on else nullcontext() as handle:
                    with stepped(self.llm.llm_engine) as spent:
                        outputs, seconds_of_run = self.run(prompts)
                    if handle is not None:
                        result["certificate"] = told = handle.report()
                        result["waits"][-1].append(told["waits"])
                        result["findings"] += len(told["findings"])
                        result["entries_judged"] += told["slots_checked"]
                result["on_s" if is_on else "off_s"][-1].append(seconds_of_run)
                steps[is_on].append(spent)
                tokens[pair, is_on] += [list(output.token_ids) for output in outputs]
            result["on_off"].append(agreement(tokens[pair, True], tokens[pair, False]))
            if pair:
                result["off_off"].append(agreement(tokens[pair, False], tokens.pop((pair - 1, False))))
            result |= throughput(result["off_s"], result["on_s"])
            result["by_step"] = by_step(steps[False], steps[True])
            preempted = self.preemptions()
            result["preemptions"] = None if preempted is None or before is None else preempted - before
            self.say(f"pair {pair}: off {sum(result['off_s'][-1]):.2f} s, on {sum(result['on_s'][-1]):.2f} s")
            yield result
            if self.is_late:
                break
        result["gaps"] = self.gaps(prompts, tokens[0, True], result["on_off"][0]["first_different"])
        result["largest_gap_where_different"] = max(result["gaps"], default=0.0)
        yield result

    def gaps(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], differs: dict[int, int]
    ) -> list[float]:
        """Distance of the two best logits where requests first differ (log-probabilities have the same)."""
        chosen = list(differs.items())[:64]
        if not chosen:
            return []
        heads = [[*prompts[number % len(prompts)], *tokens[number][:place]] for number, place in chosen]
        outputs, _ = self.run(heads, tokens=1, logprobs=2)
        gaps = []
        for output in outputs:
            best = sorted((entry.logprob for entry in output.logprobs[0].values()), reverse=True)
            gaps.append(best[0] - best[1])
        return gaps

    def profile(self, out: Path) -> Iterator[dict[str, Any]]:
        """Where the time goes: hooks, then kernels, then functions, which are written beside the result."""
        from kvcanary_tools.bench.vllm import clock

        prompts = make_prompts()
        with clocked() as spent, self.watched(mode="log", is_heard=True) as handle:
            _, seconds = self.run(prompts)
            result = clock.reported(spent, seconds) | {"forwards": handle.report()["forwards"]}
        yield result
        with self.watched(mode="log", is_heard=True):
            result["kernels"] = clock.kernels(lambda: self.run(prompts, tokens=40))
        yield result
        with self.watched(mode="log", is_heard=True):
            (out / "profile.txt").write_text(clock.functions(lambda: self.run(prompts)))
        yield result
