"""One worker: it has a runner once its device is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.config.model import ModelConfig


class Worker:
    def __init__(self, rank: int = 0, world_size: int = 1, **settings: Any) -> None:
        transfer, is_ahead = settings.pop("transfer", None), settings.pop("is_ahead", False)
        self.settings, self.rank = settings, rank
        parallel = SimpleNamespace(world_size=world_size, tensor_parallel_size=world_size)
        parallel.prefill_context_parallel_size = 1
        parallel.distributed_executor_backend = "uni" if world_size == 1 else "mp"
        self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=ModelConfig(2 * world_size))
        self.vllm_config.kv_transfer_config = transfer
        self.vllm_config.scheduler_config = SimpleNamespace(async_scheduling=is_ahead)

    def init_device(self) -> None:
        settings = dict(self.settings)
        if settings.pop("runner", "v2") == "v1":
            from vllm.distributed.kv_transfer import kv_transfer_state
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner

            kv_transfer_state._KV_CONNECTOR_AGENT = settings.pop("connector", None)
        else:
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        self.model_runner = GPUModelRunner(**settings)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> float:
        return 0.0

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.model_runner.sample_tokens(grammar_output)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """The stand-in's model has none."""

    def add_lora(self, lora_request: Any) -> bool:
        return True

    def sleep(self, level: int = 1) -> None:
        for layer in self.model_runner.compilation_config.static_forward_context.values():
            layer.kv_cache = None

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.model_runner.initialize_kv_cache(self.model_runner.kv_cache_config)
