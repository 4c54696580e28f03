"""What every rank of test_ranks.py runs, in gloo processes that many cases share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from structlog.testing import capture_logs

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.adapters.hosted.sampled import SampledByRanks
from kvcanary.ranks import Agreement, RanksDisagreeError, level
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.memory.cache.host_tier import LoadFailedError
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.models import Decoder, Standalone
from spec_engine.models.loader import shard_target
from spec_engine.models.sharding import reduce_over

SHAPE = {"hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 48}
STRUCK: list[int] = []  # steps in which this rank went wrong
FROM = 6  # the step from which the last rank is wrong
PROMPTS = [[(i * 7 + j * 3) % 97 for j in range(5 + 9 * i)] for i in range(6)]


def target(world: int) -> Decoder:
    """Two KV heads for two ranks; one for three, each of which holds it."""
    return random_model(0, logit_scale=6.0, num_key_value_heads=2 if world == 2 else 1, **SHAPE)


def make(
    model: Decoder, group: Any = None, *, drafts: bool = True, schedule: str = "sync", seed: int = 7, **settings: Any
) -> Engine:
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
        canary=CanaryConfig(mode="raise", content="full", seed=seed, dump_dir=None),
        **{"max_total_tokens": 512, "host_pages": 64, "new_token_ratio": 0.0} | settings,
    )
    draft = Standalone(random_model(1, hidden_size=32, num_hidden_layers=1), model) if drafts else None
    return Engine(config, model=model, draft=draft, tokenizer=MockTokenizer(), ranks=group)


def run_long(engine: Engine, temperature: float, steps: int) -> list[list[int]]:
    """Tokens of all prompts, again and again, in so many steps at least."""
    given = []
    while engine._step_number < steps:
        given += run(engine, temperature)
    return given


def run(engine: Engine, temperature: float, count: int = 20) -> list[list[int]]:
    """Tokens of all prompts."""
    params = SamplingParams(max_new_tokens=count, temperature=temperature, seed=3)
    tokens: dict[str, list[int]] = {engine.submit(prompt, params): [] for prompt in PROMPTS}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


def from_step(engine: Engine, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """From step FROM on ``wrong(method, *args)`` stands for the method."""
    method = getattr(owner, name)

    def replaced(*args, **kwargs):
        if engine._step_number < FROM:
            return method(*args, **kwargs)
        STRUCK.append(engine._step_number)
        return wrong(method, *args, **kwargs)

    setattr(owner, name, replaced)


def other_token(engine: Engine) -> None:
    def decide(method, logits, nodes):
        logits = logits.clone()
        logits[0, 0] = logits[0, 0].roll(1)
        return method(logits, nodes)

    from_step(engine, engine.runner.acceptor, "decide", decide)


def other_pages(engine: Engine) -> None:
    def allocate(method, n):
        if n < 2:
            STRUCK.pop()  # one page has no other order
        return method(n)[::-1]

    from_step(engine, engine.allocator, "allocate", allocate)


def a_page_less(engine: Engine) -> None:
    def bring(method, *args):
        engine.allocator.allocate(1)
        return method(*args)

    from_step(engine, engine.memory, "bring", bring)


def wrong_reduce(engine: Engine) -> None:
    def reduce(method, product):
        method(product)
        product.mul_(-1)

    for layer in engine.model.layers:
        from_step(engine, layer, "reduce", reduce)


def one_bit_of_a_sum(engine: Engine) -> None:
    def reduce(method, product):
        method(product)
        product[0, 5:6].view(torch.int64).bitwise_xor_(1 << 30)  # the last one is lost where the residual is added

    from_step(engine, engine.model.layers[-1], "reduce", reduce)


def last_bit_of_k(engine: Engine, layer: Any) -> None:
    def project(method, *args):
        q, k, v = method(*args)
        k = k.clone()
        k[0, 0, 3:4].view(torch.int64).bitwise_xor_(1)
        return q, k, v

    from_step(engine, layer, "project", project)


def evicts_a_prefix(engine: Engine) -> None:
    """As the prompts come again."""

    def admit(method, request, running=()):
        if request.request_id == f"req-{len(PROMPTS)}":
            engine.memory.make_room(engine.memory.num_available)
        else:
            STRUCK.pop()  # not yet
        return method(request, running)

    from_step(engine, engine.memory, "admit", admit)


def loses_a_load(engine: Engine) -> None:
    def restore(method, request):
        raise LoadFailedError("a completion that only this rank has not seen")

    from_step(engine, engine.memory, "restore", restore)


FAULTS: dict[str, Callable[[Engine], None]] = {
    "token": other_token,
    "pages": other_pages,
    "page count": a_page_less,
    "reduce": wrong_reduce,
    "sum": one_bit_of_a_sum,
    "draft K": lambda engine: last_bit_of_k(engine, engine.head.model.layers[0]),
    "shared head": lambda engine: last_bit_of_k(engine, engine.model.layers[1]),
    "hits": evicts_a_prefix,
    "completions": loses_a_load,
}
#: What the wrong rank is started with.
SETTINGS: dict[str, dict[str, Any]] = {
    "pool size": {"max_total_tokens": 480},
    "host pages": {"host_pages": 32},
    "seed": {"seed": 8},
}
#: What all ranks are started with, so that there is something to differ in.
FOR_ALL: dict[str, dict[str, Any]] = {"completions": {"max_total_tokens": 96, "drafts": False}}


def faulty(name: str, group: Any, rank: int, world: int, schedule: str) -> dict[str, Any]:
    """What this rank is told when the last one goes wrong."""
    is_wrong = rank == world - 1
    STRUCK.clear()
    settings = FOR_ALL.get(name, {}) | (SETTINGS.get(name, {}) if is_wrong else {})
    try:
        engine = make(part_of_rank(rank, world), group, schedule=schedule, **settings)
        if name in FAULTS and is_wrong:
            FAULTS[name](engine)
        for _ in range(2 if name == "hits" else 1):
            run(engine, 0.8)
    except KVCorruptionError as error:
        [told] = [finding.to_dict() for finding in error.findings]
        kept = ("code", "step", "reader", "slot", "layer", "pool", "found", "causes", "evidence")
        return {key: told[key] for key in kept} | {"struck": list(STRUCK)}
    return {}


def lost(group: Any, rank: int, world: int) -> str:
    """What the others are told when the last rank does not come for step 2."""
    agreement = Agreement(group, timeout=1.0)
    agreement.check(1, {"tokens": level({"req-0": [4]})})
    if rank == world - 1:
        return ""
    try:
        agreement.check(2, {"tokens": level({"req-0": [5]})})
    except RanksDisagreeError as error:
        return str(error)
    return "nothing"


def left(group: Any, rank: int, world: int) -> list[str]:
    """What the others tell when the last rank stops watching behind two steps, and what is compared behind that."""
    told: list[str] = []
    sampled = SampledByRanks(group, lambda error: told.append(str(error)))
    with capture_logs() as events:
        for step in range(1, 5):
            if rank == world - 1 and step == 3:
                sampled.leave()
            sampled.compare(step, SimpleNamespace(req_ids=["a"], sampled_token_ids=[[step]]))
    dist.barrier()
    return told + [event["event"] for event in events]


def by_dtensor(group: Any, rank: int, world: int) -> dict[str, float]:
    """The largest difference of a layer of ours from the same products of torch's own tensor parallel tensors."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    whole, mesh = target(world), init_device_mesh("cpu", (world,))
    ours, layer, config = part_of_rank(rank, world).layers[0], whole.layers[0], whole.config
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(5, config.hidden_size, generator=generator, dtype=torch.float64)
    attention = torch.randn(5, config.num_heads, config.head_dim, generator=generator, dtype=torch.float64)

    def cut(tensor: torch.Tensor, dim: int | None) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Replicate()]).redistribute(
            placements=[Replicate() if dim is None else Shard(dim)]
        )

    after = hidden + F.linear(cut(attention.flatten(1), 1), cut(layer.o_weight, 1)).full_tensor()
    x = cut(F.rms_norm(after, layer.norm_shape, layer.post_norm_weight, layer.eps), None)
    gate, up = (cut(half, 0) for half in layer.gate_up_weight.chunk(2))
    expected = after + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), cut(layer.down_weight, 1)).full_tensor()
    own = slice(rank * ours.config.num_heads, (rank + 1) * ours.config.num_heads)
    finished = ours.finish(hidden, attention[:, own])

    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    normed = F.rms_norm(hidden, layer.norm_shape, layer.input_norm_weight, layer.eps)
    parts = layer.qkv_weight.split_with_sizes((q, kv, kv))
    wanted = [F.linear(cut(normed, None), cut(part, 0)).to_local() for part in parts]
    given = F.linear(normed, ours.qkv_weight).split_with_sizes([own.shape[1] for own in wanted], 1)
    differences = [(one - other).abs().max() for one, other in zip(wanted, given, strict=True)]
    return {"finish": float((finished - expected).abs().max()), "project": float(max(differences))}


def part_of_rank(rank: int, world: int) -> Decoder:
    return reduce_over(shard_target(target(world), rank, world))


def clean(group: Any, rank: int, world: int, *case: str) -> dict[str, Any]:
    """Tokens and steps of a run without a fault; mode raise would have stopped it at a finding."""
    schedule, drafts, temperature, tokens, steps = case
    settings = {"drafts": drafts == "drafts", "max_total_tokens": int(tokens)}
    engine = make(part_of_rank(rank, world), group, schedule=schedule, **settings)
    given = run_long(engine, float(temperature), int(steps))
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
    kinds: dict[str, Callable[..., Any]] = {"left": left} | {
        "dtensor": by_dtensor,
        "clean": clean,
        "fault": lambda group, *own: faulty(own[2], group, *own[:2], own[3]),
        "lost": lost,
    }
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
