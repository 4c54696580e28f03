"""Plans steps, as its test says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager


class Scheduler:
    def __init__(self, num_blocks: int, plan: Callable[[], Any]) -> None:
        self.kv_cache_manager = KVCacheManager(num_blocks)
        self.plan, self.requests = plan, dict[str, Any]()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        return self.plan()
