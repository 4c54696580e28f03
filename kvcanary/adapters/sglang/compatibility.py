"""What the adapter leans on in SGLang, and the releases that it was tried with."""

from __future__ import annotations

from importlib import import_module

from kvcanary.adapters.compatibility import Needed, accept, missing
from kvcanary.adapters.observed.capabilities import PAGED_FED

__all__ = [
    "ANCHOR",
    "DECODES",
    "DRAFTS",
    "DRAFT_GRAPH",
    "EVERY_SCHEDULER",
    "FED",
    "GRAPHS",
    "NEEDED",
    "NEEDED_OF",
    "NOT_FOLLOWED",
    "PROBES",
    "RANKS",
    "STATES",
    "STATES_OF_DRAFTS",
    "TESTED",
    "WITHOUT_MODEL",
    "check",
    "closed_paths",
    "unfollowed",
]
#: Releases that this adapter ran in, oldest first; all of them are 0.5, so that patches are told apart.
TESTED = ("0.5.23",)
FED = PAGED_FED | {"R7", "R8", "W2", "W3", "W7"}  # grants and frees are told here; P1 with content full
#: What the plug-in hooks: once it has run, the scheduler and all of its runners are there.
ANCHOR = "sglang.srt.managers.scheduler:Scheduler.__init__"
EVERY_SCHEDULER, DRAFTS, WITHOUT_MODEL = "every scheduler", "drafts of a model", "drafts without a model"
PROBES = "probes of attention"  # where its names are gone, nobody asks what attention reads
GRAPHS = "probes of attention in graphs"  # and what it reads in a graph
RANKS = "ranks of one model"  # where its names are gone, nobody compares them
#: Where their names are gone states are not watched: of any scheduler that has some, and of one that drafts.
STATES, STATES_OF_DRAFTS = "recurrent states", "recurrent states where the server drafts"
BATCH, CONTEXT = "sglang.srt.model_executor.forward_batch_info", "sglang.srt.model_executor.forward_context"
DECODES = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
#: Settings of a server under which entries come, or forwards run, in ways that are not followed; and what is `off`.
NOT_FOLLOWED = {
    "disaggregation_mode": "null",
    "hicache_storage_backend": None,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "radix_cache_backend": None,
    "enable_hisparse": False,
    "enable_unified_memory": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "dllm_algorithm": None,
    "pp_size": 1,
    "dcp_size": 1,
}
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_BACKENDS = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_CACHE = "sglang.srt.mem_cache."
_MEMORY, _REQUEST = f"{_CACHE}memory_pool:", "sglang.srt.managers.schedule_batch:"
_FORWARD, _RESULT = f"{BATCH}:", "sglang.srt.managers.utils:GenerationBatchResult"
_SPECULATIVE = "sglang.srt.speculative."
_WORKER, _NGRAM = f"{_SPECULATIVE}eagle_worker_v2:", f"{_SPECULATIVE}ngram_worker:NGRAMWorker"
_LINEAR = "sglang.srt.layers.attention.hybrid_linear_attn_backend:"
_ALLOCATE = Needed(
    f"{_CACHE}allocation:alloc_for_spec_decode",
    ("tree_cache", "req_to_token_pool"),
    ("reqs", "cur_kv_lens_cpu", "nxt_kv_lens_cpu"),
)
#: In which the draft steps of a round run, captured.
DRAFT_GRAPH = Needed(
    f"{_SPECULATIVE}eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner",
    attributes=("capture_one_shape", "model_runner", "speculative_num_steps", "max_num_token", "device"),
)
#: By path, the names that it uses; where those of drafts are gone, a scheduler that drafts is refused.
NEEDED_OF = {
    EVERY_SCHEDULER: (
        Needed(ANCHOR, ("self", "server_args")),
        Needed(
            _SCHEDULER,
            attributes=(
                "server_args",
                "tp_worker",
                "draft_worker",
                "max_prefill_tokens",
                "max_req_len",
                "max_running_requests",
                "weight_updater",
            ),
        ),
        Needed(_SCHEDULER, attributes=("enable_overlap",)),
        Needed(f"{_SCHEDULER}.run_batch", ("self", "batch")),
        Needed(f"{_SCHEDULER}.process_batch_result", ("self", "batch", "result")),
        Needed(f"{_SCHEDULER}.record_weight_version_change", ("self", "new_version")),
        Needed(_RUNNER, attributes=("req_to_token_pool", "token_to_kv_pool", "sliding_window_size")),
        Needed(f"{_RUNNER}.forward", ("self", "forward_batch")),
        Needed(f"{_RUNNER}.sample", ("self", "logits_output", "forward_batch")),
        Needed(
            f"{_FORWARD}ForwardBatch",
            (),
            (
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
            ),
        ),
        Needed(f"{_FORWARD}ForwardMode", attributes=("is_idle", "is_extend", "is_target_verify")),
        Needed(_RESULT, attributes=("copy_done",)),
        Needed(f"{_CACHE}common:release_kv_cache", ("req", "tree_cache")),
        Needed(f"{_CACHE}allocation:alloc_for_extend", ("batch",)),
        Needed(f"{_CACHE}allocation:alloc_for_decode", ("batch", "token_per_req")),
        Needed(f"{_CACHE}allocator.token:TokenToKVPoolAllocator", attributes=("page_size", "free_group")),
        Needed(f"{_CACHE}allocator.token:TokenToKVPoolAllocator.clear", ("self",)),
        Needed(f"{_UPDATER}:SchedulerWeightUpdaterManager", attributes=("memory_saver_adapter", "flush_cache")),
        Needed("sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter.pause", ("self", "tag")),
        Needed(f"{_CACHE}allocator.token:TokenToKVPoolAllocator.free", ("self", "free_index")),
        Needed(f"{_CACHE}allocator.paged:PagedTokenToKVPoolAllocator._release_page_ids", ("self", "page_ids")),
        Needed(f"{_CACHE}base_prefix_cache:BasePrefixCache.checkpoint", ("self", "req")),
        Needed(
            f"{_REQUEST}Req",
            attributes=("rid", "kv", "origin_input_ids", "output_ids", "input_embeds"),
            optional=("lora_id", "extra_key", "multimodal_inputs", "positional_embed_overrides", "session"),
        ),
        Needed(
            f"{_REQUEST}ReqKvInfo",
            attributes=("req_pool_idx", "holds_kv", "kv_allocated_len", "cache_protected_len"),
        ),
        Needed(f"{_REQUEST}ScheduleBatch", attributes=("reqs", "prefix_lens", "extend_lens")),
        Needed(f"{_MEMORY}ReqToTokenPool", attributes=("req_to_token", "req_generation")),
        Needed(
            f"{_MEMORY}MHATokenToKVPool",
            attributes=(
                "k_buffer",
                "v_buffer",
                "page_size",
                "start_layer",
                "head_num",
                "head_dim",
                "v_head_dim",
                "dtype",
                "use_hnd",
            ),
            optional=("kv_cache_layout",),
        ),
        Needed(
            f"{_MEMORY}MHATokenToKVPool.set_kv_buffer",
            ("self", "layer", "loc_info", "cache_k", "cache_v"),
            ("layer_id_override",),
        ),
        Needed(f"{_MEMORY}MHATokenToKVPool.move_kv_cache", ("self", "tgt_loc", "src_loc")),
        Needed("sglang.srt.runtime_context:get_parallel"),
    ),
    DRAFTS: (
        Needed(f"{_FORWARD}ForwardMode", attributes=("is_draft_extend_v2", "is_decode")),
        Needed(f"{_CACHE}radix_cache:RadixCache", attributes=("is_eagle",)),
        Needed(f"{_CACHE}unified_radix_cache:UnifiedRadixCache", attributes=("tree_core",)),
        Needed(f"{_CACHE}unified_cache.unified_tree_core:UnifiedTreeCore", attributes=("is_eagle",)),
        Needed(_RESULT, (), ("accept_lens", "accept_index", "next_token_ids")),
        _ALLOCATE,
        Needed(f"{_WORKER}EAGLEWorkerV2", attributes=("draft_worker", "speculative_num_draft_tokens")),
        Needed(f"{_WORKER}EAGLEWorkerV2.verify", ("self",)),
        Needed(
            f"{_WORKER}EagleDraftWorker._draft_extend_for_prefill",
            ("self", "batch", "target_hidden_states", "next_token_ids"),
        ),
        Needed(
            f"{_SPECULATIVE}eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner.execute",
            ("self", "forward_batch"),
        ),
        DRAFT_GRAPH,
        Needed(f"{DRAFT_GRAPH.name}.execute", ("self", "forward_batch")),
        Needed(
            f"{_WORKER}EagleDraftWorker",
            attributes=(
                "draft_runner",
                "topk",
                "speculative_num_steps",
                "cuda_graph_runner",
                "cuda_graph_runner_for_draft_extend",
            ),
        ),
    ),
    WITHOUT_MODEL: (
        Needed(_RESULT, (), ("accept_lens", "next_token_ids")),
        _ALLOCATE,
        Needed(_NGRAM, attributes=("draft_worker",)),
        Needed(f"{_NGRAM}.forward_batch_generation", ("self", "batch")),
        Needed(f"{_SPECULATIVE}spec_utils:move_accept_tokens_to_target_kvcache", ("batch", "accept_index")),
    ),
    PROBES: (
        Needed(f"{_FORWARD}ForwardBatch", (), ("forward_mode", "req_pool_indices", "seq_lens", "out_cache_loc")),
        Needed(f"{CONTEXT}:ForwardContext", (), ("attn_backend",)),
        Needed(f"{CONTEXT}:forward_context", ("ctx",)),
        Needed(f"{_CACHE}kv_index_translator:KVIndexTranslator.own_plan", ("self", "forward_batch")),
        Needed(f"{_CACHE}kv_loc_plan:KVLocPlan.bind", ("self", "batch", "reader")),
        Needed(_RUNNER, attributes=("kv_index_translator",)),
    ),
    GRAPHS: (
        Needed(f"{DECODES}:DecodeCudaGraphRunner", attributes=("capture_forward_mode", "capture_bs")),
        Needed(f"{DECODES}:build_replay_fb_view", among=("forward_batch", "buffers", "bs", "raw_bs", "num_tokens")),
        Needed(f"{_RUNNER}._get_attention_backend", ("self",)),
        Needed(_RUNNER, attributes=("decode_cuda_graph_runner",)),
        Needed(f"{_BACKENDS}.init_cuda_graph_state", ("self", "max_bs", "max_num_tokens")),
        Needed(f"{_BACKENDS}.init_forward_metadata_out_graph", ("self", "forward_batch", "in_capture")),
        Needed(f"{_BACKENDS}.init_forward_metadata_in_graph", ("self", "forward_batch")),
        Needed(f"{_BACKENDS}.get_cuda_graph_seq_len_fill_value", ("self",)),
        Needed(f"{_CACHE}kv_index_translator:KVIndexTranslator.bind_runner_slots", ("self", "forward_batch")),
    ),
    STATES: (
        Needed(
            f"{_MEMORY}HybridReqToTokenPool", attributes=("mamba_pool", "mamba_allocator", "enable_mamba_extra_buffer")
        ),
        Needed(f"{_MEMORY}HybridReqToTokenPool.get_mamba_indices", ("self", "req_indices")),
        Needed(f"{_MEMORY}HybridReqToTokenPool.translate_mamba_indices", ("self", "mamba_indices")),
        Needed(f"{_CACHE}allocator.mamba:MambaSlotAllocator.alloc", ("self", "need_size")),
        Needed(f"{_CACHE}allocator.mamba:MambaSlotAllocator.free", ("self", "free_index")),
        Needed(_RUNNER, attributes=("attn_backend",)),
        Needed(f"{_MEMORY}MambaPool", attributes=("mamba_cache",)),
        Needed(f"{_MEMORY}MambaPool.State", attributes=("conv", "temporal")),
        Needed(f"{_MEMORY}MambaPool.copy_from", ("self", "src_indices", "dst_indices")),
        Needed(f"{_MEMORY}MambaPool.clear_slots", ("self", "indices")),
        Needed(f"{_RUNNER}._maybe_execute_deferred_mamba_cow_and_clear", ("self", "forward_batch")),
        Needed(f"{_FORWARD}ForwardBatch", attributes=("mamba_track_mask", "mamba_track_indices")),
        Needed(f"{_FORWARD}ForwardBatch.mamba_track_aligned_lens", ("self",)),
    ),
    STATES_OF_DRAFTS: (
        Needed(f"{_MEMORY}MambaPool", attributes=("enable_linear_replayssm_spec",)),
        Needed(f"{_MEMORY}MambaPool.SpeculativeState", attributes=("intermediate_ssm",)),
        Needed(f"{_LINEAR}MambaAttnBackendBase", attributes=("accept_lens_pool",)),
        Needed(
            f"{_LINEAR}HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
            ("self", "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track"),
        ),
    ),
    RANKS: (
        Needed(_SCHEDULER, attributes=("attn_tp_group", "model_config")),
        Needed("sglang.srt.distributed.parallel_state:GroupCoordinator", attributes=("ranks", "rank_in_group")),
        Needed("sglang.srt.configs.model_config:ModelConfig.get_total_num_kv_heads", ("self",)),
        Needed(f"{_CACHE}allocator.base:BaseTokenToKVPoolAllocator.available_size", ("self",)),
        Needed(_RESULT, (), ("next_token_ids", "accept_lens")),
    ),
}
NEEDED = tuple(need for needs in NEEDED_OF.values() for need in needs)


