"""Shares: which heads and layers of the whole model a pool holds, and which words of the whole model's rows."""

from __future__ import annotations

from collections.abc import Sequence

from kvcanary.errors import PlanError
from kvcanary.pools.parts import Part
from kvcanary_kernels.record.layout import MAX_WORDS_PER_ROW, Share
from kvcanary_kernels.record.rows import WORD_BYTES

MAX_LAYER_NUMBER = (1 << 16) - 1


def share_of(parts: Sequence[Part], layer_numbers: Sequence[int], first_head: int, whole_heads: int) -> Share:
    """Numbers of the words of these parts in rows of the whole model: K with all heads, then V and extras.

    PlanError where heads or layers are none of the whole model's; arguments as `PoolView` has them.
    """
    own_heads, num_layers = parts[0].heads, len(parts[0].tensors)
    end_head, whole_heads = first_head + own_heads, whole_heads or own_heads
    layers = tuple(layer_numbers) or tuple(range(num_layers))
    _check_heads(first_head, end_head, whole_heads)
    _check_layers(layers, num_layers)
    words, before = list[range](), 0
    for part in parts:
        head_bytes = part.dim * part.element_size
        is_cut = bool(part.shape) and part.heads == own_heads  # others are whole in every shard
        first, own = first_head * head_bytes if is_cut else 0, part.heads * head_bytes // WORD_BYTES
        if first % WORD_BYTES:
            raise PlanError(
                f"heads of {part.name} are {head_bytes} bytes, so head {first_head} begins within a word of "
                f"{WORD_BYTES}: watch {part.name} as a pool of its own, without first_head"
            )
        words.append(range(before + first // WORD_BYTES, before + first // WORD_BYTES + own))
        before += -(-whole_heads * head_bytes // WORD_BYTES) if is_cut else own
    if before > MAX_WORDS_PER_ROW:
        raise PlanError(
            f"words of a row of the whole model must be at most {MAX_WORDS_PER_ROW}, got {before}: watch it as two "
            "pools"
        )
    return Share(layers, tuple(words), first_head, end_head, whole_heads)


def _check_heads(first: int, end: int, whole: int) -> None:
    if not 0 <= first < end <= whole:
        raise PlanError(
            f"heads of a shard must be among those of the model, got {first} to {end - 1} of {whole}: give first_head "
            "and whole_heads, of KV heads"
        )


def _check_layers(numbers: Sequence[int], num_layers: int) -> None:
    is_right = len(numbers) == num_layers == len(set(numbers))
    if not is_right or not all(0 <= number <= MAX_LAYER_NUMBER for number in numbers):
        raise PlanError(
            f"layer_numbers must be different, one a layer, from 0 to {MAX_LAYER_NUMBER}, got {list(numbers)[:8]} for "
            f"{num_layers} layers: give the numbers that the whole model has for them"
        )
