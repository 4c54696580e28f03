"""The plug-in inside a real vLLM: silent and cheap over 256 requests, then one fault at a time.

    python -m kvcanary_tools.bench.vllm_plugin --out FOLDER [--eagle] [--faults] [--deadline SECONDS]

Needs a GPU and vllm. A Llama of 1.1 B random parameters is written first; requests share prefixes, prompts come in
chunks, and the pool is small enough that requests are preempted. With and without the plug-in in turn, in one process,
in the same order. What was measured is written after every part (vllm.json, vllm_eagle.json), so that a run that is cut
short leaves what it had.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
REQUESTS, PREFIXES, PREFIX_TOKENS, OUTPUT_TOKENS = 256, 16, 240, 256
BLOCKS = 3600  # of 16 tokens: fewer than the requests would fill
GAP = 1e-2  # of the two best logits, below which two runs may differ
PAIRS, WARM_UPS = 4, 2


def make_prompts(count: int = REQUESTS, seed: int = 3) -> list[list[int]]:
    """Prompts of 260 to 700 tokens; each begins with one of PREFIXES."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(3, 32000) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    return [
        prefixes[draw.randrange(PREFIXES)] + [draw.randrange(3, 32000) for _ in range(draw.randrange(20, 460))]
        for _ in range(count)
    ]


