"""What the canary knows of an engine: its pools, what a forward reads, and what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.pools.aliasing import first_overlap
from kvcanary.pools.parts import Extras, Part, describe_parts
from kvcanary.pools.slot_maps import FULL_GROUP, check_group
from kvcanary_kernels.record.layout import MAX_LAYERS, MAX_WORDS_PER_ROW
from kvcanary_kernels.record.rows import WORD_BYTES, PoolRows, pool_rows


@dataclass(frozen=True, eq=False)
class PoolView:
    """The K and V tensors of one model; the pools of a group share slot ids, all pools of a manager page sizes.

    k, v:         one tensor a layer. NHD: [num_slots, kv_heads, head_dim], or with a page dimension
                  [pages, page_size, kv_heads, head_dim]; HND: [pages, kv_heads, page_size, head_dim]. Rows are dense
                  (HND: dense within a head) and whole 32-bit words; other strides are free, so that K and V may be
                  views of one tensor. Elements of 1, 2, 4 or 8 bytes. V may have another head_dim than K
                  v None or empty: latent rows (MLA), which K holds alone
    token_offset: 1 where the slot of position p holds (token p + 1, hidden p), as EAGLE drafts do
    ahead:        entries that a row holds beyond the committed length: 1 for a draft model of its own, which keeps
                  token p in the slot of position p and has been fed the newest token when the next step begins
    vocab_size:   token ids are below it; None: not known, and not judged
    null_slots:   slots [0, null_slots) are where padding may write and read; page 0 unless stated
    layout:       "NHD" or "HND"; which of them it is cannot be told apart where there are as many heads as slots a page
    extras:       side buffers that are protected as well (scales, index keys), by name or in order: each one tensor a
                  layer of any type, laid out like K with its own heads and dim, or without dim, or without both
    group:        pools of one group share slot ids. "full", or a group whose slots are its own
    slot_map:     [slots of the full group] int64, owned by the engine, on the pool's device: where the token of a full
                  slot lies in this pool; -1 or a null slot where nowhere. None: plans name this pool's own slots
    window:       tokens that attention over this pool sees, the reader's own included; None: all
    role:         what its chain values begin with, empty: the name. Pools of one model, for layers of several groups,
                  have one role: the same token has the same chain in all of them

    parts, rows:  derived: K, V and extras in the order of the row, and where their words lie
    PlanError where any of this does not fit together: nothing is kept then.
    """

    name: str
    k: Sequence[Tensor]
    v: Sequence[Tensor] | None
    page_size: int
    token_offset: int = 0
    null_slots: int = -1
    layout: str = "NHD"
    extras: Extras = ()
    group: str = FULL_GROUP
    slot_map: Tensor | None = None
    window: int | None = None
    ahead: int = 0
    vocab_size: int | None = None
    role: str = ""
    parts: tuple[Part, ...] = field(init=False, repr=False)
    rows: PoolRows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            self._set(k=() if self.k is None else tuple(self.k), v=() if self.v is None else tuple(self.v))
            _check_numbers(self)
            self._set(parts=describe_parts(self.k, self.v, self.extras, self.layout, self.page_size))
            self._set(rows=_rows(self))
            _check_memory(self)
            if self.null_slots < 0:
                self._set(null_slots=self.page_size)
            _check_capacity(self)
            check_group(self)
        except PlanError as error:
            raise PlanError(f"pool {self.name!r}: {error}") from error.__cause__

    @property
    def root_name(self) -> str:
        """What chain values of its entries begin with."""
        return self.role or self.name

    @property
    def num_layers(self) -> int:
        return len(self.k)

    @property
    def num_slots(self) -> int:
        return self.rows.num_slots

    @property
    def num_pages(self) -> int:
        return -(-self.num_slots // self.page_size)

    @property
    def kv_heads(self) -> int:
        return self.parts[0].heads

    @property
    def head_dim(self) -> int:
        """Elements of a head of K."""
        return self.parts[0].dim

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V."""
        return self.k[0].dtype

    @property
    def device(self) -> torch.device:
        return self.k[0].device

    @cached_property  # slices of the rolling check ask
    def slot_bytes(self) -> int:
        """Bytes of one slot: K, V and extras of all layers."""
        return WORD_BYTES * self.rows.words_per_row * self.num_layers

    def value_shapes(self, n: int) -> list[tuple[int, ...]]:
        """By part, the shape of n values on their way into the pool, whatever its layout."""
        return [(n, *part.shape) for part in self.parts]

    def memory(self) -> list[tuple[str, Tensor]]:
        """Every tensor of the pool by name, as an int32 view of its words."""
        named = zip(self.parts, self.rows.parts, strict=True)
        return [(f"{part.argument}[{layer}]", words) for part, views in named for layer, words in enumerate(views)]

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)


