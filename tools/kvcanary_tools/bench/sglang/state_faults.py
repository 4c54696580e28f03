"""What somebody breaks in the recurrent states of a real SGLang; as in faults.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from kvcanary_tools.bench.sglang.faults import Touched, around, first_request, word_flipped


def state_bit(host: Any) -> Iterator[Touched]:
    """One bit of a recurrent state, of its last layer."""
    entry, windows = _state_of(first_request(host)), host.scheduler.req_to_token_pool.mamba_pool.mamba_cache.conv[0]
    yield from word_flipped(windows[-1, entry], request=first_request(host).rid, slot=entry, layer=len(windows) - 1)


def state_swapped(host: Any) -> Iterator[Touched]:
    """Two requests go on from each other's state."""
    index, rows = (
        host.scheduler.req_to_token_pool.req_index_to_mamba_index_mapping,
        host.scheduler.running_batch.reqs[:2],
    )
    numbers = [request.kv.req_pool_idx for request in rows]
    index[numbers] = index[numbers[::-1]]
    yield {"request": rows[0].rid, "other": rows[1].rid, "slot": _state_of(rows[1])}
    index[numbers] = index[numbers[::-1]]


def state_freed(host: Any) -> Iterator[Touched]:
    """The state of a running request goes back to the allocator."""
    request = first_request(host)
    host.scheduler.req_to_token_pool.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(0))
    yield {"request": request.rid, "slot": _state_of(request)}


def no_state_copy(host: Any) -> Iterator[Touched]:
    """Requests that begin with entries of the prefix cache get none of its states."""
    touched: Touched = {"copies": 0}

    def skip(method: Any, src_index: Any, dst_index: Any) -> None:
        touched["copies"] += len(dst_index)
        touched.setdefault("slot", int(dst_index[0]))

    with around(host.scheduler.req_to_token_pool, "copy_mamba_state", skip):
        yield touched


def state_commit(host: Any) -> Iterator[Touched]:
    """Of every tree the state behind the node before the last accepted one is put in the row's place."""
    backend, touched = host.scheduler.tp_worker.model_runner.attn_backend, {"rows": 0}

    def commit(method: Any, last_correct_step_indices: Any, *args: Any, **kwargs: Any) -> Any:
        touched["rows"] += int((last_correct_step_indices > 0).sum())
        return method((last_correct_step_indices - 1).clamp(min=0), *args, **kwargs)

    with around(backend, "update_mamba_state_after_mtp_verify", commit):
        yield touched


def state_uncommitted(host: Any) -> Iterator[Touched]:
    """A worker does not commit the states of accepted nodes: published as sglang#26351, of n-gram drafts."""
    from sglang.srt.speculative import eagle_worker_common, ngram_worker

    touched: Touched = {"rows": 0}

    def skip(method: Any, target_worker: Any, batch: Any, accept_lens: Any, *args: Any, **kwargs: Any) -> None:
        touched["rows"] += len(accept_lens)

    with ExitStack() as stack:
        for worker in (eagle_worker_common, ngram_worker):
            stack.enter_context(around(worker, "commit_mamba_states_after_verify", skip))
        yield touched


def state_scatter(host: Any) -> Iterator[Touched]:
    """The same within the kernel that copies: it takes the node before the one that it is told."""
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as kernels

    touched: Touched = {"rows": 0}

    def scatter(method: Any, dst: Any, src: Any, into: Any, steps: Any, *args: Any) -> Any:
        touched["rows"] += int((steps > 0).sum())
        return method(dst, src, into, (steps - 1).clamp(min=0), *args)

    with around(kernels, "fused_mamba_state_scatter_with_mask", scatter):
        yield touched


def state_untracked(host: Any) -> Iterator[Touched]:
    """With the strategy extra_buffer: the state that a prompt leaves for the prefix cache is not put there, as of mixed
    chunks in sglang#39342. Another request with that prompt comes behind it.
    """
    runner, touched = host.scheduler.tp_worker.model_runner, {"rows": 0}
    prompt = [2, *range(3, 32)] * 3

    def forward(method: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() and batch.mamba_track_mask is not None and batch.mamba_track_mask.any():
            touched["rows"] += int(batch.mamba_track_mask.sum())
            batch.mamba_track_mask.zero_()
            batch.mamba_prefill_track_mask_cpu = [False] * batch.batch_size
            if touched["rows"] == 1:
                host.ask("that prompt again", prompt, 8)
        return method(batch, *args, **kwargs)

    host.ask("a long prompt", prompt, 8)
    with around(runner, "forward", forward):
        yield touched


OF_STATES = {
    own.__name__: own
    for own in (
        state_bit, state_swapped, state_freed, no_state_copy, state_commit, state_uncommitted, state_scatter,
        state_untracked,
    )
}  # fmt: skip


def _state_of(request: Any) -> int:
    return int(request.kv.mamba_pool_idx)