def check(version: str | None = None, drafts: str | None = None) -> list[str]:
    """What speaks against attaching to the SGLang that is installed, one sentence each.

    version: None: what SGLang says of itself
    drafts:  to a scheduler that drafts, by which path
    """
    version = str(import_module("sglang").__version__) if version is None else version
    faults = missing((*NEEDED_OF[EVERY_SCHEDULER], *(NEEDED_OF[drafts] if drafts else ())))
    if faults:
        return [f"sglang {version}: {fault}" for fault in faults]
    refused = accept("sglang", version, TESTED)
    return [refused] if refused else []


def unfollowed(settings: object) -> list[str]:
    """What a server is set to do that is not followed, one sentence each; a setting that it does not have is off."""
    told = {name: getattr(settings, name, off) for name, off in NOT_FOLLOWED.items()}
    return [
        f"{name} must be {NOT_FOLLOWED[name]!r} here, got {value!r}: what it does to entries is not followed yet"
        for name, value in told.items()
        if value != NOT_FOLLOWED[name]
    ]


def closed_paths() -> dict[str, str]:
    """By path, what is gone of its names, one sentence; those that are whole are left out."""
    gone = {path: missing(needs) for path, needs in NEEDED_OF.items()}
    return {path: "; ".join(faults) for path, faults in gone.items() if faults}
