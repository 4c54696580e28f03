"""Kinds of caches inside a real vLLM on a CPU: ``python -m kvcanary_tools.bench.vllm.caches mla --out FILE``.

A clean run with and without the plug-in, a flipped bit in the cell of an entry, a bit of a block that nobody has, and
NaN that one layer stores, under a canary that raises. Kinds that this build of vLLM does not run are tried over
stand-ins by the tests.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.vllm.cpu import BLOCK, ENVIRONMENT, REQUESTS, TOKENS, CpuBench, machine
from kvcanary_tools.bench.vllm.hybrids.models import randomise
from kvcanary_tools.bench.vllm.model import SHAPES, write_latent_model, write_model

KINDS = ("bf16", "fp8", "mla", "windows", "chunks")
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 48, "num_hidden_layers": 4}
#: Of Llama 4, whose tokens see their own chunk in every other layer.
CHUNKED = SHAPES["tiny"] | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "layer_types": ["chunked_attention", "full_attention"] * 2,
    "attention_chunk_size": 64,  # a multiple of a block
    "intermediate_size_mlp": 256,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
NARROW = ("sliding_window", "attention_chunk_size")  # of layers that do not see a whole row
HARM_STEP, LAYER = 12, 1
KEPT = ("code", "reader", "writer", "position", "page", "layer", "layers", "part", "bit", "site")


def bench_of(kind: str, folder: Path) -> CpuBench:
    if kind == "mla":  # its backend for CPUs takes whole prompts, in blocks of its own size
        options = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, "block_size": 16}
        return CpuBench(folder, write_latent_model(folder / "model"), num_gpu_blocks_override=200, **options)
    if kind == "chunks":
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CHUNKED))
        bench = CpuBench(folder, folder / "model", load_format="dummy")
        randomise(bench.runner.model)
        return bench
    shape = SHAPES["tiny"] | ({"num_hidden_layers": 3} if kind != "windows" else WINDOWS)
    return CpuBench(folder, write_model(folder / "model", shape), kv_cache_dtype="fp8" if kind == "fp8" else "auto")


class Rows:
    """The rows of the step that runs, of runner V1."""

    def __init__(self, bench: CpuBench) -> None:
        self.runner = bench.runner
        context = self.runner.compilation_config.static_forward_context
        self.layers = [layer for layer in context.values() if hasattr(layer, "kv_cache") and layer.kv_cache.numel()]
        self.scheduled: Any = None

    def chosen(self) -> tuple[str, int, int]:
        """A request that decodes; its last token in the batch, and that token's position."""
        batch, first = self.runner.input_batch, 0
        for number, name in enumerate(batch.req_ids):
            count = self.scheduled.num_scheduled_tokens[name]
            first += count
            if count == 1 and number:
                return name, first - 1, int(batch.num_computed_tokens_cpu[number])
        raise LookupError("no request decodes in this step")


@contextmanager
def stepping(rows: Rows, harm: Any) -> Iterator[dict[str, Any]]:
    """Call `harm` before the forward of each step until it gives what it did."""
    inner, state = rows.runner.execute_model, {"step": 0, "struck": None}

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        state["step"] += 1
        rows.scheduled = scheduler_output
        if state["struck"] is None and state["step"] >= HARM_STEP:
            state["struck"] = harm()
        return inner(scheduler_output, *args, **kwargs)

    rows.runner.execute_model = execute_model
    try:
        yield state
    finally:
        rows.runner.execute_model = inner


def flipped(bench: CpuBench, rows: Rows) -> dict[str, Any]:
    """One bit in the cell of a request's fifth entry, in the second layer; what the canary says of it."""
    import torch

    specs = [own.kv_cache_spec for own in rows.runner.kv_cache_config.kv_cache_groups]
    whole = next(n for n, spec in enumerate(specs) if not any(getattr(spec, name, None) for name in NARROW))

    def harm() -> dict[str, Any] | None:
        batch = rows.runner.input_batch
        for number, name in enumerate(batch.req_ids):
            if name in rows.scheduled.num_scheduled_tokens and batch.num_computed_tokens_cpu[number] > BLOCK:
                block = int(batch.block_table[whole].block_table.np[number, 0])
                rows.layers[LAYER].kv_cache[block].view(torch.uint8).view(-1)[401] ^= 1 << 3
                return {"request": name, "block": block}
        return None

    with bench.watched(mode="log", content="full") as handle, stepping(rows, harm) as state:
        bench.run(bench.prompts(REQUESTS, seed=5), TOKENS)
        report = handle.report()
    found = [{name: entry[name] for name in KEPT} for entry in report["findings"][:3]]
    return {"struck": state["struck"], "found": found, "fired": report["fired"]}