def agreement(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Share of equal tokens, and by request where the first different one stands."""
    differs = {}
    equal = total = 0
    for number, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        total += max(len(ours), len(theirs))
        same = [a == b for a, b in zip(ours, theirs, strict=False)]
        equal += sum(same)
        if False in same:
            differs[number] = same.index(False)
    return {"share": equal / max(total, 1), "first_different": differs}


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def write_model(folder: Path, layers: int, is_draft: bool = False) -> Path:
    """A random checkpoint; a draft has what EAGLE adds, and shares the rest with its target."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPE | {"num_hidden_layers": layers}
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    generator = torch.Generator("cuda").manual_seed(11 + is_draft)

    def random_weight(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, device="cuda", generator=generator) * scale).to(torch.bfloat16).cpu()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    before, tensors = "" if is_draft else "model.", {}
    for layer in range(layers):
        name = f"{before}layers.{layer}."
        for part, rows, columns in (
            ("q", heads, hidden),
            ("k", kv_heads, hidden),
            ("v", kv_heads, hidden),
            ("o", hidden, heads),
        ):
            tensors[f"{name}self_attn.{part}_proj.weight"] = random_weight(rows, columns, columns**-0.5)
        for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[f"{name}mlp.{part}_proj.weight"] = random_weight(rows, columns, columns**-0.5)
        tensors[f"{name}post_attention_layernorm.weight"] = ones.clone()
        if not (is_draft and layer == 0):
            tensors[f"{name}input_layernorm.weight"] = ones.clone()
    if is_draft:
        tensors["fc.weight"] = random_weight(hidden, 2 * hidden, (2 * hidden) ** -0.5)
    else:
        tensors["model.embed_tokens.weight"] = random_weight(shape["vocab_size"], hidden, 1.0)
        tensors["lm_head.weight"] = random_weight(shape["vocab_size"], hidden, 2 * hidden**-0.5)
        tensors["model.norm.weight"] = ones.clone()
    save_file(tensors, str(folder / "model.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
    }
    config |= {"hidden_act": "silu", "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False}
    (folder / "config.json").write_text(json.dumps(shape | config))
    return folder


class Bench:
    """One vLLM in this process, with or without the plug-in."""

    def __init__(self, folder: Path, eagle: bool, deadline: float, **engine: Any) -> None:
        self.started, self.deadline = time.perf_counter(), deadline
        self.touched: str | None = None  # whose bytes or blocks a fault struck
        model = write_model(folder / "model", SHAPE["num_hidden_layers"])  # type: ignore[arg-type]
        speculative = {}
        if eagle:
            draft = write_model(folder / "draft", 1, is_draft=True)
            speculative["speculative_config"] = {"method": "eagle", "model": str(draft), "num_speculative_tokens": 3}
        self.say("checkpoint")
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        self.llm = LLM(
            model=str(model), skip_tokenizer_init=True, enable_prefix_caching=True, max_model_len=2048,
            max_num_seqs=256, max_num_batched_tokens=2048, num_gpu_blocks_override=BLOCKS, gpu_memory_utilization=0.5,
            disable_log_stats=False, seed=0, **speculative, **engine,
        )  # fmt: skip
        core = self.llm.llm_engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker
        self.runner, self.scheduler = self.worker.model_runner, core.scheduler
        self.is_plugged = hasattr(self.worker, "kvcanary")  # by the entry point, where KVCANARY_MODE asked for it
        self.say("engine")

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s] {what}", flush=True)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() - self.started > self.deadline

    @contextmanager
    def watched(self, mode: str = "raise", content: str = "rolling") -> Iterator[Any]:
        from kvcanary import CanaryConfig
        from kvcanary.adapters.vllm.worker import attach

        self.llm.reset_prefix_cache()
        handle = attach(self.worker, CanaryConfig(mode=mode, content=content, ring=0))
        try:
            yield handle
        finally:
            handle.detach()

    def run(
        self, prompts: Sequence[Sequence[int]], tokens: int = OUTPUT_TOKENS, **sampling: Any
    ) -> tuple[list[Any], float]:
        params = self.sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        self.llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs], time.perf_counter() - start

    def preemptions(self) -> int | None:
        values = [metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions"]
        return int(sum(values)) if values else None

    def compare(self) -> Iterator[dict[str, Any]]:
        """Interleaved pairs with and without; what was measured after each."""
        prompts, result = make_prompts(), {"requests": REQUESTS, "off_s": [], "on_s": [], "on_off": [], "off_off": []}
        for _ in range(WARM_UPS):
            self.run(prompts)
            with self.watched(mode="log"):
                self.run(prompts)
        before, tokens = self.preemptions(), {}
        for pair in range(PAIRS):
            for is_on in (False, True) if pair % 2 == 0 else (True, False):
                if is_on:
                    with self.watched(mode="log") as handle:
                        outputs, seconds = self.run(prompts)
                        result["certificate"] = handle.report()
                else:
                    outputs, seconds = self.run(prompts)
                tokens[pair, is_on] = [list(output.token_ids) for output in outputs]
                result["on_s" if is_on else "off_s"].append(seconds)
            result["on_off"].append(agreement(tokens[pair, True], tokens[pair, False]))
            if pair:
                result["off_off"].append(agreement(tokens[pair, False], tokens[pair - 1, False]))
            result["ratios"] = [off / on for off, on in zip(result["off_s"], result["on_s"], strict=True)]
            result["throughput_ratio"] = median(result["ratios"])
            result["findings"] = len(result["certificate"]["findings"])
            preempted = self.preemptions()
            result["preemptions"] = None if preempted is None or before is None else preempted - before
            self.say(f"pair {pair}: off {result['off_s'][-1]:.2f} s, on {result['on_s'][-1]:.2f} s")
            yield result
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
        heads = [[*prompts[number], *tokens[number][:place]] for number, place in chosen]
        outputs, _ = self.run(heads, tokens=1, logprobs=2)
        gaps = []
        for output in outputs:
            best = sorted((entry.logprob for entry in output.logprobs[0].values()), reverse=True)
            gaps.append(best[0] - best[1])
        return gaps

    # faults, one at a time

    def fault(self, harm: Callable[[Any, int], bool], mode: str = "log") -> dict[str, Any]:
        """Requests under `harm(handle, step)`, which is called before each step until it says that it has struck."""
        import torch

        prompts, self.touched = make_prompts(24, seed=5), None
        with self.watched(mode=mode, content="full") as handle:
            inner, state = self.runner.execute_model, {"step": 0, "struck": None}

            def execute_model(*args: Any, **kwargs: Any) -> Any:
                state["step"] += 1
                output = args[0] if args else kwargs["scheduler_output"]
                with torch.inference_mode():
                    if state["struck"] is None and harm(output, state["step"]):
                        state["struck"] = state["step"]
                return inner(*args, **kwargs)

            self.runner.execute_model = execute_model
            try:
                self.run(prompts, tokens=40)
            finally:
                self.runner.execute_model = inner
            report = handle.report()
        found = report["findings"][:3]
        kept = (
            "code",
            "reader",
            "writer",
            "position",
            "page",
            "slot",
            "layer",
            "layers",
            "part",
            "head",
            "dim",
            "bit",
            "action",
        )
        return {
            "struck": state["struck"],
            "touched": self.touched,
            "found": [{name: entry[name] for name in kept} for entry in found],
            "fired": report["fired"],
            "untold": report["untold_incidents"],
        }

    def row(self, output: Any, position: int) -> tuple[str, int] | None:
        """A request of this step that had more than so many entries before it, and its row."""
        states = self.runner.req_states
        for name, number in states.req_id_to_index.items():
            if name in output.num_scheduled_tokens and int(states.num_computed_tokens_np[number]) > position:
                return name, number
        return None

    def new_block(self, output: Any) -> tuple[str, int] | None:
        """A block that a running request is given in this step, and that request."""
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks and blocks[0]:
                return name, blocks[0][-1]
        return None

    def table(self) -> Any:
        return self.runner.block_tables.block_tables[0].gpu

    def caches(self) -> list[Any]:
        return [
            layer.kv_cache
            for layer in self.runner.compilation_config.static_forward_context.values()
            if layer.kv_cache.numel()
        ]

    def unused(self, count: int) -> list[int]:
        """Blocks that the scheduler would hand out last."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()[-count:]]

    def flip(self, output: Any, step: int) -> bool:
        import torch

        chosen = self.row(output, 200)
        if step < 12 or chosen is None:
            return False
        block = int(self.table()[chosen[1], 5])
        caches = self.caches()
        caches[len(caches) // 2].view(torch.int16)[block, 3, 7, 64 + 9] ^= 1 << 6
        self.touched = chosen[0]
        return True

    def swap(self, output: Any, step: int) -> bool:
        chosen = self.row(output, 200)
        if step < 12 or chosen is None:
            return False
        line = self.table()[chosen[1]]
        line[[2, 6]] = line[[6, 2]].clone()
        self.touched = chosen[0]
        return True

    def shift(self, output: Any, step: int) -> bool:
        if step < 12:
            return False
        tables = self.runner.block_tables
        right = tables.compute_slot_mappings

        def shifted(*args: Any, **kwargs: Any) -> Any:
            del tables.compute_slot_mappings
            slots = right(*args, **kwargs)
            slots[slots >= 0] += 1
            return slots

        tables.compute_slot_mappings = shifted
        return True

    def hand_out(self, output: Any, step: int) -> bool:
        chosen = self.row(output, 200)
        new = [
            data for data in output.scheduled_new_reqs if data.num_computed_tokens < 16 * (len(data.block_ids[0]) - 1)
        ]
        if chosen is None or not new:
            return False
        data = new[0]
        data.block_ids[0][data.num_computed_tokens // 16] = int(self.table()[chosen[1], 4])
        self.touched = chosen[0]
        return True

    def copy_left_out(self, output: Any, step: int) -> bool:
        from vllm.v1.worker.gpu import model_runner

        chosen, target = self.row(output, 200), self.new_block(output)
        if step < 12 or chosen is None or target is None:
            return False
        right = model_runner.copy_kv_cache_blocks_inplace

        def left_out(*args: Any) -> None:
            model_runner.copy_kv_cache_blocks_inplace = right

        model_runner.copy_kv_cache_blocks_inplace = left_out
        self.touched, block = target
        output.kv_cache_block_copies = [(int(self.table()[chosen[1], 3]), block)]
        return True

    def not_zeroed(self, output: Any, step: int) -> bool:
        target = self.new_block(output)
        if step < 12 or target is None:
            return False
        self.touched, block = target
        for cache in self.caches():
            cache[block] = 1

        class Zeroer:
            def zero_block_ids(self, blocks: Sequence[int]) -> None:
                """Nothing: the fault."""

        self.runner.kv_block_zeroer = Zeroer()
        output.new_block_ids_to_zero = [block]
        return True

    def load(self, goes_wrong: bool) -> dict[str, Any]:
        """A prefix that was written here comes back through a connector; into its own blocks, or into others."""
        from types import SimpleNamespace

        own, jobs = self.runner.kv_connector, []

        def pre_forward(scheduler_output: Any) -> None:
            for blocks, kept in jobs:
                for cache, data in zip(self.caches(), kept, strict=True):
                    cache[blocks] = data
            jobs.clear()

        methods = {name: getattr(own, name) for name in ("post_forward", "no_forward", "set_disabled")}
        self.runner.kv_connector = SimpleNamespace(kv_connector=own, pre_forward=pre_forward, **methods)
        prompt = make_prompts(1, seed=9)[0]
        try:
            with self.watched(mode="log", content="full") as handle:
                self.run([prompt], tokens=8)
                params = self.sampling(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
                inner = self.runner.add_requests

                def add_requests(output: Any) -> Any:
                    for data in output.scheduled_new_reqs:
                        blocks = list(data.block_ids[0])[: data.num_computed_tokens // 16]
                        if blocks and not state:
                            state.append(len(blocks))
                            kept = [cache[blocks].clone() for cache in self.caches()]
                            for cache in self.caches():
                                cache[blocks] = 0
                            handle.canary.forget()
                            jobs.append((self.unused(len(blocks)) if goes_wrong else blocks, kept))
                    return inner(output)

                state: list[int] = []
                self.runner.add_requests = add_requests
                try:
                    self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
                finally:
                    self.runner.add_requests = inner
                report = handle.report()
        finally:
            self.runner.kv_connector = own
        codes = [(entry["code"], entry["reader"], entry["page"], entry["action"]) for entry in report["findings"][:3]]
        return {"blocks": state, "found": codes, "unchecked": report["unchecked"], "checked": report["loads_checked"]}

    def faults(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in ("flip", "swap", "shift", "hand_out", "copy_left_out", "not_zeroed"):
            if self.is_late:
                return
            yield name, self.attempt(lambda name=name: self.fault(getattr(self, name)))  # type: ignore[misc]
        for name, goes_wrong in (("load", False), ("load_elsewhere", True)):
            yield name, self.attempt(lambda wrong=goes_wrong: self.load(wrong))  # type: ignore[misc]
        yield "none", self.attempt(lambda: self.fault(lambda output, step: False))
        yield "flip_raise", self.attempt(lambda: self.fault(self.flip, mode="raise"))

    def attempt(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return run()
        except Exception as error:
            return {"raised": type(error).__name__, "message": str(error)[:1500]}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the JSON.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("/dev/shm/kvcanary-vllm"), help="Checkpoints go here."
)
@click.option("--eagle", is_flag=True, help="With an EAGLE draft of random weights, which is nearly always rejected.")
@click.option("--faults", is_flag=True, help="Then the faults, one at a time.")
@click.option("--eager", is_flag=True, help="Without CUDA graphs.")
@click.option("--deadline", type=float, default=240.0, help="Seconds after which no new part begins.")
def command(out: Path, work: Path, eagle: bool, faults: bool, eager: bool, deadline: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(work, eagle, deadline, enforce_eager=eager)
    result: dict[str, Any] = {"eagle": eagle, "eager": eager, "plugged_at_start": bench.is_plugged, **machine()}
    path = out / ("vllm_eagle.json" if eagle else "vllm_eager.json" if eager else "vllm.json")
    for part in bench.compare():
        result["compared"] = part
        path.write_text(json.dumps(result, indent=1) + "\n")
        if bench.is_late:
            break
    shown = result.get("compared", {})
    print(
        {name: shown.get(name) for name in ("off_s", "on_s", "throughput_ratio", "findings", "preemptions")}, flush=True
    )
    print([entry["share"] for entry in (*shown["on_off"], *shown["off_off"])], shown.get("largest_gap_where_different"))
    for name, found in bench.faults() if faults else ():
        result.setdefault("faults", {})[name] = found
        path.write_text(json.dumps(result, indent=1) + "\n")
        bench.say(f"{name}: {json.dumps(found)[:700]}")


def machine() -> dict[str, Any]:
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "blocks": BLOCKS}


if __name__ == "__main__":
    command()
