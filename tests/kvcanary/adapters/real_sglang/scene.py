"""One scene in a real SGLang: requests, a fault or none, and what the canary said of them, as one line of JSON.

python scene.py FOLDER '{"eagle": true, "topk": 2, "nodes": 5, "fault": "short_move"}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import host as sglang_host

PROMPTS = {
    "a": [1, 5, 9, 13],
    "b": [1, 7, 7, 7, 8],
    "c": [1, 5, 9, 13, 4, 4, 4, 6, 8, 10, 3, 2, 1, *range(3, 30)],  # longer than a chunk
    "d": [1, 5, 9, 13, 4, 4, 4, 6],  # begins as c does
}


def main() -> None:
    folder, told = Path(sys.argv[1]), json.loads(sys.argv[2])
    sglang_host.install(told.get("eagle", False))
    import torch

    with torch.no_grad():
        print(json.dumps(play(folder, **told)))
    sys.stdout.flush()
    os._exit(0)


def play(
    folder: Path, mode: str = "log", fault: str = "", new: int = 8, later: int = 0, at: int = 3, **settings: Any
) -> dict[str, Any]:
    """later: how many longer requests come after the first four, so that entries are evicted."""
    host = sglang_host.Host(folder, **settings)
    if mode != "off":
        from kvcanary import CanaryConfig
        from kvcanary.adapters.sglang.scheduler import attach

        attach(host.scheduler, CanaryConfig(mode=mode, content="full", seed=3))
    for name, tokens in PROMPTS.items():
        host.ask(name, tokens, new)
    said: dict[str, Any] = {}

    def strike(turn: int) -> None:
        if turn == at and fault:
            FAULTS[fault](host)

    try:
        host.run(strike if not later else lambda turn: None)
        for number in range(later):
            host.ask(f"x{number}", [1, 8, number + 3] + [(7 * number + n) % 32 for n in range(20)], 60)
        if later:
            host.run(strike)
    except Exception as error:  # mode raise
        said["raised"] = type(error).__name__
    said["outputs"] = host.outputs
    if host.canary is not None:
        said["reports"] = host.canary.report()
        said["findings"] = [finding.to_dict() for finding in host.canary.findings]
        host.canary.detach()
    return said


# what somebody breaks


def _first(host: Any) -> Any:
    return host.scheduler.running_batch.reqs[0]


def _table(host: Any) -> Any:
    return host.scheduler.req_to_token_pool.req_to_token


def _flip(pool: Any, slot: Any) -> None:
    import torch

    pool.k_buffer[-1][slot].view(torch.int32)[0, 3] ^= 1 << 7


def bit(host: Any) -> None:
    _flip(host.scheduler.tp_worker.model_runner.token_to_kv_pool, _table(host)[_first(host).kv.req_pool_idx, 1])


def draft_bit(host: Any) -> None:
    runner = host.scheduler.draft_worker.draft_worker.draft_runner
    _flip(runner.token_to_kv_pool, _table(host)[_first(host).kv.req_pool_idx, 1])


def swapped(host: Any) -> None:
    table, row = _table(host), _first(host).kv.req_pool_idx
    table[row, [0, 1]] = table[row, [1, 0]]


def foreign(host: Any) -> None:
    table, requests = _table(host), host.scheduler.running_batch.reqs
    table[requests[0].kv.req_pool_idx, 1] = table[requests[1].kv.req_pool_idx, 2]


def off_by_one(host: Any) -> None:
    """The next decode stores one slot further."""
    _around(host.scheduler.tp_worker.model_runner, "forward", lambda method, batch, **more: (
        batch.out_cache_loc.__setitem__(0, batch.out_cache_loc[0] + 1), method(batch, **more))[1])  # fmt: skip


def short_move(host: Any) -> None:
    """Accepted entries are moved in all layers but the last."""
    pool = host.scheduler.tp_worker.model_runner.token_to_kv_pool

    def move(method: Any, target: Any, source: Any) -> None:
        held = pool.k_buffer[-1].clone(), pool.v_buffer[-1].clone()
        method(target, source)
        pool.k_buffer[-1].copy_(held[0])
        pool.v_buffer[-1].copy_(held[1])

    _around(pool, "_move_kv_cache_impl", move)


def one_too_long(host: Any) -> None:
    """Acceptance counts one token more than was right."""
    import sglang.srt.speculative.eagle_worker_common as common

    own = common.eagle_sample

    def sample(*args: Any, **kwargs: Any) -> Any:
        predict, lens, index = own(*args, **kwargs)
        rows = index.shape[1]
        for row in range(len(lens)):
            kept = int(lens[row])
            if kept < rows:
                first = int(index[row, 0])
                taken = set(index[row, :kept].tolist())
                index[row, kept] = next(n for n in range(first, first + host_nodes(host)) if n not in taken)
                lens[row] += 1
        return predict, lens, index

    common.eagle_sample = sample


def host_nodes(host: Any) -> int:
    return int(host.scheduler.server_args.speculative_num_draft_tokens)


def no_tail_copy(host: Any) -> None:
    """Branches after the first read what lay in their pages before."""
    import sglang.srt.speculative.eagle_worker_common as common

    own = common.duplicate_prefix_tail_to_draft_branches
    for module in list(sys.modules.values()):
        if (getattr(module, "__dict__", None) or {}).get("duplicate_prefix_tail_to_draft_branches") is own:
            module.duplicate_prefix_tail_to_draft_branches = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def freed(host: Any) -> None:
    """The first page of a running request goes back to the allocator."""
    slot = _table(host)[_first(host).kv.req_pool_idx, :1].clone()
    host.scheduler.token_to_kv_pool_allocator.free(slot.to(int_type()))


def int_type() -> Any:
    import torch

    return torch.int64


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(method, *args, **kwargs))


FAULTS: dict[str, Callable[[Any], None]] = {
    own.__name__: own
    for own in (bit, draft_bit, swapped, foreign, off_by_one, short_move, one_too_long, no_tail_copy, freed)
}

if __name__ == "__main__":
    main()
