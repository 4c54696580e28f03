"""Pool views: where K and V of a model lie, and what their slots mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.pools.aliasing import first_overlap
from kvcanary.pools.parts import Extras, Part, describe_parts
from kvcanary.pools.shares import share_of
from kvcanary_kernels.record.layout import MAX_LAYERS, MAX_WORDS_PER_ROW, Share
from kvcanary_kernels.record.rows import WORD_BYTES, PoolRows, pool_rows

FULL_GROUP = "full"  # of pools whose slots are those that plans name


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
    first_head, whole_heads: of a shard, the number of its first KV head in the whole model, and how many that has; 0:
                  the pool has all. The fingerprints of shards that make up a row add up to that of the row, mod 2^64.
                  Ranks that hold copies of one head say the same, and one of them counts. A part has heads if its
                  first dimension is as long as K's; others are whole on every rank, and count once a shard
    layer_numbers: of a pipeline stage, by layer its number in the whole model; empty: 0, 1, ...

    parts, rows, share: derived: K, V and extras in the order of the row, where their words lie, and what they are of
                  the whole model's rows
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
    first_head: int = 0
    whole_heads: int = 0
    layer_numbers: Sequence[int] = ()
    parts: tuple[Part, ...] = field(init=False, repr=False)
    rows: PoolRows = field(init=False, repr=False)
    share: Share = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            self._set(k=() if self.k is None else tuple(self.k), v=() if self.v is None else tuple(self.v))
            _check_numbers(self)
            self._set(parts=describe_parts(self.k, self.v, self.extras, self.layout, self.page_size))
            self._set(rows=_rows(self), layer_numbers=tuple(self.layer_numbers))
            self._set(share=share_of(self.parts, self.layer_numbers, self.first_head, self.whole_heads))
            _check_memory(self)
            if self.null_slots < 0:
                self._set(null_slots=self.page_size)
            _check_capacity(self)
            _check_group(self)
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


def _check_numbers(view: PoolView) -> None:
    for name, low, remedy in (
        ("page_size", 1, "1 where the pool has no pages"),
        ("token_offset", 0, "1 for a draft that is one token ahead"),
        ("ahead", 0, "1 for a draft that is fed the newest token before the next step"),
        ("null_slots", -1, "leave it out where page 0 is padding's"),
        ("vocab_size", 1, "leave it out where it is not known"),
        ("window", 1, "leave it out where attention sees all"),
    ):
        number = getattr(view, name)
        if number is not None and number < low:
            raise PlanError(f"{name} must be at least {low}, got {number}: {remedy}")
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
    first, second = first_overlap(view.memory()) or ("", "")
    if first and first == second:
        strides = dict(view.memory())[first].stride()
        raise PlanError(f"slots of {first} overlap, got strides of {strides} words: every slot needs its own bytes")
    if first:
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


def _check_group(view: PoolView) -> None:
    """PlanError where a view's group and map do not fit together."""
    slot_map = view.slot_map
    if slot_map is None:
        return
    if view.group == FULL_GROUP:
        raise PlanError(f"a pool with a slot_map must be in a group of its own, got {view.group!r}: name another group")
    if slot_map.dtype is not torch.int64 or slot_map.dim() != 1 or not slot_map.is_contiguous():
        shape = f"{list(slot_map.shape)} {slot_map.dtype}"
        raise PlanError(f"slot_map must be contiguous [full slots] int64, got {shape}: give the engine's own tensor")
    if slot_map.device != view.device:
        raise PlanError(f"slot_map is on {slot_map.device}, the pool on {view.device}: both lie on one device")
