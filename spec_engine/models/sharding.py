"""Which part of each tensor of a checkpoint a rank holds: rows of q, k, v, gate and up; columns of o and down."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from spec_engine.models.config import CheckpointError, ModelConfig
from spec_engine.models.decoder import Decoder
from spec_engine.models.files import Part

_ROWS, _COLUMNS = 0, 1


def reduce_over(model: Decoder, group: dist.ProcessGroup | None = None) -> Decoder:
    """The same model, each of whose layers sums its two products over the ranks of ``group`` (None: all)."""
    for layer in model.layers:
        layer.reduce = partial(dist.all_reduce, group=group)
    return model


def part_of(config: ModelConfig) -> Part | None:
    """The cut for the rank of this config, None where it holds the whole model; embedding, norms, lm_head are whole."""
    if config.num_ranks == 1:
        return None
    cuts = _cuts(config)

    def part(name: str, shape: Sequence[int]) -> tuple[slice, ...]:
        module, _, kind = name.rpartition(".")
        axis, first, size, whole = cuts.get(module.rpartition(".")[2], (_ROWS, 0, 0, 0))
        if not size or (axis == _COLUMNS and kind == "bias"):
            return ()
        if len(shape) <= axis or shape[axis] != whole:
            raise CheckpointError(f"{name} must have {whole} along dimension {axis}, got shape {list(shape)}")
        return (slice(None),) * axis + (slice(first, first + size),)

    return part


def without_others(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The same, but for biases behind a sum over ranks, which rank 0 alone adds."""
    if config.rank == 0:
        return tensors
    is_once = lambda name: name.endswith("o_proj.bias")  # noqa: E731
    return {name: tensor * 0 if is_once(name) else tensor for name, tensor in tensors.items()}


def _cuts(config: ModelConfig) -> dict[str, tuple[int, int, int, int]]:
    """Module name -> axis, first and number of the rank's rows or columns, and the number of all."""
    q, kv, mlp = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    whole_q, whole_kv, whole_mlp = q * config.num_ranks, config.whole_kv_heads * config.head_dim, mlp * config.num_ranks
    first_kv = config.first_kv_head * config.head_dim
    return {
        "q_proj": (_ROWS, config.rank * q, q, whole_q),
        "k_proj": (_ROWS, first_kv, kv, whole_kv),
        "v_proj": (_ROWS, first_kv, kv, whole_kv),
        "o_proj": (_COLUMNS, config.rank * q, q, whole_q),
        "gate_proj": (_ROWS, config.rank * mlp, mlp, whole_mlp),
        "up_proj": (_ROWS, config.rank * mlp, mlp, whole_mlp),
        "down_proj": (_COLUMNS, config.rank * mlp, mlp, whole_mlp),
    }
