"""A model cut over the GPUs of one host, and what it costs to compare its ranks in each step.

``python -m kvcanary_tools.bench.gpu.ranks``: one process a GPU, NCCL for the sums of the layers, gloo for the
comparison. First a small model in float32, whose tokens must be those of one GPU, and whose last rank goes wrong in
two ways, each of which must be found. Then captured decode steps of Llama-3-8B's shape in bf16: without a canary, with
one, and with one that compares ranks (X1, X2), in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary_tools.bench.common import Rounds, machine, progress, save, settled, spread
from kvcanary_tools.bench.gpu import step
from kvcanary_tools.bench.gpu.device import device
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models.config import parse_config
from spec_engine.models.decoder import Decoder, RotaryTable
from spec_engine.models.eagle import Eagle
from spec_engine.models.loader import shard_target
from spec_engine.models.sharding import reduce_over
from spec_engine.models.standalone import Standalone

NAME, BAR = "gpu_ranks", 0.01  # of a step
BATCHES, ROUNDS, WRONG_FROM = (1, 32), 6, 6
SMALL = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
RESERVE = 12 * step.PAGE_SIZE  # slots of a request for its drafts, and for pages in quarantine
PROMPTS = [[(i * 7 + j * 3) % 97 for j in range(5 + 9 * i)] for i in range(6)]
CANARY = CanaryConfig(mode="raise", seed=7)


# a small model: the same tokens, and ranks that go wrong


def small_engine(model: Decoder, ranks: dist.ProcessGroup | None, **settings: Any) -> Engine:
    draft = random_model(1, hidden_size=64, num_hidden_layers=1).to("cuda", torch.float32)
    config = {"draft": "standalone", "topk": 2, "num_steps": 3, "num_draft_tokens": 6, "page_size": 16}
    config |= {"dtype": "float32", "device": "cuda", "attention_backend": "triton", "max_running_requests": 8}
    config |= {"max_total_tokens": 4096, "canary": CanaryConfig(mode="raise", content="full", seed=7)}
    made = EngineConfig(**config | settings)
    return Engine(made, model=model, draft=Standalone(draft, model), tokenizer=MockTokenizer(), ranks=ranks)


def completions(engine: Engine, temperature: float) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=48, temperature=temperature, seed=3, ignore_eos=True)
    tokens: dict[str, list[int]] = {engine.submit(prompt, params): [] for prompt in PROMPTS}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


def other_token(engine: Engine) -> None:
    decide = engine.runner.acceptor.decide

    def decided(logits: torch.Tensor, nodes: Any) -> Any:
        if engine._step_number >= WRONG_FROM:
            logits = logits.clone()
            logits[0, 0] = logits[0, 0].roll(1)
        return decide(logits, nodes)

    engine.runner.acceptor.decide = decided  # type: ignore[method-assign]


def last_bit_of_a_sum(engine: Engine) -> None:
    layer = engine.model.layers[-1]
    reduce = layer.reduce

    def reduced(product: torch.Tensor) -> None:
        reduce(product)
        if engine._step_number >= WRONG_FROM:
            product[0, 5:6].view(torch.int32).bitwise_xor_(1)

    layer.reduce = reduced


FAULTS: dict[str, tuple[Callable[[Engine], None], str]] = {
    "another token": (other_token, "X1"),
    "the last bit of one sum": (last_bit_of_a_sum, "X2"),
}
#: How engines of the small model run, by name.
SETTINGS: dict[str, dict[str, Any]] = {
    "eager, sync": {"schedule": "sync"},
    "captured, overlap": {"schedule": "overlap", "graphs": "on", "graph_buckets": (8,)},
}


def small(rank: int, world: int) -> dict[str, Any]:
    whole = random_model(0, logit_scale=6.0, **SMALL).to("cuda", torch.float32)
    equal = {}
    for name, settings in SETTINGS.items():
        for temperature in (0.0, 0.8):
            expected = completions(small_engine(whole, None, **settings), temperature)
            engine = small_engine(_part(whole, rank, world), new_group(), **settings)
            given = completions(engine, temperature)
            checked = engine.canary.certificate() if engine.canary is not None else {}
            equal[f"{name}, temperature {temperature}"] = {
                "equal": given == expected,
                "tokens": sum(map(len, given)),
                "slots_checked": checked.get("slots_checked"),
                "findings": checked.get("findings"),
            }
    return {"tokens": equal, "faults": {name: fault(name, whole, rank, world) for name in FAULTS}}


def fault(name: str, whole: Decoder, rank: int, world: int) -> dict[str, Any]:
    """What this rank is told when the last one goes wrong."""
    make, code = FAULTS[name]
    engine = small_engine(_part(whole, rank, world), new_group(), schedule="sync")
    if rank == world - 1:
        make(engine)
    try:
        completions(engine, 0.0)
    except KVCorruptionError as error:
        first = error.findings[0]
        told = {"code": first.code, "step": first.step, "level": first.found["level"]}
        return told | {"found": (first.code, first.step) == (code, WRONG_FROM)}
    return {"found": False}


def _part(whole: Decoder, rank: int, world: int) -> Decoder:
    return reduce_over(shard_target(whole, rank, world))


# the cost


def part_of_8b(rank: int, world: int) -> Decoder:
    """Of random weights, which a rank shares with the others where it holds the whole of them."""
    config = parse_config(step.LLAMA_8B).shard(rank, world)
    model = step.drawn(lambda: Decoder(config))
    model.rotary = RotaryTable(config.rope, config.head_dim, config.max_position_embeddings).to("cuda", torch.bfloat16)
    return reduce_over(model)


def cost(size: int, model: Decoder, head: Eagle | None, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, of engines that take turns; all ranks run the same ones in the same order."""
    settings: dict[str, Any] = {}
    if head is not None:
        tokens = size * (step.slots_of(2 * rounds) + RESERVE)
        settings = {"head": head, "max_total_tokens": tokens, "topk": 1, "num_steps": 3}
    kinds: dict[str, tuple[CanaryConfig, bool]] = {
        "off": (CanaryConfig(mode="off"), False),
        "canary": (CANARY, False),
        "ranks": (CANARY, True),
    }
    engines = {}
    for name, (canary, compares) in kinds.items():
        ranks = new_group() if compares else None
        engines[name] = step.make_engine(size, model, canary, rounds, ranks=ranks, **settings)
        step.fill(engines[name], size, rounds)
    seconds: Rounds = {name: [] for name in engines}
    with settled():
        for number in range(rounds):
            order = list(engines.items())
            for name, engine in order if number % 2 else reversed(order):
                dist.barrier()
                seconds[name].append(step.timed(engine))
    return {
        "batch": size,
        "drafts": "none" if head is None else "chain",
        **{f"{name}_ms": round(1e3 * median(own), 4) for name, own in seconds.items()},
        "canary_over_off": spread(seconds["canary"], seconds["off"]),
        "ranks_over_canary": spread(seconds["ranks"], seconds["canary"]),
    }


