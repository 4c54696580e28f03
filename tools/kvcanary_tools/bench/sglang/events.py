"""What an operator does to a running SGLang between two waves of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcanary_tools.bench.sglang.faults import around


def nothing(host: Any) -> None:
    """The next wave comes when this one has gone."""


def flush(host: Any) -> None:
    """The prefix cache is dropped."""
    host.scheduler.flush_cache()


def sleep(host: Any) -> None:
    """Memory is released and comes back without its bytes, as from a GPU's virtual memory."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    updater, pool = host.scheduler.weight_updater, host.scheduler.tp_worker.model_runner.token_to_kv_pool

    def pause(method: Any, tag: str) -> None:
        method(tag)
        for tensor in (*pool.k_buffer, *pool.v_buffer):
            tensor.fill_(float("nan"))

    with around(updater.memory_saver_adapter, "pause", pause):
        updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    for tensor in (*pool.k_buffer, *pool.v_buffer):
        tensor.fill_(0)
    updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))


def reload(host: Any, flushes: bool = False) -> None:
    """Weights are loaded again, under another version."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    told = UpdateWeightFromDiskReqInput(
        model_path=host.scheduler.server_args.model_path,
        weight_version=f"{len(host.requests)}",
        load_format="auto",
        flush_cache=flushes,
    )
    output = host.scheduler.weight_updater.update_weights_from_disk(told)
    if not output.success:
        raise RuntimeError(output.message)


def reload_and_flush(host: Any) -> None:
    """The same; nothing of the weights before is left."""
    reload(host, True)


def many(host: Any) -> None:
    """So many other requests that the first ones leave the device; the same ones every time."""
    first = len(host.requests)
    for number in range(12):
        host.ask(f"m{first} {number}", [number + 3, 8, 1] + [(7 * number + n) % 32 for n in range(20)], 4)
    host.run(lambda turn: None, lambda turn: None)


EVENTS: dict[str, Callable[[Any], None]] = {
    own.__name__: own for own in (nothing, flush, sleep, reload, reload_and_flush, many)
}
