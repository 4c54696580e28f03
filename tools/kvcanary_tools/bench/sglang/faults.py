"""What somebody breaks in a real SGLang. Each strikes when it is started, and is healed when it is resumed.

A fault yields what it touched: request, position and slot where it knows them. One that is LASTING goes on striking to
the end of the act; the others do so in one turn of the scheduler's loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Touched = dict[str, Any]


def bit(host: Any) -> Iterator[Touched]:
    """One bit of K of the last layer."""
    yield from _flipped(host, host.scheduler.tp_worker.model_runner.token_to_kv_pool)


def first_k(host: Any) -> Iterator[Touched]:
    """One bit of K of the first layer."""
    yield from _flipped(host, host.scheduler.tp_worker.model_runner.token_to_kv_pool, layer=0)


def first_v(host: Any) -> Iterator[Touched]:
    """One bit of V of the first layer."""
    yield from _flipped(host, host.scheduler.tp_worker.model_runner.token_to_kv_pool, "v_buffer", 0)


def last_v(host: Any) -> Iterator[Touched]:
    """One bit of V of the last layer."""
    yield from _flipped(host, host.scheduler.tp_worker.model_runner.token_to_kv_pool, "v_buffer")


def draft_bit(host: Any) -> Iterator[Touched]:
    """The same in the pool of the draft model."""
    yield from _flipped(host, host.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool)


def window_bit(host: Any) -> Iterator[Touched]:
    """The same in a layer with a window, of the newest entry."""
    pool, request = host.scheduler.tp_worker.model_runner.token_to_kv_pool, first_request(host)
    position = request.kv.kv_committed_len - 1
    slot = _table(host)[request.kv.req_pool_idx, position].long()
    yield from _flipped_at(host, pool.swa_kv_pool, position, int(pool.full_to_swa_index_mapping[slot]))


def tier_bit(host: Any) -> Iterator[Touched]:
    """One bit of the last entry of what comes back from the host tier next, in K of the tier's last layer."""
    import torch

    controller, touched = host.scheduler.tree_cache.cache_controller, {"layer": 1, "bit": 7, "loads": 0}

    def load(method: Any, *args: Any, **kwargs: Any) -> Any:
        if not touched["loads"]:
            tier = controller.mem_pool_host.anchor_entry.host_pool
            tier.k_buffer[-1][int(kwargs["host_indices"][-1])].view(torch.int32)[0, 3] ^= 1 << 7
        touched["loads"] += 1
        return method(*args, **kwargs)

    with around(controller, "load", load):
        yield touched


def no_wait(host: Any) -> Iterator[Touched]:
    """Forwards are not told which load they must wait for."""
    worker, touched = host.scheduler.tp_worker, {"forwards": 0}

    def forget(method: Any, consumer_index: int) -> None:
        touched["forwards"] += consumer_index >= 0
        method(-1)

    with around(worker, "set_hicache_consumer", forget):
        yield touched


def swapped(host: Any) -> Iterator[Touched]:
    """Two entries of a row of the table are exchanged."""
    table, request = _table(host), first_request(host)
    row = request.kv.req_pool_idx
    table[row, [0, 1]] = table[row, [1, 0]]
    yield {"request": request.rid, "position": 0, "slot": int(table[row, 0])}
    table[row, [0, 1]] = table[row, [1, 0]]


def foreign(host: Any) -> Iterator[Touched]:
    """An entry of a row is that of another request."""
    table, (request, other) = _table(host), host.scheduler.running_batch.reqs[:2]
    row = request.kv.req_pool_idx
    before = table[row, 1].clone()
    table[row, 1] = table[other.kv.req_pool_idx, 2]
    yield {"request": request.rid, "position": 1, "slot": int(table[row, 1]), "other": other.rid}
    table[row, 1] = before


def tokens_exchanged(host: Any) -> Iterator[Touched]:
    """What was sampled of two rows is exchanged where SGLang keeps it until the next forward, or draft."""
    batch = host.scheduler.running_batch
    drafts = batch.spec_info
    kept = host.scheduler.future_map.output_tokens_buf if drafts is None else drafts.bonus_tokens
    rows = [own.kv.req_pool_idx for own in batch.reqs] if drafts is None else range(len(batch.reqs))
    token, *others = [int(kept[row]) for row in rows]
    n, fed = next((n, own) for n, own in enumerate(others, 1) if own != token)
    kept[rows[0]], kept[rows[n]] = fed, token
    yield {"request": batch.reqs[0].rid, "other": batch.reqs[n].rid, "token": token, "fed": fed}


