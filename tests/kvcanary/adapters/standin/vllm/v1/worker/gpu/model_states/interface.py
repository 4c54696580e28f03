"""What runner V2 asks of a model's own state."""

from __future__ import annotations


class ModelState:
    def preprocess_state(self, input_batch, block_tables, kv_cache_config, num_computed_tokens) -> None:
        """States are copied to where the forward goes on from them."""

    def prepare_attn(self, input_batch, *told) -> dict[str, object]:
        """By layer, what attention is told of the batch."""
        return {}

    def postprocess_state(self, idx_mapping, num_sampled, num_computed_tokens=None) -> None:
        """What was accepted is known; states are copied into blocks that are full by it."""