def one_gpu(size: int, rounds: int) -> float:
    """Milliseconds of the whole model's step without a canary, for comparison."""
    engine = step.make_engine(size, step.random_decoder(step.LLAMA_8B), CanaryConfig(mode="off"), rounds)
    step.fill(engine, size, rounds)
    with settled():
        return round(1e3 * median(step.timed(engine) for _ in range(rounds)), 4)


def table(record: dict[str, Any]) -> list[str]:
    """The rows of docs/ranks.md."""
    lines = [
        "| requests | drafts | one GPU | two GPUs | with the canary | comparing ranks | X1 and X2 add |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        alone = f"{row['one_gpu_ms']:.2f}" if "one_gpu_ms" in row else "-"
        times = " | ".join(f"{row[name]:.2f}" for name in ("off_ms", "canary_ms", "ranks_ms"))
        added = 100 * (row["ranks_over_canary"]["median"] - 1)
        lines.append(f"| {row['batch']} | {row['drafts']} | {alone} | {times} | {added:+.1f} % |")
    return lines


# processes


def new_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=60))


def work(rank: int, world: int, port: int, batches: Sequence[int], rounds: int, pipe: Any) -> None:
    torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world)
    result = small(rank, world)
    alone = {size: one_gpu(size, rounds) for size in batches}
    torch.cuda.empty_cache()
    model, rows = part_of_8b(rank, world), []
    whole = parse_config(step.LLAMA_8B)
    head = step.drawn(lambda: Eagle(replace(whole, num_layers=1), model))
    for size in batches:
        rows.append(cost(size, model, None, rounds) | {"one_gpu_ms": alone[size]})
        torch.cuda.empty_cache()
        rows.append(cost(size, model, head, rounds))
        torch.cuda.empty_cache()
    if rank == 0:
        pipe.put(result | {"rows": rows} | device())
    dist.barrier()
    dist.destroy_process_group()


def main(batches: Sequence[int] = BATCHES, rounds: int = ROUNDS) -> None:
    world = torch.cuda.device_count()
    if world < 2:
        sys.exit("kvcanary_tools.bench.gpu.ranks measures two CUDA devices or more, and there are fewer here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipe = multiprocessing.get_context("spawn").SimpleQueue()
    progress(f"{world} ranks: a small model, then batches of {list(batches)}")
    running = mp.spawn(work, args=(world, port, batches, rounds, pipe), nprocs=world, join=False)
    while not running.join(1.0):
        pass
    result = pipe.get()
    about = {
        "what": "a model cut over the GPUs of one host: its tokens, ranks that go wrong, a step of Llama-3-8B's shape",
        "machine": machine(),
        "ranks": world,
        "steps": step.STEPS,
        "rounds": rounds,
        "bar": BAR,
    }
    save(NAME, about | result)
    for name, told in {**result["tokens"], **result["faults"]}.items():
        print(name, told)
    print("\n".join(table(result)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, action="append", help=f"requests in a step; by default {BATCHES}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each engine; by default {ROUNDS}")
    arguments = parser.parse_args()
    main(arguments.batch or BATCHES, arguments.rounds)