def off_by_one(host: Any) -> Iterator[Touched]:
    """The first entry of the next forward that decodes or verifies is stored one slot further."""
    touched: Touched = {}

    def forward(method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode
        if not touched and (mode.is_decode() or mode.is_target_verify()):
            batch.out_cache_loc[0] += 1
            touched.update(request=batch.rids[0], position=int(batch.positions[0]), slot=int(batch.out_cache_loc[0]))
        return method(batch, *args, **kwargs)

    with around(host.scheduler.tp_worker.model_runner, "forward", forward):
        yield touched


def short_move(host: Any) -> Iterator[Touched]:
    """Accepted entries are moved in all layers but the last."""
    pool = host.scheduler.tp_worker.model_runner.token_to_kv_pool
    touched: Touched = {"moves": 0}

    def move(method: Any, target: Any, source: Any) -> None:
        held = pool.k_buffer[-1].clone(), pool.v_buffer[-1].clone()
        method(target, source)
        touched["moves"] += int((target != source).sum())
        pool.k_buffer[-1].copy_(held[0])
        pool.v_buffer[-1].copy_(held[1])

    with around(pool, "_move_kv_cache_impl", move):
        yield touched


def one_too_long(host: Any) -> Iterator[Touched]:
    """Acceptance counts one token more than was right, once for each row."""
    common, ngram = (
        sys.modules.get(f"sglang.srt.speculative.{name}") for name in ("eagle_worker_common", "ngram_worker")
    )
    touched: Touched = {"rows": 0}

    def sample(method: Any, *args: Any, **kwargs: Any) -> Any:
        predict, lens, index = method(*args, **kwargs)
        for row in range(len(lens)):
            kept = int(lens[row])
            if kept < index.shape[1]:
                first = int(index[row, 0])
                taken = set(index[row, :kept].tolist())
                nodes = int(host.scheduler.server_args.speculative_num_draft_tokens)
                index[row, kept] = next(n for n in range(first, first + nodes) if n not in taken)
                lens[row] += 1
                touched["rows"] += 1
        return predict, lens, index

    with ExitStack() as both:
        for module in filter(None, (common, ngram)):
            both.enter_context(around(module, "eagle_sample", sample))
        yield touched


def no_tail_copy(host: Any) -> Iterator[Touched]:
    """Branches after the first read what lay in their pages before."""
    import sglang.srt.speculative.eagle_worker_common as common

    name, touched = "duplicate_prefix_tail_to_draft_branches", {"calls": 0}
    own = getattr(common, name)

    def skip(*args: Any, **kwargs: Any) -> None:
        touched["calls"] += 1

    holders = [held for module in list(sys.modules.values()) if (held := vars(module)).get(name) is own]
    for held in holders:
        held[name] = skip
    yield touched
    for held in holders:
        held[name] = own


def freed(host: Any) -> Iterator[Touched]:
    """The first page of a running request goes back to the allocator."""
    import torch

    request = first_request(host)
    slot = _table(host)[request.kv.req_pool_idx, :1].to(torch.int64)
    host.scheduler.token_to_kv_pool_allocator.free(slot)
    yield {"request": request.rid, "position": 0, "slot": int(slot)}


def written_when_free(host: Any) -> Iterator[Touched]:
    """The page in which a request goes on is given back, just before the forward that stores there."""
    import torch

    touched: Touched = {}
    allocator, page = host.scheduler.token_to_kv_pool_allocator, host.scheduler.server_args.page_size

    def forward(method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        at = [n for n, position in enumerate(batch.positions.tolist()) if position % page == 0]
        if not touched and batch.forward_mode.is_decode() and at:
            slot = batch.out_cache_loc[at[0] : at[0] + 1].to(torch.int64)
            allocator.free(slot)
            touched.update(request=batch.rids[at[0]], position=int(batch.positions[at[0]]), slot=int(slot))
        return method(batch, *args, **kwargs)

    with around(host.scheduler.tp_worker.model_runner, "forward", forward):
        yield touched


def late_write(host: Any) -> Iterator[Touched]:
    """Behind every forward somebody writes into a slot that was free before it and is free still."""
    import torch

    canary, pool = host.canary.target.canary, host.scheduler.tp_worker.model_runner.token_to_kv_pool
    touched: Touched = {}

    def forward(method: Any, *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        filled = canary.poison.filled.nonzero()[:, 0].tolist()
        if not touched and filled:
            touched.update(slot=filled[0], layer=len(pool.k_buffer) - 1)
            pool.k_buffer[-1][filled[0]].view(torch.int32)[0, 3] ^= 1 << 7
        return output

    with around(host.scheduler.tp_worker.model_runner, "forward", forward):
        yield touched


def not_finite(host: Any) -> Iterator[Touched]:
    """NaN in V of the last entry of a forward, as the last layer stores it."""
    runner, touched = host.scheduler.tp_worker.model_runner, Touched()
    last = len(runner.token_to_kv_pool.v_buffer) - 1

    def forward(method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not touched:
            slot, position = int(batch.out_cache_loc[-1]), int(batch.positions[-1])
            touched.update(request=batch.rids[-1], position=position, slot=slot)
        return method(batch, *args, **kwargs)

    def store(method: Any, layer: Any, loc: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> None:
        if layer.layer_id == last and "layer" not in touched:
            touched["layer"], v = last, v.clone()
            v[-1] = float("nan")
        method(layer, loc, k, v, *args, **kwargs)

    with around(runner, "forward", forward), around(runner.token_to_kv_pool, "set_kv_buffer", store):
        yield touched


def unstored(host: Any) -> Iterator[Touched]:
    """The last layer stores nothing in the next forward that decodes."""
    yield from _stores_nothing(host.scheduler.tp_worker.model_runner, lambda batch: batch.forward_mode.is_decode())


def draft_unstored(host: Any) -> Iterator[Touched]:
    """The draft's only layer stores nothing of the next prompt."""
    runner = host.scheduler.draft_worker.draft_worker.draft_runner
    yield from _stores_nothing(runner, lambda batch: batch.forward_mode.is_extend() and len(batch.positions) > 1)


def _stores_nothing(runner: Any, is_struck: Callable[[Any], bool]) -> Iterator[Touched]:
    """The last layer of a runner's pool, in the next such forward."""
    touched = Touched()
    last = len(runner.token_to_kv_pool.k_buffer) - 1

    def forward(method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not touched and is_struck(batch):
            slot, position = int(batch.out_cache_loc[0]), int(batch.positions[0])
            touched.update(request=batch.rids[0], position=position, slot=slot)
        return method(batch, *args, **kwargs)

    def store(method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        if layer.layer_id == last and touched and "layer" not in touched:
            touched["layer"] = last
        else:
            method(layer, *args, **kwargs)

    with around(runner, "forward", forward), around(runner.token_to_kv_pool, "set_kv_buffer", store):
        yield touched


def whole_hit(host: Any) -> Iterator[Touched]:
    """A prompt that the prefix cache has is a hit to its end: in a prefill of two nothing of it is computed."""
    from sglang.srt.managers.schedule_batch import Req

    prompt, touched = list(first_request(host).origin_input_ids), Touched()

    def longest(method: Any, request: Any, input_len: int) -> int:
        if request.rid != "the prompt again":
            return int(method(request, input_len))
        touched.update(request=request.rid, position=input_len)
        return input_len

    host.ask("another prompt", prompt[::-1], 4)
    host.ask("the prompt again", prompt, 4)
    with around(Req, "_compute_max_prefix_len", longest):
        yield touched


def chunk_ends_prompt(host: Any) -> Iterator[Touched]:
    """SGLang forgets that a chunk is not the last one of its prompt, and takes what is sampled behind it."""
    touched: Touched = {"requests": []}

    def forgets(method: Any, *args: Any, **kwargs: Any) -> Any:
        batch = method(*args, **kwargs)
        request = host.scheduler.chunked_req
        if batch is not None and request is not None:
            request.inflight_middle_chunks = 0
            touched["requests"].append(request.rid)
        return batch

    with around(host.scheduler, "get_new_batch_prefill", forgets):
        host.ask("a long prompt", [2, *range(3, 32)] * 2, 4)
        yield touched


def token_lost(host: Any) -> Iterator[Touched]:
    """What is sampled of a request in one step does not come into its answer, as if it had been retracted."""
    request, lost = first_request(host), list[int]()
    answered = len(request.output_ids)

    def forgets(method: Any, *args: Any) -> None:
        method(*args)
        if not lost and len(request.output_ids) > answered:
            lost.append(request.output_ids.pop())

    with around(host.scheduler, "process_batch_result", forgets):
        yield {"request": request.rid, "tokens": len(request.origin_input_ids) + answered}


def draft_scatter(host: Any) -> Iterator[Touched]:
    """Slots of a round's second draft step are scattered one column too far: a row's last lands on the next's first."""
    runner = host.scheduler.draft_worker.draft_worker.draft_runner
    yield from _scattered(runner, "is_decode", int(host.scheduler.server_args.speculative_eagle_topk), skip=1)


def verify_scatter(host: Any) -> Iterator[Touched]:
    """The same of the nodes that are verified."""
    nodes = int(host.scheduler.server_args.speculative_num_draft_tokens)
    yield from _scattered(host.scheduler.tp_worker.model_runner, "is_target_verify", nodes)


def chunk_rotated(host: Any) -> Iterator[Touched]:
    """A draft is fed each chunk rotated within itself: behind its last token comes its first."""
    import sglang.srt.speculative.eagle_worker_v2 as worker

    touched: Touched = {"rows": 0}

    def tail(method: Any, batch: Any, next_token_ids: Any) -> Any:
        tokens, first = method(batch, next_token_ids).clone(), 0
        for row, count in enumerate(batch.extend_lens):
            tokens[row] = batch.input_ids[first]
            first += count
            touched["rows"] += 1
        return tokens

    with around(worker, "_eagle_prefill_tail_tokens", tail):
        yield touched


def embeddings_shared(host: Any) -> Iterator[Touched]:
    """The prefix cache takes prompts of equal tokens for equal, whatever embeddings these have."""
    from sglang.srt.managers.schedule_batch import Req

    touched = {"hits": 0}

    def begin(method: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        own, request.positional_embed_overrides = request.positional_embed_overrides, None
        request.skip_radix_cache_insert = False
        method(request, *args, **kwargs)
        request.positional_embed_overrides = own
        touched["hits"] += request.prefix_len > 0

    with around(Req, "init_next_round_input", begin):
        yield touched


def hook_error(host: Any) -> Iterator[Touched]:
    """No fault of SGLang's: one hook of the canary fails in the target's forward, from now on."""
    yield from _failing(host.canary.target)


def draft_hook_error(host: Any) -> Iterator[Touched]:
    """The same in the pool of the draft model."""
    yield from _failing(host.canary.draft)


Fault = Callable[[Any], Iterator[Touched]]
FAULTS: dict[str, Fault] = {
    own.__name__: own
    for own in (
        bit, first_k, first_v, last_v, draft_bit, window_bit, tier_bit, no_wait, swapped, foreign, tokens_exchanged,
        off_by_one, short_move, one_too_long, no_tail_copy, freed, written_when_free, late_write, not_finite,
        unstored, draft_unstored, whole_hit, chunk_ends_prompt, token_lost, draft_scatter, verify_scatter,
        chunk_rotated, hook_error, draft_hook_error, embeddings_shared,
    )
}  # fmt: skip
LASTING = (
    "draft_unstored", "whole_hit", "chunk_ends_prompt", "token_lost", "tier_bit", "no_wait", "short_move",
    "one_too_long", "no_tail_copy", "freed", "written_when_free", "late_write", "draft_scatter", "verify_scatter",
    "chunk_rotated", "hook_error", "draft_hook_error", "state_freed", "no_state_copy", "state_untracked",
    "embeddings_shared",
)  # fmt: skip


@contextmanager
def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """`owner.name(...)` calls `wrapper(method, ...)`."""
    method, held = getattr(owner, name), vars(owner).get(name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(method, *args, **kwargs))
    try:
        yield
    finally:
        if held is None:
            delattr(owner, name)
        else:
            setattr(owner, name, held)


def _scattered(runner: Any, kind: str, width: int, skip: int = 0) -> Iterator[Touched]:
    """skip: forwards of this kind that are right"""
    touched: Touched = {}
    waits = [None] * skip

    def forward(method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if touched or not getattr(batch.forward_mode, kind)() or batch.batch_size < 2:
            return method(batch, *args, **kwargs)
        if waits:
            waits.pop()
        else:
            batch.out_cache_loc[width] = batch.out_cache_loc[width - 1]
            touched.update(request=batch.rids[1], other=batch.rids[0], position=int(batch.positions[width]))
            touched["slot"] = int(batch.out_cache_loc[width])
        return method(batch, *args, **kwargs)

    with around(runner, "forward", forward):
        yield touched


def _failing(own: Any) -> Iterator[Touched]:
    def read(*args: Any) -> None:
        raise RuntimeError("a defect of ours")

    own.canary.read = read
    yield {"pool": own.role}


def first_request(host: Any) -> Any:
    return host.scheduler.running_batch.reqs[0]


def _table(host: Any) -> Any:
    return host.scheduler.req_to_token_pool.req_to_token


def _flipped(host: Any, pool: Any, part: str = "k_buffer", layer: int = -1) -> Iterator[Touched]:
    slot = int(_table(host)[first_request(host).kv.req_pool_idx, 1])
    yield from _flipped_at(host, getattr(pool, "full_kv_pool", pool), 1, slot, part, layer)


def _flipped_at(
    host: Any, pool: Any, position: int, slot: int, part: str = "k_buffer", layer: int = -1
) -> Iterator[Touched]:
    """One bit of an entry; latent rows are one part."""
    buffers = getattr(pool, "kv_buffer", None) or getattr(pool, part)
    told = {"request": first_request(host).rid, "position": position, "slot": slot, "layer": layer % len(buffers)}
    yield from word_flipped(buffers[layer][slot], **told)


def word_flipped(row: Any, **told: Any) -> Iterator[Touched]:
    """Bit 7 of the fourth word of a row."""
    import torch

    words = row.view(-1).view(torch.int32)
    words[3] ^= 1 << 7
    yield {**told, "bit": 7}
    words[3] ^= 1 << 7
