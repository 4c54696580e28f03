"""What a checkpoint's config.json says, as one frozen dataclass; what we cannot run is refused with a sentence."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcanary import KVCanaryError
from kvcanary_kernels.engine.delta_shape import DeltaShape

HYBRID_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
TARGET_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
TARGET_ARCHITECTURES += HYBRID_ARCHITECTURES
EAGLE_ARCHITECTURES = ("LlamaForCausalLMEagle",)
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3",)
LAYER_TYPES = ("full_attention", "sliding_attention")
DELTA_LAYER_TYPES = ("linear_attention", "full_attention")


class CheckpointError(KVCanaryError, ValueError):
    """A checkpoint that cannot be loaded: unsupported, incomplete or misshapen."""


@dataclass(frozen=True)
class RopeScaling:
    """Rotary embedding: `default`, `linear` (positions divided by factor) or `llama3` (by wavelength)."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # tokens that a layer sees, the reader's own included; None: all
    full_layers: tuple[int, ...] = ()  # layers that see everything beside those with a window
    rotary_dim: int = 0  # numbers of a head that are rotated; 0: all
    output_gate: bool = False  # what attention gives is gated by the layer's input
    delta: DeltaShape | None = None  # of layers with a gated delta net instead of attention
    delta_layers: tuple[int, ...] = ()  # which these are
    eos_token_ids: tuple[int, ...] = ()
    # Draft heads only.
    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    tap_layers: tuple[int, ...] = ()
    # Of a rank that holds a part of the model: heads and intermediate_size are its own.
    rank: int = 0
    num_ranks: int = 1
    whole_kv_heads: int = 0  # of the whole model; 0: this is the whole model

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name} must be a positive whole number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                "num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2 or self.rotary_dim % 2:
            sizes = f"{self.head_dim}" + (f" of which {self.rotary_dim} are rotated" if self.rotary_dim else "")
            raise CheckpointError(f"head_dim must be even for rotary embeddings, got {sizes}")
        if self.delta is not None and (min(self.delta) < 1 or self.delta.v_heads % self.delta.k_heads):
            raise CheckpointError(
                "value heads of a gated delta net must be a multiple of its key heads, and all sizes positive, "
                f"got {self.delta}"
            )

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Layers that see no more than the window."""
        layers = range(0 if self.sliding_window is None else self.num_layers)
        return tuple(layer for layer in layers if layer not in self.full_layers)

    def shard(self, rank: int, num_ranks: int) -> ModelConfig:
        """What one rank of ``num_ranks`` holds: its query heads, the KV heads that they read, its columns of the MLP.

        Where ranks outnumber KV heads, several hold the same one. CheckpointError where something does not divide.
        """
        if self.delta is not None:
            raise CheckpointError(f"a model with layers of a gated delta net must run on one rank, got {num_ranks}")
        if self.num_ranks != 1 or not 0 <= rank < num_ranks:
            raise CheckpointError(f"a whole model is cut into ranks 0 to {num_ranks - 1}, got rank {rank} of {self}")
        for name in ("num_heads", "intermediate_size"):
            if getattr(self, name) % num_ranks:
                raise CheckpointError(
                    f"{name} must be a multiple of the {num_ranks} ranks, got {getattr(self, name)}: run fewer ranks"
                )
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            raise CheckpointError(
                "num_kv_heads must be a multiple of the ranks, or the ranks of it, "
                f"got {self.num_kv_heads} heads and {num_ranks} ranks: run a number of ranks that divides"
            )
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            intermediate_size=self.intermediate_size // num_ranks,
            rank=rank,
            num_ranks=num_ranks,
            whole_kv_heads=self.num_kv_heads,
        )

    @property
    def first_kv_head(self) -> int:
        """Which head of the whole model the first KV head is."""
        return self.rank * self.whole_kv_heads // self.num_ranks

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def load_config(folder: str | Path) -> ModelConfig:
    """Reads `folder`/config.json, and the end-of-text ids of generation_config.json where there is one."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        lack = (
            "does not"
            if Path(folder).is_dir()
            else "is no folder: download the checkpoint first, none is fetched from a hub"
        )
        raise CheckpointError(f"a checkpoint folder must hold config.json, {folder} {lack}")
    raw = read_json(path)
    generation = Path(folder) / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        raw["eos_token_id"] = raw.get("eos_token_id") if eos is None else eos
    return parse_config(raw)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError where there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} must be JSON ({error}): fetch it again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Turns the dictionary of a Hugging Face config.json into a ModelConfig."""
    try:
        return _parse(raw)
    except CheckpointError:
        raise
    except KeyError as missing:
        raise CheckpointError(f"config.json must hold {missing.args[0]}, it does not") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"config.json must hold values of the expected kinds: {error}") from None


def rope_frequencies(rope: RopeScaling, head_dim: int) -> list[float]:
    """The head_dim / 2 angles by which one position turns each pair."""
    frequencies = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope.rope_type == "linear":
        return [frequency / rope.factor for frequency in frequencies]
    if rope.rope_type == "llama3":
        return [_llama3_frequency(frequency, rope) for frequency in frequencies]
    return frequencies


def _llama3_frequency(frequency: float, rope: RopeScaling) -> float:
    # Short wavelengths stay, long ones are stretched by the factor, those between are blended.
    turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = min(max(blend, 0.0), 1.0)
    return (1 - blend) * frequency / rope.factor + blend * frequency


def _parse(raw: dict[str, Any]) -> ModelConfig:
    architecture = (raw.get("architectures") or ["none named"])[0]
    known = TARGET_ARCHITECTURES + EAGLE_ARCHITECTURES + EAGLE3_ARCHITECTURES
    if architecture not in known:
        raise CheckpointError(f"architecture must be one of {', '.join(known)}, got {architecture}")
    is_hybrid = architecture in HYBRID_ARCHITECTURES
    if is_hybrid:  # one that sees has its text model's settings in a part of their own
        raw = raw.get("text_config", {}) | {name: value for name, value in raw.items() if value is not None}
    _refuse_unsupported(raw, is_hybrid)
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    window, full_layers = _parse_window(raw, architecture)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        vocab_size=raw["vocab_size"],
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_parse_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture.startswith("Qwen2") or bool(raw.get("attention_bias", False)),
        o_bias=not architecture.startswith("Qwen2") and bool(raw.get("attention_bias", False)),
        qk_norm=architecture.startswith("Qwen3"),
        sliding_window=window,
        full_layers=full_layers,
        eos_token_ids=_as_tuple(raw.get("eos_token_id")),
        draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        tap_layers=_parse_taps(raw),
        **_parse_delta(raw) if is_hybrid else {},
    )


def _parse_delta(raw: dict[str, Any]) -> dict[str, Any]:
    """What a hybrid has beside the rest."""
    layers, every = raw["num_hidden_layers"], raw.get("full_attention_interval", 4)
    rope = raw.get("rope_parameters") or {}
    kinds = raw.get("layer_types") or [DELTA_LAYER_TYPES[(layer + 1) % every == 0] for layer in range(layers)]
    strange = [kind for kind in kinds if kind not in DELTA_LAYER_TYPES]
    if strange or len(kinds) != layers:
        names = " or ".join(DELTA_LAYER_TYPES)
        raise CheckpointError(f"layer_types must be {names} for each of {layers} layers, got {kinds}")
    sizes = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 0.25
    return {
        "rotary_dim": int(raw["head_dim"] * partial),
        "output_gate": True,
        "delta": DeltaShape(*(raw[size] for size in sizes)),
        "delta_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == DELTA_LAYER_TYPES[0]),
    }


def _parse_rope(raw: dict[str, Any]) -> RopeScaling:
    # transformers 5 writes rope_parameters, earlier releases rope_theta and rope_scaling.
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope type must be default, linear or llama3, got {rope_type}")
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope_type != "llama3":
        return RopeScaling(rope_type, theta, float(parameters.get("factor", 1.0)))
    return RopeScaling(
        rope_type=rope_type,
        theta=theta,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(
            parameters.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 8192)
        ),
    )


def _parse_taps(raw: dict[str, Any]) -> tuple[int, ...]:
    # Published heads count in two ways: layers whose output is tapped, these lists begin with 1, or layers whose
    # input is. Both mean an early layer's output first (sgl-project/sglang#25454). Ours are inputs.
    taps = _as_tuple((raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"))
    return tuple(tap + 1 for tap in taps) if taps[:1] == (1,) else taps


def _refuse_unsupported(raw: dict[str, Any], is_hybrid: bool) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act must be silu, got {raw['hidden_act']}")
    if raw.get("mlp_bias"):
        raise CheckpointError("mlp_bias must be false, got true: biased MLP layers are not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"weights must not be quantized, got quantization method {method}; load the original checkpoint"
        )
    partial = raw.get("partial_rotary_factor") or (raw.get("rope_parameters") or {}).get("partial_rotary_factor") or 1
    if partial != 1 and not is_hybrid:
        raise CheckpointError(f"partial_rotary_factor must be 1, got {partial}")


def _parse_window(raw: dict[str, Any], architecture: str) -> tuple[int | None, tuple[int, ...]]:
    """The window, None where it is off or as wide as the context, and the layers that see everything beside it."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window", architecture.startswith("Mistral")) else None
    context = raw.get("max_position_embeddings", 2048)
    if window is None or window >= context:
        return None, ()
    full_layers = _parse_full_layers(raw)
    return (None, ()) if len(full_layers) == raw["num_hidden_layers"] else (int(window), full_layers)


def _parse_full_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    # layer_types names each layer; without it, as Qwen2 has it, the first max_window_layers see everything.
    num_layers, kinds = raw["num_hidden_layers"], raw.get("layer_types")
    if not kinds:
        return tuple(range(min(raw.get("max_window_layers", 0), num_layers)))
    if len(kinds) != num_layers:
        raise CheckpointError(f"layer_types must name each of {num_layers} layers, got {len(kinds)} names")
    strange = [kind for kind in kinds if kind not in LAYER_TYPES]
    if strange:
        raise CheckpointError(f"layer_types must be {' or '.join(LAYER_TYPES)}, got {strange[0]}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LAYER_TYPES[0])


def _as_tuple(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
