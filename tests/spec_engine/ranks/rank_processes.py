"""What every rank of test_ranks.py runs, in gloo processes that many cases share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kvcanary import CanaryConfig
from kvcanary.ranks import Agreement, RanksDisagreeError
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Decoder, Standalone
from spec_engine.models.loader import shard_target
from spec_engine.models.sharding import reduce_over

SHAPE = {"hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 48}
FROM = 6  # the step from which the last rank is wrong
PROMPTS = [[(i * 7 + j * 3) % 97 for j in range(5 + 9 * i)] for i in range(6)]


def target(world: int) -> Decoder:
    """Two KV heads for two ranks; one for three, each of which holds it."""
    return random_model(0, logit_scale=6.0, num_key_value_heads=2 if world == 2 else 1, **SHAPE)


def make(model: Decoder, group: Any = None, *, drafts: bool = True, schedule: str = "sync", **settings: Any) -> Engine:
    """An engine with a canary that stops it, and room for a host tier."""
    config = EngineConfig(
        draft="standalone" if drafts else "none",
        page_size=4,
        topk=2,
        num_steps=3,
        num_draft_tokens=6,
        dtype="float64",
        max_running_requests=4,
        schedule=schedule,
        canary=CanaryConfig(mode="raise", content="full", seed=7, dump_dir=None),
        **{"max_total_tokens": 512, "host_pages": 64, "new_token_ratio": 0.0} | settings,
    )
    draft = Standalone(random_model(1, hidden_size=32, num_hidden_layers=1), model) if drafts else None
    return Engine(config, model=model, draft=draft, tokenizer=MockTokenizer(), ranks=group)


def run(engine: Engine, temperature: float, count: int = 20) -> list[list[int]]:
    """Tokens of all prompts."""
    params = SamplingParams(max_new_tokens=count, temperature=temperature, seed=3)
    tokens: dict[str, list[int]] = {engine.submit(prompt, params): [] for prompt in PROMPTS}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


def other_token(engine: Engine) -> None:
    decide = engine.runner.acceptor.decide

    def decided(logits, nodes):
        if engine._step_number >= FROM:
            logits = logits.clone()
            logits[0, 0] = logits[0, 0].roll(1)
        return decide(logits, nodes)

    engine.runner.acceptor.decide = decided


def other_pages(engine: Engine) -> None:
    allocate = engine.allocator.allocate
    engine.allocator.allocate = lambda n: allocate(n)[::-1] if engine._step_number >= FROM else allocate(n)


def a_page_less(engine: Engine) -> None:
    take = engine.runner.decode

    def decode(*args):
        if engine._step_number == FROM:
            engine.allocator.allocate(1)
        return take(*args)

    engine.runner.decode = decode


def wrong_reduce(engine: Engine) -> None:
    for layer in engine.model.layers:
        reduce = layer.reduce

        def reduced(product, reduce=reduce):
            reduce(product)
            if engine._step_number >= FROM:
                product.mul_(-1)

        layer.reduce = reduced


FAULTS: dict[str, Callable[[Engine], None]] = {
    "token": other_token,
    "pages": other_pages,
    "page count": a_page_less,
    "reduce": wrong_reduce,
}


def faulty(name: str, group: Any, rank: int, world: int, schedule: str) -> dict[str, Any]:
    """What this rank is told when the last one goes wrong."""
    is_wrong = rank == world - 1
    settings = {"max_total_tokens": 480} if name == "shape" and is_wrong else {}
    try:
        engine = make(part_of_rank(rank, world), group, schedule=schedule, **settings)
        if name in FAULTS and is_wrong:
            FAULTS[name](engine)
        run(engine, 0.8)
    except RanksDisagreeError as error:
        told = {"step": error.step, "level": error.level, "request": error.request_id, "position": error.position}
        return told | {"minority": list(error.minority), "text": str(error)}
    return {}


def lost(group: Any, rank: int, world: int) -> str:
    """What the others are told when the last rank does not come for step 2."""
    agreement = Agreement(group, timeout=1.0)
    agreement.check(1, {"tokens": {"req-0": [4]}})
    if rank == world - 1:
        return ""
    try:
        agreement.check(2, {"tokens": {"req-0": [5]}})
    except RanksDisagreeError as error:
        return str(error)
    return "nothing"


def part_of_rank(rank: int, world: int) -> Decoder:
    return reduce_over(shard_target(target(world), rank, world))


def clean(group: Any, rank: int, world: int, *case: str) -> dict[str, Any]:
    """Tokens and steps of a run without a fault; mode raise would have stopped it at a finding."""
    schedule, drafts, temperature, tokens = case
    settings = {"drafts": drafts == "drafts", "max_total_tokens": int(tokens)}
    engine = make(part_of_rank(rank, world), group, schedule=schedule, **settings)
    given = run(engine, float(temperature))
    view = engine.pools["target"].view()
    return {
        "heads": [view.first_head, view.whole_heads],
        "tokens": given,
        "steps": engine._step_number,
        "retractions": engine.metrics.num_retractions,
    }


def work(rank: int, world: int, cases: list[tuple[str, ...]], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    kinds = {"clean": clean, "fault": lambda group, *own: faulty(own[2], group, *own[:2], own[3]), "lost": lost}
    with torch.inference_mode():
        answers = {
            "/".join(case): kinds[case[0]](dist.new_group(backend="gloo"), rank, world, *case[1:]) for case in cases
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def in_processes(world: int, cases: list[tuple[str, ...]], folder: Path) -> list[dict[str, Any]]:
    """By rank, what each case gave."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(partial(work), args=(world, cases, str(folder)), nprocs=world)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
