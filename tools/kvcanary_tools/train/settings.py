"""What a training is: sizes, lengths, rates, seeds. `FULL` makes the packaged model, `TINY` serves tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Settings:
    # The target.
    hidden_size: int = 192
    intermediate_size: int = 384
    num_layers: int = 24
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 64
    context_len: int = 4096
    # Its training.
    seed: int = 1
    epochs: float = 16.0
    step_tokens: int = 32768
    lengths: tuple[tuple[int, float], ...] = ((512, 0.3), (1024, 0.4), (2048, 0.15), (4096, 0.15))
    matrix_lr: float = 0.015
    vector_lr: float = 0.004
    weight_decay: float = 0.1
    dropout: float = 0.1
    warmup_steps: int = 100
    cooldown: float = 0.6  # the last part of the steps, in which the rates fall to zero
    # The heads.
    head_intermediate_size: int = 768
    draft_vocab_size: int = 1536
    head_epochs: float = 3.0  # over corpus plus generated continuations
    head_step_tokens: int = 32768
    head_len: int = 512
    head_unroll: int = 6
    head_unroll_decay: float = 0.9
    head_matrix_lr: float = 0.02
    head_vector_lr: float = 0.002
    head_weight_decay: float = 0.02
    greedy_label: float = 0.5  # weight of the target's choice in the labels, beside its distribution
    feature_loss: float = 0.1
    generated_prompts: int = 16384  # continued greedily by the target for the heads to learn from
    generated_prompt_len: int = 192
    generated_batch: int = 4096
    evaluated_prompts: int = 100  # the last excerpts; the first are shown by demos and benchmarks

    def target_config(self, vocab_size: int, eos_token_id: int) -> dict[str, Any]:
        """The target's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": vocab_size,
            "max_position_embeddings": self.context_len,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": eos_token_id,
            "eos_token_id": eos_token_id,
            "torch_dtype": "bfloat16",
        }

    def eagle_config(self, vocab_size: int, eos_token_id: int) -> dict[str, Any]:
        target = self.target_config(vocab_size, eos_token_id)
        return target | {
            "architectures": ["LlamaForCausalLMEagle"],
            "num_hidden_layers": 1,
            "intermediate_size": self.head_intermediate_size,
            "bias": False,
        }

    def eagle3_config(self, vocab_size: int, eos_token_id: int) -> dict[str, Any]:
        taps = [2, self.num_layers // 2, self.num_layers - 3] if self.num_layers > 6 else [0, 1, 2]
        return self.eagle_config(vocab_size, eos_token_id) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "tie_word_embeddings": False,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.hidden_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True},
        }


FULL = Settings()
TINY = replace(
    FULL,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=2,
    head_dim=16,
    context_len=1024,
    epochs=3.0,
    step_tokens=1024,
    lengths=((128, 0.5), (256, 0.5)),
    warmup_steps=5,
    head_intermediate_size=48,
    draft_vocab_size=192,
    head_step_tokens=512,
    head_len=64,
    generated_prompts=16,
    generated_prompt_len=24,
    generated_batch=8,
    evaluated_prompts=2,
)
