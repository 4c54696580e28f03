"""PoolRows: where the K and V rows of every layer lie, for kernels (pointers) and for torch (one strided tensor)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BYTES = 4


@dataclass(frozen=True, eq=False)
class PoolRows:
    """The rows of one pool, or of values on their way into it ([n, ...] a layer, slot i = row i).

    k, v:               per layer [num_slots, words] int32 views; they keep the memory alive
    fused:              [layers, num_slots, 2, words] int32: all K and V rows as one strided tensor; None if irregular
    k_ptrs, v_ptrs:     [layers] int64 addresses of slot 0
    k_stride, v_stride: words from one slot to the next
    k_words, v_words:   32-bit words in a row
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    fused: Tensor | None
    k_ptrs: Tensor
    v_ptrs: Tensor
    k_stride: int
    v_stride: int
    k_words: int
    v_words: int
    num_layers: int
    num_slots: int

    @property
    def words_per_row(self) -> int:
        return self.k_words + self.v_words

    def gather(self, slots: Tensor, layers: slice = slice(None)) -> Tensor:
        """[layers, n, words_per_row] int32: K row then V row of valid slots, copied; of all layers or of some."""
        if self.fused is not None:
            return self.fused[layers].index_select(1, slots).flatten(2)
        pairs = zip(self.k[layers], self.v[layers], strict=True)
        return torch.stack([torch.cat((k[slots], v[slots]), dim=1) for k, v in pairs])


def pool_rows(k: Sequence[Tensor], v: Sequence[Tensor]) -> PoolRows:
    """Describe per-layer K and V tensors [num_slots, ...], any slot stride, each row dense, any 1 to 8 byte type."""
    if len(k) != len(v) or not k:
        raise ValueError(f"k and v must have one tensor a layer, got {len(k)} and {len(v)}")
    k_rows, v_rows = _as_words(k, "k"), _as_words(v, "v")
    if k_rows[0].shape[0] != v_rows[0].shape[0]:
        raise ValueError(f"k and v differ in slots: {k_rows[0].shape[0]} and {v_rows[0].shape[0]}")
    device = k_rows[0].device
    return PoolRows(
        k=k_rows,
        v=v_rows,
        fused=_fuse(k_rows, v_rows),
        k_ptrs=torch.tensor([t.data_ptr() for t in k_rows], dtype=torch.int64, device=device),
        v_ptrs=torch.tensor([t.data_ptr() for t in v_rows], dtype=torch.int64, device=device),
        k_stride=k_rows[0].stride(0),
        v_stride=v_rows[0].stride(0),
        k_words=k_rows[0].shape[1],
        v_words=v_rows[0].shape[1],
        num_layers=len(k_rows),
        num_slots=k_rows[0].shape[0],
    )


def _as_words(tensors: Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
    first = tensors[0]
    rows = []
    for layer, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype, tensor.stride()) != (first.shape, first.dtype, first.stride()):
            raise ValueError(f"{name}[{layer}] differs from {name}[0] in shape, dtype or strides")
        row_bytes = tensor[0:1].numel() * tensor.element_size() if tensor.shape[0] else 0
        stride_bytes = tensor.stride(0) * tensor.element_size()
        if row_bytes % WORD_BYTES or stride_bytes % WORD_BYTES or tensor.data_ptr() % WORD_BYTES:
            raise ValueError(
                f"{name}[{layer}] rows must be whole aligned 32-bit words, got {row_bytes} bytes "
                f"at a stride of {stride_bytes}"
            )
        rows.append(_dense_rows(tensor, name).view(torch.int32))
    return tuple(rows)


def _dense_rows(tensor: Tensor, name: str) -> Tensor:
    """[num_slots, elements] view; copying would fingerprint bytes that nobody reads."""
    try:
        return tensor.view(tensor.shape[0], tensor.shape[1:].numel())
    except RuntimeError:
        raise ValueError(f"{name} rows must be dense, got strides {tensor.stride()}") from None


def _fuse(k: tuple[Tensor, ...], v: tuple[Tensor, ...]) -> Tensor | None:
    """All rows as one strided view when layers and K to V are regular steps through one storage, else None."""
    storage = k[0].untyped_storage().data_ptr()
    if any(t.untyped_storage().data_ptr() != storage for t in (*k, *v)) or k[0].shape != v[0].shape:
        return None
    starts = [t.storage_offset() for t in k]
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    to_v = v[0].storage_offset() - starts[0]
    regular = all(t.storage_offset() == starts[0] + i * step for i, t in enumerate(k))
    regular &= all(b.storage_offset() - a.storage_offset() == to_v for a, b in zip(k, v, strict=True))
    if not regular or step < 0 or to_v < 0 or k[0].stride(0) != v[0].stride(0):
        return None
    slots, words = k[0].shape
    return k[0].as_strided((len(k), slots, 2, words), (step, k[0].stride(0), to_v, 1))
