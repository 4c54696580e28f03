"""What the adapter leans on in vLLM, and the releases that it was written for."""

from __future__ import annotations

import importlib.metadata

from kvcanary.adapters.compatibility import Needed, missing
from kvcanary.adapters.observed.capabilities import PAGED_FED as FED

__all__ = ["FED", "KNOWN_VERSIONS", "NEEDED", "NEEDED_OF", "RUNNER_V1", "RUNNER_V2", "check"]
#: Releases (major and minor) whose sources this adapter was written against.
KNOWN_VERSIONS = ("0.26",)
RUNNER_V2, RUNNER_V1 = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"
_WORKER, _RUNNER, _FIRST = (
    f"{name}."
    for name in ("vllm.v1.worker.gpu_worker:Worker", f"{RUNNER_V2}:GPUModelRunner", f"{RUNNER_V1}:GPUModelRunner")
)
_TABLES = "vllm.v1.worker.gpu.block_table:BlockTables"
#: Of every runner.
NEEDED = (
    Needed("vllm.v1.worker.worker_base:WorkerWrapperBase.init_device", ("self",)),
    Needed(f"{_WORKER}initialize_from_config", ("self", "kv_cache_config")),
    Needed(f"{_WORKER}compile_or_warm_up_model", ("self",)),
    Needed(f"{_WORKER}sleep", ("self", "level")),
    Needed(f"{_WORKER}wake_up", ("self", "tags")),
    Needed("vllm.v1.core.sched.output:CachedRequestData", (), ("req_ids", "new_block_ids")),
    Needed(
        "vllm.v1.core.sched.output:SchedulerOutput",
        (),
        (
            "scheduled_new_reqs",
            "total_num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
            "new_block_ids_to_zero",
            "kv_cache_block_copies",
        ),
    ),
    Needed(
        "vllm.v1.core.sched.output:NewRequestData",
        ("req_id",),
        ("prefill_token_ids", "num_computed_tokens", "lora_request"),
    ),
    Needed("vllm.v1.kv_cache_interface:KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Needed("vllm.v1.kv_cache_interface:KVCacheConfig", ("num_blocks", "kv_cache_tensors", "kv_cache_groups")),
    Needed("vllm.v1.kv_cache_interface:AttentionSpec", (), ("block_size", "num_kv_heads", "head_size", "dtype")),
)
#: By runner, what is needed of it alone.
NEEDED_OF = {
    RUNNER_V2: (
        Needed(f"{_RUNNER}prepare_attn", ("self", "input_batch")),
        Needed(f"{_RUNNER}execute_model", ("self", "scheduler_output")),
        Needed(f"{_RUNNER}sample_tokens", ("self", "grammar_output")),
        Needed(f"{_RUNNER}update_requests", ("self", "scheduler_output")),
        Needed(_TABLES, (), ("block_sizes", "max_num_reqs", "kernel_block_sizes", "cp_size")),
        Needed(f"{_TABLES}.append_block_ids", ("self", "req_index", "new_block_ids", "overwrite")),
        Needed(
            "vllm.v1.worker.gpu.input_batch:InputBatch",
            (),
            (
                "req_ids",
                "num_reqs",
                "idx_mapping_np",
                "num_tokens",
                "query_start_loc",
                "seq_lens",
                "seq_lens_cpu_upper_bound",
                "input_ids",
                "positions",
                "num_scheduled_tokens",
            ),
        ),
    ),
    RUNNER_V1: (
        Needed(f"{_FIRST}execute_model", ("self", "scheduler_output")),
        Needed(f"{_FIRST}sample_tokens", ("self", "grammar_output")),
        Needed(f"{_FIRST}_update_states", ("self", "scheduler_output")),
        Needed(
            f"{_FIRST}_build_attention_metadata",
            ("self", "num_tokens", "num_reqs", "max_query_len"),
            ("for_cudagraph_capture", "slot_mappings"),
        ),
        Needed("vllm.v1.worker.block_table:BlockTable", (), ("block_size", "kernel_block_size", "max_num_reqs")),
        Needed("vllm.v1.worker.block_table:MultiGroupBlockTable.__getitem__", ("self", "idx")),
    ),
}


def check(version: str | None = None, runner: str | None = None) -> list[str]:
    """What speaks against attaching to the vLLM that is installed, one sentence each; `runner`: to that one alone."""
    version = importlib.metadata.version("vllm") if version is None else version
    own = [need for name, needs in NEEDED_OF.items() if runner in (None, name) for need in needs]
    faults = missing((*NEEDED, *own))
    if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
        faults.insert(0, f"vllm {version} is not known here: install {' or '.join(KNOWN_VERSIONS)}")
    return faults
