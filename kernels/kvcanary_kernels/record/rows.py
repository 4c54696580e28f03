"""PoolRows: where the protected bytes of every slot lie, for kernels (pointers, strides) and for torch (views)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORD_BYTES = 4
MAX_BLOCK = 1024
TILE_WORDS = 512  # that a program reads at a time, of all its slots
TILE_WARPS = 2  # of such a program
MAX_CHUNK = 32  # words of one slot among them: longer ones take more threads, shorter ones less of a memory's sector
FEW_ROWS = 1 << 16  # in all layers, that a launch reads: more of them keep a device busy in narrower parts
MAX_ALIGNMENT = 16  # bytes of the widest load


class Piece(NamedTuple):
    """Where one part of every row lies (K, V or an extra), in 32-bit words; kernels take all fields as constants.

    A slot's part begins slot // page_size * page_stride + slot % page_size * slot_stride words after slot 0's, and is
    words // run runs of `run` words, run_stride apart. One run, or page_size 1, where the layout allows it.

    words: of the part;  first: the part's first word in the row, and key
    block: words a program reads at a time, a power of two
    """

    words: int
    first: int
    page_size: int
    page_stride: int
    slot_stride: int
    run: int
    run_stride: int
    block: int


@dataclass(frozen=True, eq=False)
class PoolRows:
    """The rows of one pool, or of values on their way into it ([n, ...] a layer, slot i = row i).

    A row is K, V and extras of one slot and layer in logical order (head, dim), whatever the layout.

    parts:         by piece, per layer [pages, page_size, runs, run] int32 views; they keep the memory alive
    pieces:        by piece, the strides of its views
    fused:         [layers, num_slots, pieces, words] int32: all rows as one strided tensor; None if irregular
    ptrs:          [pieces, layers] int64 addresses of slot 0
    alignment:     bytes by which every address of `ptrs` divides, at most the widest load
    dtypes:        by piece, of an element
    """

    parts: tuple[tuple[Tensor, ...], ...]
    pieces: tuple[Piece, ...]
    fused: Tensor | None
    ptrs: Tensor
    alignment: int
    dtypes: tuple[torch.dtype, ...]
    num_layers: int
    num_slots: int

    @property
    def words_per_row(self) -> int:
        return self.pieces[-1].first + self.pieces[-1].words

    @property
    def element_sizes(self) -> tuple[int, ...]:
        """By piece, bytes of an element."""
        return tuple(dtype.itemsize for dtype in self.dtypes)

    @property
    def tile(self) -> int:
        """Slots whose rows of one layer a program reads, a chunk of each at a time."""
        return TILE_WORDS // self.chunk

    @property
    def chunk(self) -> int:
        """Words of a row that it reads at a time, by as few threads as wide loads allow."""
        return min(MAX_CHUNK, self._widest)

    @property
    def _widest(self) -> int:
        return max(piece.block for piece in self.pieces)

    @cached_property
    def constants(self) -> tuple[int, ...]:
        """The fields of all pieces, one after the other (Triton 3.6 takes no tuples of tuples)."""
        return tuple(field for piece in self.pieces for field in piece)

    @cached_property
    def layout(self) -> dict[str, Any]:
        """Options of a launch whose programs go by these rows."""
        return {"WORDS": self.words_per_row, "PIECES": self.constants, "ALIGNMENT": self.alignment}

    @cached_property
    def tiling(self) -> dict[str, Any]:
        """Options of one whose programs read `tile` rows each."""
        return self.layout | {"TILE": self.tile, "CHUNK": self.chunk, "num_warps": TILE_WARPS}

    def tiling_of(self, n: int) -> dict[str, Any]:
        """The same for n slots: few long rows have more programs, each of which reads a row in wider parts."""
        if n * self.num_layers > FEW_ROWS:
            return self.tiling
        chunk = min(TILE_WORDS, self._widest)
        return self.tiling | {"TILE": TILE_WORDS // chunk, "CHUNK": chunk}

    def gather(self, slots: Tensor) -> Tensor:
        """[layers, n, words_per_row] int32: the rows of valid slots, copied."""
        if self.fused is not None:
            return self.fused.index_select(1, slots).flatten(2)
        return torch.stack([self.gather_layer(layer, slots) for layer in range(self.num_layers)])

    def gather_layer(self, layer: int, slots: Tensor) -> Tensor:
        """[n, words_per_row] int32: the rows of valid slots in one layer, copied."""
        if self.fused is not None:
            return self.fused[layer].index_select(0, slots).flatten(1)
        return torch.cat([views[layer][_index(views[layer], slots)].flatten(1) for views in self.parts], dim=1)

    def scatter_layer(self, layer: int, slots: Tensor, words: Tensor) -> None:
        """Overwrite the rows of valid, distinct slots in one layer with words [n, words_per_row] int32."""
        if self.fused is not None:
            self.fused[layer].index_copy_(0, slots, words.view(-1, *self.fused.shape[2:]))
            return
        for views, piece in zip(self.parts, self.pieces, strict=True):
            part = words[:, piece.first : piece.first + piece.words]
            view = views[layer]
            view[_index(view, slots)] = part.unflatten(1, view.shape[2:])


def pool_rows(
    k: Sequence[Tensor],
    v: Sequence[Tensor] | None = None,
    *,
    layout: str = "NHD",
    page_size: int | None = None,
    extras: Sequence[Sequence[Tensor]] = (),
) -> PoolRows:
    """Describe per-layer K and V tensors of any 1 to 8 byte type. The same content has the same fingerprints in any
    layout.

    k, v:      NHD: [num_slots, ...] or, with page_size, [pages, page_size, ...]; a slot's elements are dense
               HND: [pages, heads, page_size, ...]; an element of a slot is dense within its head
               Any other strides: K and V may be views of one tensor. v None or empty: latent rows without V
    page_size: of tensors that have a page dimension, which is NHD's second and HND's third; None: they have none
    extras:    side buffers that are protected too (scales), each as one tensor a layer in the same layout, without
               dim where they have none: [num_slots, heads] or [pages, heads, page_size]. They follow V in the row
    """
    if layout not in ("NHD", "HND") or (layout == "HND" and page_size is None):
        raise ValueError(f"layout must be NHD, or HND with a page_size, got {layout} with page_size {page_size}")
    given = {"k": list(k)}
    if v is not None and len(v):
        given["v"] = list(v)
    given |= {f"extras[{i}]": list(extra) for i, extra in enumerate(extras)}
    if not given["k"] or any(len(tensors) != len(given["k"]) for tensors in given.values()):
        counts = " and ".join(str(len(tensors)) for tensors in given.values())
        raise ValueError(f"{' and '.join(given)} must have one tensor a layer, got {counts}")
    parts = tuple(_as_words(tensors, name, layout, page_size) for name, tensors in given.items())
    slots = {name: views[0].shape[0] * views[0].shape[1] for name, views in zip(given, parts, strict=True)}
    if len(set(slots.values())) > 1:
        counts = " and ".join(str(count) for count in slots.values())
        raise ValueError(f"{' and '.join(slots)} differ in slots: {counts}")
    pointers = [[view.data_ptr() for view in views] for views in parts]
    return PoolRows(
        parts=parts,
        pieces=_pieces(parts),
        fused=_fuse(parts),
        ptrs=torch.tensor(pointers, dtype=torch.int64, device=parts[0][0].device),
        alignment=gcd(MAX_ALIGNMENT, *(pointer for part in pointers for pointer in part)),
        dtypes=tuple(tensors[0].dtype for tensors in given.values()),
        num_layers=len(parts[0]),
        num_slots=slots["k"],
    )


def dense_values(
    rows: PoolRows, layer: int, n: int, k: Tensor, v: Tensor | None, extras: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Values of n slots [n, ...] in this layer, v None for latent rows, as [n, words] int32 views by piece."""
    if not 0 <= layer < rows.num_layers:
        raise ValueError(f"layer must be 0 to {rows.num_layers - 1}, got {layer}")
    given = [("k", k), *([] if v is None else [("v", v)]), *((f"extras[{i}]", e) for i, e in enumerate(extras))]
    if len(given) != len(rows.pieces):
        names = ", ".join(name for name, _ in given)
        raise ValueError(f"the pool's rows have {len(rows.pieces)} pieces, got {len(given)}: {names}")
    words = []
    for (name, value), piece, size in zip(given, rows.pieces, rows.element_sizes, strict=True):
        row_bytes = value.shape[1:].numel() * value.element_size()
        if value.shape[0] != n or row_bytes != 4 * piece.words or value.element_size() != size:
            raise ValueError(
                f"{name} must be [{n}, ...] with rows of {4 * piece.words} bytes, {size} an element, "
                f"got {list(value.shape)} {value.dtype}"
            )
        words.append(dense_words(value, name))
    return tuple(words)


