"""What a model is like."""

from __future__ import annotations


class ModelConfig:
    def __init__(self, kv_heads: int) -> None:
        self.kv_heads = kv_heads

    def get_total_num_kv_heads(self) -> int:
        return self.kv_heads
