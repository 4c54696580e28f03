"""What the adapter leans on in vLLM, and the releases that it was tried with."""

from __future__ import annotations

from importlib import import_module

from kvcanary.adapters.compatibility import Needed, accept, missing
from kvcanary.adapters.observed.capabilities import PAGED_FED

__all__ = [
    "EVERY_RUNNER",
    "FED",
    "NEEDED",
    "NEEDED_OF",
    "OWNERS",
    "PARALLEL",
    "POOL",
    "RANKS_SIDE",
    "RUNNERS",
    "RUNNER_V1",
    "RUNNER_V2",
    "SCHEDULER",
    "SCHEDULER_SIDE",
    "TESTED",
    "check",
    "closed_paths",
    "runner_of",
]
#: Codes that a worker feeds whose scheduler is heard.
FED = PAGED_FED | {"R7", "R8", "W2", "W3"}
#: Releases (major and minor) that this adapter ran in, oldest first.
TESTED = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")
#: Modules of the runners that are followed; other devices have runners that are derived from these.
RUNNER_V2, RUNNER_V1 = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"
#: What these are called where a user reads of them.
RUNNERS = {RUNNER_V2: "runner V2", RUNNER_V1: "runner V1"}
_WORKER, _RUNNER, _FIRST = (
    f"{name}."
    for name in ("vllm.v1.worker.gpu_worker:Worker", f"{RUNNER_V2}:GPUModelRunner", f"{RUNNER_V1}:GPUModelRunner")
)
_OUTPUT, _V2 = "vllm.v1.core.sched.output:", "vllm.v1.worker.gpu."
_CACHE = "vllm.v1.kv_cache_interface:"
KV_TRANSFER = "vllm.distributed.kv_transfer.kv_transfer_state"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
#: Of every runner.
EVERY_RUNNER = (
    Needed("vllm.v1.worker.worker_base:WorkerWrapperBase.init_device", ("self",)),
    Needed(f"{_WORKER}initialize_from_config", ("self", "kv_cache_config")),
    Needed(f"{_WORKER}compile_or_warm_up_model", ("self",)),
    Needed(f"{_WORKER}sleep", ("self", "level")),
    Needed(f"{_WORKER}wake_up", ("self", "tags")),
    Needed(f"{_OUTPUT}CachedRequestData", (), ("req_ids", "new_block_ids", "num_computed_tokens")),
    Needed(
        f"{_OUTPUT}SchedulerOutput",
        (),
        (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
            "new_block_ids_to_zero",
            "kv_cache_block_copies",
        ),
    ),
    Needed(
        f"{_OUTPUT}NewRequestData",
        ("req_id",),
        (
            "prompt_token_ids",
            "block_ids",
            "prefill_token_ids",
            "prompt_embeds",
            "num_computed_tokens",
            "lora_request",
            "mm_features",
        ),
    ),
    Needed("vllm.multimodal.inputs:MultiModalFeatureSpec", attributes=("identifier", "mm_position")),
    Needed("vllm.multimodal.inputs:PlaceholderRange", attributes=("offset", "length")),
    Needed(f"{_CACHE}KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Needed(f"{_CACHE}KVCacheConfig", ("num_blocks", "kv_cache_tensors", "kv_cache_groups")),
    Needed(f"{_CACHE}AttentionSpec", (), ("block_size", "num_kv_heads", "head_size", "dtype")),
    Needed(f"{_CACHE}SlidingWindowSpec", (), ("sliding_window",)),
    Needed(f"{_CACHE}ChunkedLocalAttentionSpec", (), ("attention_chunk_size",)),
)
#: By runner, what is needed of it alone.
NEEDED_OF = {
    RUNNER_V2: (
        Needed(
            _RUNNER.rstrip("."),
            attributes=(
                "device",
                "req_states",
                "block_tables",
                "input_buffers",
                "kv_connector",
                "kv_caches",
                "kv_cache_config",
                "compilation_config",
                "speculator",
                "num_speculative_steps",
            ),
            optional=("kernel_block_sizes", "pcp_manager"),
        ),
        Needed(f"{_RUNNER}prepare_attn", ("self", "input_batch")),
        Needed(f"{_RUNNER}execute_model", ("self", "scheduler_output")),
        Needed(f"{_RUNNER}sample_tokens", ("self", "grammar_output")),
        Needed(f"{_RUNNER}update_requests", ("self", "scheduler_output")),  # zeroes and copies, before prepare_attn
        Needed(
            f"{_V2}block_table:BlockTables",
            (),
            ("block_sizes", "max_num_reqs", "cp_size"),
            ("block_sizes", "max_num_reqs", "cp_size", "block_tables", "input_block_tables", "slot_mappings"),
            optional=("blocks_per_kv_block",),
        ),
        Needed(f"{_V2}block_table:BlockTables.append_block_ids", ("self", "req_index", "new_block_ids", "overwrite")),
        Needed(f"{_V2}buffer_utils:StagedWriteTensor", attributes=("gpu",)),
        Needed(f"{_V2}states:RequestState", attributes=("req_id_to_index", "all_token_ids", "total_len")),
        Needed(f"{_V2}input_batch:InputBuffers", attributes=("input_ids", "positions", "query_start_loc", "seq_lens")),
        Needed(
            f"{_V2}input_batch:InputBatch",
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
        Needed(f"{_V2}kv_connector:ActiveKVConnector", attributes=("kv_connector",)),
        Needed(f"{_V2}kv_connector:ActiveKVConnector.pre_forward", ("self", "scheduler_output")),
        Needed(f"{_CONNECTOR}.wait_for_layer_load", ("self", "layer_name")),
        Needed(f"{_V2}async_utils:AsyncOutput.get_output", ("self",)),
    ),
    RUNNER_V1: (
        Needed(
            _FIRST.rstrip("."),
            attributes=(
                "device",
                "vllm_config",
                "max_num_reqs",
                "max_num_tokens",
                "num_spec_tokens",
                "dcp_world_size",
                "requests",
                "input_batch",
                "input_ids",
                "positions",
                "seq_lens",
                "optimistic_seq_lens_cpu",
                "query_start_loc",
                "kv_caches",
                "kv_cache_config",
                "compilation_config",
            ),
        ),
        Needed(f"{_FIRST}execute_model", ("self", "scheduler_output")),
        Needed(f"{_FIRST}sample_tokens", ("self", "grammar_output")),
        Needed(f"{_FIRST}_sample", ("self", "logits", "spec_decode_metadata")),
        Needed("vllm.v1.outputs:SamplerOutput", attributes=("sampled_token_ids",)),
        Needed(f"{_FIRST}_update_states", ("self", "scheduler_output")),
        Needed(
            f"{_FIRST}_build_attention_metadata",
            ("self", "num_tokens", "num_reqs", "max_query_len"),
            ("for_cudagraph_capture", "slot_mappings"),
        ),
        Needed(
            "vllm.v1.worker.block_table:BlockTable",
            (),
            ("block_size", "max_num_reqs"),
            ("block_size", "block_table", "slot_mapping"),
            optional=("blocks_per_kv_block", "pcp_world_size"),
        ),
        Needed("vllm.v1.worker.block_table:MultiGroupBlockTable.__getitem__", ("self", "idx")),
        Needed("vllm.v1.utils:CpuGpuBuffer", attributes=("gpu",)),
        Needed("vllm.v1.worker.gpu_input_batch:InputBatch", attributes=("req_ids", "num_reqs", "block_table")),
        Needed(
            "vllm.v1.worker.gpu_input_batch:CachedRequestState",
            attributes=("prompt_token_ids", "output_token_ids", "lora_request", "mm_features"),
        ),
    ),
}
#: Of the scheduler, for whose blocks are whose; where these are gone, workers keep a ledger of their own.
POOL, SCHEDULER = "vllm.v1.core.block_pool:BlockPool", "vllm.v1.core.sched.scheduler:Scheduler"
OWNERS = "owners of blocks"
SCHEDULER_SIDE = (
    Needed(POOL, attributes=("blocks",)),
    Needed(f"{POOL}.get_new_blocks", ("self", "num_blocks")),
    Needed(f"{POOL}.touch", ("self", "blocks")),
    Needed(f"{POOL}.free_blocks", ("self", "ordered_blocks")),
    Needed(f"{POOL}.cache_full_blocks", ("self", "request", "blocks", "num_cached_blocks", "num_full_blocks")),
    Needed(f"{POOL}.evict_blocks", ("self", "block_ids")),
    Needed(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        attributes=("block_id", "ref_cnt", "is_null", "block_hash"),
        optional=("pool",),
    ),
    Needed("vllm.v1.core.kv_cache_manager:KVCacheManager", attributes=("block_pool",)),
    Needed(SCHEDULER, attributes=("kv_cache_manager", "requests")),
    Needed("vllm.v1.request:Request", attributes=("cache_salt",)),
    Needed(f"{SCHEDULER}.schedule", ("self",)),
)
#: Of workers that share a model, to compare what they sample; where these are gone, each is watched by itself.
PARALLEL, RANKS = "vllm.distributed.parallel_state", "ranks of one model"
RANKS_SIDE = (
    Needed("vllm.v1.outputs:ModelRunnerOutput", (), ("req_ids", "sampled_token_ids")),
    Needed(f"{PARALLEL}:get_tp_group"),
    Needed(f"{PARALLEL}:GroupCoordinator", attributes=("ranks", "rank_in_group")),
    Needed("vllm.config.model:ModelConfig.get_total_num_kv_heads", ("self",)),
)

#: Of models with linear attention; where these are gone, K and V are watched alone.
STATES = "recurrent states"
STATES_SIDE = (
    Needed(f"{_CACHE}MambaSpec", (), ("block_size", "mamba_cache_mode", "num_speculative_blocks")),
    Needed(
        f"{_V2}model_states.interface:ModelState.preprocess_state",
        ("self", "input_batch", "block_tables", "kv_cache_config", "num_computed_tokens"),
    ),
)

#: Of such models where the server drafts; where these are gone, their states are not watched there.
DRAFT_STATES = "recurrent states where the server drafts"
_DRAFTED = ("spec_sequence_masks", "spec_state_indices_tensor", "non_spec_state_indices_tensor", "num_accepted_tokens")
_MAMBA_DRAFTED = ("num_decodes", "state_indices_tensor_d", "state_indices_tensor_p", "num_accepted_tokens")
ACCEPTED = "_update_states_after_model_execute"
DRAFT_STATES_SIDE = (
    Needed(f"{_CACHE}MambaSpec", (), ("mamba_type",)),
    Needed("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata", (), _DRAFTED),
    Needed("vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadata", (), _MAMBA_DRAFTED),
    Needed(f"{_V2}model_states.interface:ModelState.prepare_attn", ("self", "input_batch")),
    Needed(f"{_V2}model_states.interface:ModelState.postprocess_state", ("self", "idx_mapping", "num_sampled")),
    Needed(_FIRST.rstrip("."), attributes=("num_accepted_tokens",)),
    Needed(f"{_FIRST}{ACCEPTED}", ("self", "output_token_ids")),
)

#: Of connectors with runner V1; where these are gone, it is refused with a connector.
LOADS_V1 = "external loads with runner V1"
LOADS_V1_SIDE = (
    Needed(f"{_FIRST}_model_forward", ("self",)),
    Needed(f"{KV_TRANSFER}:get_kv_transfer_group"),
    Needed(f"{KV_TRANSFER}:has_kv_transfer_group"),
)

#: Of loads that are computed again (mode heal); where these are gone, that mode is refused.
HEALING = "loads that are computed again"
HEAL_SIDE = (
    Needed("vllm.config.kv_transfer:KVTransferConfig", attributes=("kv_load_failure_policy",)),
    Needed(f"{_CONNECTOR}.get_block_ids_with_load_errors", ("self",)),
    Needed(f"{_V2}states:RequestState", attributes=("num_computed_tokens", "prefill_len")),
    Needed(f"{_V2}buffer_utils:StagedWriteTensor.stage_write_elem", ("self", "index", "x")),
    Needed(f"{_V2}buffer_utils:StagedWriteTensor.apply_write", ("self",)),
)

#: Of probes of what attention reads; where these are gone, nobody asks.
PROBES = "probes of attention"
CONTEXT, BACKEND = "vllm.forward_context", "vllm.v1.attention.backend"
COMMON = ("query_start_loc", "seq_lens", "num_actual_tokens", "block_table_tensor", "slot_mapping")
PROBED_SIDE = (
    Needed(f"{CONTEXT}:set_forward_context", ("attn_metadata", "vllm_config")),
    Needed(f"{BACKEND}:CommonAttentionMetadata", (), COMMON),
    Needed(f"{BACKEND}:AttentionMetadataBuilder.build", ("self", "common_prefix_len", "common_attn_metadata")),
    Needed(f"{BACKEND}:AttentionMetadataBuilder.build_for_cudagraph_capture", ("self", "common_attn_metadata")),
    Needed("vllm.config.compilation:CUDAGraphMode.decode_mode", ("self",)),
    *(Needed(own.rstrip("."), attributes=("attn_groups",)) for own in (_RUNNER, _FIRST)),
)

#: What stays closed where its names are gone, while the rest is watched.
SIDES = {
    OWNERS: SCHEDULER_SIDE,
    RANKS: RANKS_SIDE,
    STATES: STATES_SIDE,
    DRAFT_STATES: DRAFT_STATES_SIDE,
    LOADS_V1: LOADS_V1_SIDE,
    HEALING: HEAL_SIDE,
    PROBES: PROBED_SIDE,
}
NEEDED = (*EVERY_RUNNER, *(need for needs in (*NEEDED_OF.values(), *SIDES.values()) for need in needs))


def check(version: str | None = None, runner: str | None = None) -> list[str]:
    """What speaks against attaching to the vLLM that is installed, one sentence each.

    version: None: what vLLM says of itself, since builds of others have distributions of other names
    runner:  to that one alone; None: to any, so that a name of one runner does not close the other
    """
    version = str(import_module("vllm").__version__) if version is None else version
    faults, own = missing(EVERY_RUNNER), [missing(needs) for name, needs in NEEDED_OF.items() if runner in (None, name)]
    faults += [fault for runner_faults in own for fault in runner_faults] if all(own) else []
    if faults:
        return [f"vllm {version}: {fault}" for fault in faults]
    refused = accept("vllm", version, TESTED)
    return [refused] if refused else []


def closed_paths() -> dict[str, str]:
    """By path, what is gone of its names, one sentence; those that are whole are left out."""
    gone = {RUNNERS[name]: missing(needs) for name, needs in NEEDED_OF.items()}
    gone |= {name: missing(needs) for name, needs in SIDES.items()}
    return {name: "; ".join(faults) for name, faults in gone.items() if faults}


def runner_of(runner: object) -> str | None:
    """The module of the runner that this one is or is derived from; None where it is neither."""
    modules = [cls.__module__ for cls in type(runner).__mro__]
    return next((module for module in modules if module in NEEDED_OF), None)
