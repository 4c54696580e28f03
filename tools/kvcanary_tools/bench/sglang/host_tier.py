"""A host tier on a CPU: SGLang's own classes, but for what pins memory and the kernel that copies."""

from __future__ import annotations

from typing import Any

SETTINGS = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_size": 0, "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first", "hicache_write_policy": "write_through",
}  # fmt: skip


def stand_in() -> None:
    """Before a scheduler is built."""
    import sglang.srt.mem_cache.pool_host.common as common
    import sglang.srt.mem_cache.pool_host.mha as mha

    common._cuda_host_register = lambda *args, **kwargs: None
    mha.transfer_kv_direct = copied


def copied(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """What SGLang's kernel does."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
