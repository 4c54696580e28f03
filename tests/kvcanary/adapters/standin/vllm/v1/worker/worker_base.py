"""The wrapper that every process has, whatever its worker."""

from __future__ import annotations

from typing import Any


class WorkerWrapperBase:
    def __init__(self, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.rpc_rank = rpc_rank

    def init_worker(self, all_kwargs: list[dict[str, Any]]) -> None:
        from vllm.v1.worker.gpu_worker import Worker

        self.worker = Worker(**all_kwargs[self.rpc_rank])

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self.worker.initialize_from_config(kv_cache_configs[0])

    def init_device(self):
        self.worker.init_device()

    def execute_model(self, scheduler_output):
        return self.worker.execute_model(scheduler_output)

    def __getattr__(self, attr: str):
        return getattr(self.worker, attr)
