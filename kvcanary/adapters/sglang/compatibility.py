"""What the adapter leans on in SGLang, and the releases that it was tried with."""

from __future__ import annotations

import importlib.metadata

from kvcanary.adapters.compatibility import Needed, missing

#: Releases that the tests of this adapter ran inside.
KNOWN_VERSIONS = ("0.5.23",)
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler."
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner."
_POOL = "sglang.srt.mem_cache.memory_pool:"
_FORWARD = (
    "forward_mode",
    "batch_size",
    "input_ids",
    "req_pool_indices",
    "seq_lens",
    "out_cache_loc",
    "positions",
    "rids",
    "extend_prefix_lens_cpu",
    "extend_seq_lens_cpu",
    "seq_lens_cpu",
    "spec_info",
)
NEEDED = (
    Needed(f"{_SCHEDULER}run_batch", ("self", "batch")),
    Needed(f"{_SCHEDULER}process_batch_result", ("self", "batch", "result")),
    Needed(f"{_SCHEDULER}flush_cache", ("self",)),
    Needed(f"{_RUNNER}forward", ("self", "forward_batch")),
    Needed("sglang.srt.model_executor.forward_batch_info:ForwardBatch", (), _FORWARD),
    Needed("sglang.srt.mem_cache.common:release_kv_cache", ("req", "tree_cache")),
    Needed(f"{_POOL}ReqToTokenPool.alloc_rows", ("self", "need_size")),
    Needed(f"{_POOL}MHATokenToKVPool.set_kv_buffer", ("self", "layer", "loc_info", "cache_k", "cache_v")),
    Needed(f"{_POOL}MHATokenToKVPool.move_kv_cache", ("self", "tgt_loc", "src_loc")),
)


def check(version: str | None = None) -> list[str]:
    """What speaks against attaching to the SGLang that is installed, one sentence each; empty: nothing."""
    version = importlib.metadata.version("sglang") if version is None else version
    faults = missing(NEEDED)
    if version not in KNOWN_VERSIONS:
        faults.insert(0, f"sglang {version} is not known here: install {' or '.join(KNOWN_VERSIONS)}")
    return faults