@dataclass(eq=False, slots=True)
class ReadPlan:
    """What attention reads, row by row: the very arrays that attention reads, untouched until `check()`.

    indptr:           [rows + 1] int64
    indices:          [nnz] int64 slots in position order; the last `num_written` of a row are this forward's own
    requests:         request ids in batch order
    rows_per_request: 1, or the tree width of a draft substep (rows are request-major)
    prefix_lens:      [requests] int64, committed length that the plan believes
    num_written:      entries at the end of each row that this forward writes, an int or [rows] int64
    tree_mask:        [requests, N, N] bool, node n of a tree sees node m; None where the rows are no trees
    starts:           [rows] int64, position of each row's first entry, `window_start` of the first entry that it writes
                      or less; what lies before that window is not judged. None: every row begins at position 0

    In a pool with a slot map `indices` name slots of the full group, as the plans of writes do.
    """

    indptr: Tensor
    indices: Tensor
    requests: tuple[str, ...]
    rows_per_request: int
    prefix_lens: Tensor
    num_written: int | Tensor
    tree_mask: Tensor | None = None
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        requests, indices = len(self.requests), self.indices
        rows, written = requests * self.rows_per_request, self.num_written
        if not (
            self.indptr.shape == (rows + 1,)
            and self.prefix_lens.shape == (requests,)
            and len(indices.shape) == 1
            and self.indptr.dtype is self.prefix_lens.dtype is indices.dtype is torch.int64
        ):
            self._refuse(rows)
        if isinstance(written, Tensor):
            _expect_int64("num_written", written, rows)
        elif written < 0:
            raise PlanError(f"num_written must not be negative, got {written}")
        if self.starts is not None:
            _expect_int64("starts", self.starts, rows)
        mask = self.tree_mask
        if mask is not None and (mask.dtype is not torch.bool or mask.dim() != 3 or mask.shape[1] != mask.shape[2]):
            raise PlanError(f"tree_mask must be [requests, N, N] bool, got {list(mask.shape)} {mask.dtype}")

    def _refuse(self, rows: int) -> None:
        _expect_int64("indptr", self.indptr, rows + 1)
        _expect_int64("indices", self.indices)
        _expect_int64("prefix_lens", self.prefix_lens, len(self.requests))


@dataclass(eq=False, slots=True)
class WritePlan:
    """What a forward writes, in the order in which its K and V values are stored.

    slots, tokens, positions: [n] int64; tokens are those the record names (position + token_offset)
    parents:   [n] int64, index in this plan of the predecessor, -1 where the entry continues its row; None where
               every row is a chain. Rows are consecutive, as long as the read plan's `num_written`
    lineage:   [n] int64, of draft forwards whose rows write one entry each and whose requests are those of the draft
               forward before (same pool and step, index one less): the branch there, of as many a request as here, from
               whose entry the row goes on. It is compared with what the row reads, so it must not be derived from the
               slots that attention is given. None: rows go on from the entry before their own, whoever wrote it
    """

    slots: Tensor
    tokens: Tensor
    positions: Tensor
    parents: Tensor | None = None
    lineage: Tensor | None = None

    def __post_init__(self) -> None:
        slots, tokens, positions = self.slots, self.tokens, self.positions
        shape = slots.shape
        if not (
            len(shape) == 1
            and shape == tokens.shape == positions.shape
            and slots.dtype is tokens.dtype is positions.dtype is torch.int64
        ):
            self._refuse()
        if self.parents is not None:
            _expect_int64("parents", self.parents, shape[0])
        if self.lineage is not None:
            _expect_int64("lineage", self.lineage, shape[0])
            if self.parents is not None:
                raise PlanError(
                    "parents and lineage must not be given together: a row of a tree's nodes has no lineage"
                )

    def _refuse(self) -> None:
        _expect_int64("slots", self.slots)
        _expect_int64("tokens", self.tokens, self.slots.shape[0])
        _expect_int64("positions", self.positions, self.slots.shape[0])