def written_when_free(bench: CpuBench, rows: Rows) -> dict[str, Any]:
    """One bit of a block that was given back, in the last layer; its next owner is the next who asks for one."""
    import torch

    def harm() -> dict[str, Any] | None:
        poison, queue = handle.canary.poison, bench.scheduler.kv_cache_manager.block_pool.free_block_queue
        size = len(poison.filled) // len(rows.layers[-1].kv_cache)
        filled = [own for own in queue.get_all_free_blocks() if poison.filled[own.block_id * size]]
        if not filled:
            return None
        queue.remove(filled[-1])
        queue.prepend_n(filled[-1:])
        block = filled[-1].block_id
        rows.layers[-1].kv_cache[block].view(torch.uint8).view(-1)[401] ^= 1 << 3
        return {"block": block}

    with bench.watched(mode="log", content="full") as handle, stepping(rows, harm) as state:
        bench.run(bench.prompts(2 * REQUESTS, seed=6), TOKENS)
        report = handle.report()
    found = [{name: entry[name] for name in KEPT} for entry in report["findings"][:3]]
    return {"struck": state["struck"], "found": found, "fired": report["fired"]}


def not_finite(bench: CpuBench, rows: Rows, is_fp8: bool) -> dict[str, Any]:
    """NaN in what the second layer stores of a request that decodes, in mode raise: what was found, and what left.

    is_fp8: this build makes a finite number of NaN when it stores, so the byte is put behind the store
    """
    from kvcanary import KVCorruptionError

    impl, struck = rows.layers[LAYER].impl, dict[str, Any]()
    inner, place = impl.do_kv_cache_update, 0 if hasattr(rows.layers[LAYER], "kv_lora_rank") else 1

    def store(*args: Any, **kwargs: Any) -> Any:
        if struck.get("is_due"):
            struck.pop("is_due")
            name, token, position = rows.chosen()
            struck.update(request=name, position=position, tokens=dict(given))
            if is_fp8:
                inner(*args, **kwargs)
                slot, pool = args[4][token : token + 1].long(), watching[0].canary.memory.layers[0].rows
                words = pool.gather_layer(LAYER, slot)
                words[0, 1] = words[0, 1] & ~0xFF | 0x7F
                return pool.scatter_layer(LAYER, slot, words)
            values = args[place].clone()
            values[token].view(-1)[7] = float("nan")
            args = (*args[:place], values, *args[place + 1 :])
        return inner(*args, **kwargs)

    def harm() -> dict[str, Any]:
        struck["is_due"] = True
        return struck

    given: dict[str, int] = {}
    watching: list[Any] = []
    impl.do_kv_cache_update = store
    try:
        with bench.watched(mode="raise", content="full") as handle, stepping(rows, harm):
            watching.append(handle)
            try:
                for tokens in bench.steps():
                    given.update(tokens)
            except KVCorruptionError as error:
                own = {name: getattr(error.findings[0], name) for name in KEPT}
                left = sum(given.values()) - sum(struck.pop("tokens").values())
                return {"struck": struck, "found": own, "left": left, "evidence": list(error.findings[0].evidence)}
    finally:
        impl.do_kv_cache_update = inner
    return {"struck": struck, "found": None}


def scenario(bench: CpuBench) -> dict[str, Any]:
    prompts = bench.prompts(REQUESTS, seed=3)
    watched = [list(output.token_ids) for output in bench.run(prompts, TOKENS)[0]]
    handle = bench.worker.kvcanary
    report, views = handle.report(), [layers.view for layers in handle.canary.memory.layers]
    handle.detach()
    bare = [list(output.token_ids) for output in bench.run(prompts, TOKENS)[0]]
    names = ("forwards", "slots_checked", "bytes_checked", "fired", "unchecked", "classes")
    clean = {name: report[name] for name in names} | {"findings": len(report["findings"])}
    parts = [[[part.name, str(part.dtype), list(part.shape)] for part in view.parts] for view in views]
    clean |= {"equal_tokens": watched == bare, "parts": parts, "distinct": len({t for own in bare for t in own})}
    rows, is_fp8 = Rows(bench), views[0].dtype.itemsize == 1
    told = {"clean": clean, "flip": flipped(bench, rows), "written_when_free": written_when_free(bench, rows)}
    return told | {"not_finite": not_finite(bench, rows, is_fp8)}


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where the JSON goes.")
def command(kind: str, out: Path) -> None:
    """Run everything over one kind of cache in one vLLM on this CPU, with runner V1."""
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        record = {"kind": kind, "machine": machine(), **scenario(bench_of(kind, Path(folder)))}
    out.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command()