def dense_words(values: Tensor, name: str) -> Tensor:
    """[n, words] int32 view of values [n, ...] whose rows are dense, whole, aligned words; any row stride."""
    try:
        return values.view(values.shape[0], values.shape[1:].numel()).view(torch.int32)
    except RuntimeError:  # refused with the reason, or one row of any stride
        return _words(_dense(values[:, None, None], 3, name), name)[:, 0, 0]


def _pieces(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for view, *_ in parts:
        words = view.shape[2:].numel()
        page_stride, slot_stride, run_stride, _ = view.stride()
        pieces.append(
            Piece(
                words=words,
                first=sum(piece.words for piece in pieces),
                page_size=view.shape[1],
                page_stride=page_stride,
                slot_stride=page_stride if view.shape[1] == 1 else slot_stride,
                run=view.shape[3],
                run_stride=run_stride,
                block=min(1 << (words - 1).bit_length(), MAX_BLOCK) if words else 1,
            )
        )
    return tuple(pieces)


def _as_words(tensors: Sequence[Tensor], name: str, layout: str, page_size: int | None) -> tuple[Tensor, ...]:
    """[pages, page_size, runs, run] int32 views of per-layer tensors that are alike."""
    first = tensors[0]
    views = []
    for layer, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype, tensor.stride()) != (first.shape, first.dtype, first.stride()):
            raise ValueError(f"{name}[{layer}] differs from {name}[0] in shape, dtype or strides")
        runs = _collapsed(_runs(tensor, name, layout, page_size))
        views.append(_words(runs, f"{name}[{layer}]"))
    return tuple(views)