def wrong_values(view: PoolView, n: int, values: Sequence[Tensor]) -> str:
    """What a layer stores and what it was given, where these differ."""
    shapes = dict.fromkeys(str(list(shape)) for shape in view.value_shapes(n))
    names = [*(part.argument for part in view.parts), *["another"] * len(values)]
    got = [f"{name} {list(value.shape)}" for name, value in zip(names, values, strict=False)]
    return f"stores {' and '.join(shapes)} a layer, got {' and '.join(got)}"


def _expect_int64(name: str, tensor: Tensor, size: int | None = None) -> None:
    shape = tensor.shape
    if tensor.dtype is not torch.int64 or len(shape) != 1 or (size is not None and shape[0] != size):
        wanted = "n" if size is None else size
        raise PlanError(f"{name} must be [{wanted}] int64, got {list(tensor.shape)} {tensor.dtype}")


def _check_numbers(view: PoolView) -> None:
    for name, low, remedy in (
        ("page_size", 1, "1 where the pool has no pages"),
        ("token_offset", 0, "1 for a draft that is one token ahead"),
        ("ahead", 0, "1 for a draft that is fed the newest token before the next step"),
        ("null_slots", -1, "leave it out where page 0 is padding's"),
    ):
        if getattr(view, name) < low:
            raise PlanError(f"{name} must be at least {low}, got {getattr(view, name)}: {remedy}")
    if view.vocab_size is not None and view.vocab_size < 1:
        raise PlanError(f"vocab_size must be at least 1, got {view.vocab_size}: leave it out where it is not known")
    if view.null_slots == 0:
        raise PlanError(
            "null_slots must be at least 1, got 0: refused ids and padding need a slot that nobody owns, take page 0 "
            "out of the engine's free list where it has no null page"
        )


def _rows(view: PoolView) -> PoolRows:
    paged = view.layout == "HND" or view.k[0].dim() == 4
    extras = [part.tensors for part in view.parts[2 if view.v else 1 :]]
    try:
        return pool_rows(view.k, view.v, layout=view.layout, page_size=view.page_size if paged else None, extras=extras)
    except ValueError as error:
        raise PlanError(f"{error}: give views in which each row is dense, whole, aligned 32-bit words") from error


def _check_memory(view: PoolView) -> None:
    overlap = first_overlap(view.memory())
    if overlap is None:
        return
    first, second = overlap
    if first == second:
        strides = dict(view.memory())[first].stride()
        raise PlanError(f"slots of {first} overlap, got strides of {strides} words: every slot needs its own bytes")
    raise PlanError(f"{first} and {second} share memory: give a layer once, and a latent row without v")


def _check_capacity(view: PoolView) -> None:
    words = view.rows.words_per_row
    for name, value, most, remedy in (
        ("layers", view.num_layers, MAX_LAYERS, "watch them as two pools"),
        ("words a row", words, MAX_WORDS_PER_ROW, "watch its parts as two pools"),
        ("null_slots", view.null_slots, view.num_slots - 1, "a pool has slots that are not padding's"),
    ):
        if value > most:
            raise PlanError(f"{name} must be at most {most}, got {value}: {remedy}")