def _runs(tensor: Tensor, name: str, layout: str, page_size: int | None) -> Tensor:
    """[pages, page_size, runs, run] view of elements."""
    if page_size is None:
        return _dense(tensor[:, None, None], 3, name)
    dim = 1 if layout == "NHD" else 2
    if tensor.dim() <= dim or tensor.shape[dim] != page_size:
        shape = "[pages, page_size, ...]" if layout == "NHD" else "[pages, heads, page_size, ...]"
        raise ValueError(f"{name} must be {shape} with page_size {page_size}, got {list(tensor.shape)}")
    if layout == "NHD":
        return _dense(tensor[:, :, None], 3, name)
    return _dense(tensor.transpose(1, 2), 3, name)


def _dense(tensor: Tensor, leading: int, name: str) -> Tensor:
    """All dimensions after the leading ones as one; copying would fingerprint bytes that nobody reads."""
    try:
        return tensor.view(*tensor.shape[:leading], tensor.shape[leading:].numel())
    except RuntimeError:
        raise ValueError(f"{name} rows must be dense, got strides {tensor.stride()}") from None


def _collapsed(tensor: Tensor) -> Tensor:
    """The same elements with one run where runs follow each other, and without pages where slots do."""
    pages, page_size, runs, run = tensor.shape
    page_stride, slot_stride, run_stride, _ = tensor.stride()
    if runs == 1 or run_stride == run:
        runs, run, run_stride = 1, runs * run, runs * run
    if page_size == 1:
        slot_stride = page_stride
    if pages == 1 or page_stride == page_size * slot_stride:
        pages, page_size, page_stride = pages * page_size, 1, slot_stride
    return tensor.as_strided((pages, page_size, runs, run), (page_stride, slot_stride, run_stride, 1))


def _words(tensor: Tensor, name: str) -> Tensor:
    """[pages, page_size, runs, run] int32 view of elements."""
    pages, page_size, runs, run = tensor.shape
    size = tensor.element_size()
    steps = [stride * size for stride, length in zip(tensor.stride()[:3], tensor.shape, strict=False) if length > 1]
    if run * size % WORD_BYTES or any(step % WORD_BYTES for step in steps) or tensor.data_ptr() % WORD_BYTES:
        what = "rows" if runs == 1 else "heads"
        raise ValueError(
            f"{name} {what} must be whole aligned 32-bit words, got {run * size} bytes at strides of {steps} bytes"
        )
    # A dimension of one has any stride; the word view wants all of them whole.
    strides = [0 if length == 1 else stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor.as_strided((pages, page_size, runs, run), (*strides[:3], 1)).view(torch.int32)


def _index(view: Tensor, slots: Tensor) -> tuple[Tensor | int, ...]:
    """The index of slots in a view [pages, page_size, runs, run]."""
    page_size = view.shape[1]
    return (slots, 0) if page_size == 1 else (slots // page_size, slots % page_size)


def _fuse(parts: Sequence[tuple[Tensor, ...]]) -> Tensor | None:
    """All rows as one strided view when layers and pieces are regular steps through one storage, else None."""
    first = parts[0][0]
    views = [view for part in parts for view in part]
    storage = first.untyped_storage().data_ptr()
    alike = all((v.shape, v.stride()) == (first.shape, first.stride()) for v in views)
    if not alike or first.shape[1:3] != (1, 1) or any(v.untyped_storage().data_ptr() != storage for v in views):
        return None
    offsets = [[view.storage_offset() for view in part] for part in parts]
    start = offsets[0][0]
    to_layer = offsets[0][1] - start if len(offsets[0]) > 1 else 0
    to_piece = offsets[1][0] - start if len(offsets) > 1 else 0
    expected = [[start + i * to_piece + j * to_layer for j in range(len(offsets[0]))] for i in range(len(offsets))]
    if offsets != expected or to_layer < 0 or to_piece < 0:
        return None
    slots, _, _, words = first.shape
    shape = (len(offsets[0]), slots, len(offsets), words)
    return first.as_strided(shape, (to_layer, first.stride(0), to_piece, 1))
