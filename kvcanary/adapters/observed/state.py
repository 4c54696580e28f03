"""What a canary of watched pools keeps: where bytes lie, what is fed, and what the host must know of a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.owners import Owners
from kvcanary.names import Named
from kvcanary.pools.views import PoolView
from kvcanary_kernels.record.layout import Keys, signed
from kvcanary_kernels.record.rows import WORD_BYTES, PoolRows

RING = 8  # steps whose violations are kept: more than any engine's host is behind its device
LOOKS = 2  # at whole rows in a step: those that went, those that begin with entries of others
COUNT_BITS = 40  # of a count that is sent; the step stands above them


NUMBERS = re.compile(r"\d+")  # in the name of a layer


@dataclass(eq=False)
class Layers:
    """Layers of one group whose rows are alike: where their bytes lie and what these were.

    names: what the engine calls them
    is_late: they are stored by a later forward of the step (a draft's), `took` says when
    reads_hidden: the first of them goes on from what other layers or another model computed, and not from a token alone
    zeros:   [layers], as of kvcanary_kernels.watch.reread.Before
    """

    view: PoolView
    names: tuple[str, ...]
    keys: Keys
    fingerprints: Tensor
    stamps: Tensor
    zeros: Tensor
    is_late: bool = False
    reads_hidden: bool = False

    @property
    def rows(self) -> PoolRows:
        return self.view.rows

    @property
    def described(self) -> dict[str, Any]:
        """What is watched."""
        return described(self.view)

    @property
    def entry_bytes(self) -> int:
        return self.rows.num_layers * self.rows.words_per_row * WORD_BYTES


def depth_of(name: str) -> tuple[int, ...]:
    """Where a layer stands in its model, by the numbers in its name."""
    return tuple(map(int, NUMBERS.findall(name)))


def described(view: PoolView) -> dict[str, Any]:
    """How many layers, and of which type and shape each part of an entry is."""
    parts = {part.name: f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for part in view.parts}
    return {"pool": view.name, "layers": view.num_layers, "parts": parts}


def all_layers(layers: Layers) -> Tensor:
    """[2] int64: the bitmap in which every one of them differs."""
    count = len(layers.names)
    bits = [signed((1 << min(count, 64)) - 1), (1 << max(count - 64, 0)) - 1]
    return torch.tensor(bits, device=layers.fingerprints.device)


@dataclass(eq=False)
class Group:
    """Layers that share slots: one block table, one record a slot.

    window:     as of kvcanary_kernels.watch.walk.Watched
    null_slots: the first so many are nobody's: what pads tables and slot mappings
    owners:     of its slots, where the engine tells of grants
    """

    number: int
    block_size: int
    window: int
    null_slots: int
    records: Tensor
    layers: list[Layers] = field(default_factory=list)
    owners: Owners | None = None


@dataclass(eq=False, slots=True)
class Step:
    """What the host must know to tell of a step's violations later.

    reread:  requests whose rows were read whole in this step, look by look
    in_place: as in Forward
    taken_back: by request that is computed again from an entry before its last one: the entries it had, and has
    """

    number: int
    requests: Sequence[str]
    numbers: NDArray[np.integer]
    site: tuple[str, int]
    events: list[Any]  # Event, and Fed of inputs.py
    reread: Sequence[tuple[str, ...]]
    count: int = 0
    in_place: bool = False
    is_reported: bool = False
    taken_back: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class ContentNames(Protocol):
    """What bytes were when they were written, by the chain of their prefix.

    connector: what loads them;  store: where names of blocks are kept that other processes wrote, too
    """

    connector: str

    @property
    def store(self) -> str | None: ...

    def fingerprint_of(self, chains: Tensor) -> tuple[Tensor, Tensor]:
        """By chain [n], fingerprint a summed over the first layers of a group [n] int64, and whether it is known."""
        ...

    def chain_of(self, fingerprint: int) -> int | None:
        """The chain under which bytes of such a sum were written."""
        ...

    def of_blocks(self, chains: Sequence[int]) -> dict[int, Named]:
        """By the chain of its last token: sums that a block may have, and who wrote it so first."""
        ...

    def block_chain_of(self, fingerprint: int) -> int | None:
        """The chain under which a block of such a sum was written."""
        ...


class LoadedBlock(NamedTuple):
    """A block of a row that is not what any of its names says.

    entries: their numbers in the load;  chain: of its last token;  found: sum of its fingerprints
    ways: sums that it may have, and who wrote it so first
    """

    entries: list[int]
    chain: int
    found: int
    ways: Named


@dataclass(frozen=True, eq=False)
class Load:
    """What a connector loaded into a row, where some of it is not what its name says; n entries, in the row's order.

    positions, chains, slots: [n] int64;  is_known: [n] bool, it has a name;  wrong: [n] bool
    wanted: [n] int64, fingerprint a summed over the layers; of entries in `blocks` it is not known
    blocks: those that are wrong as a whole
    before, found: [layers, n] int64, fingerprint a of what was recorded there before, and of what was loaded
    """

    names: ContentNames
    request: str
    step: int
    positions: Tensor
    chains: Tensor
    slots: Tensor
    is_known: Tensor
    wrong: Tensor
    wanted: Tensor
    before: Tensor
    found: Tensor
    blocks: Sequence[LoadedBlock] = ()


RowOf = Callable[[int, int], str | None]


@dataclass(eq=False)
class Event:
    """Slots that were read by themselves: after a copy, a load, a zeroing, or before a row goes.

    mismatch: [n, 2] int64 bitmap of layers; slots: [n] int64
    requests: whose blocks they are, by block, where that is known
    load:     for T1 of a load, what is known of it
    by_record: the slots were compared with what is recorded of them; False: with other slots
    site:     what was done when they were read
    row_of:   whose an entry is, by its number among the slots and by its slot, where that is known; what is wrong
              again for the same request is no further incident then
    is_by_position: the slots are those of a row from its first position on
    """

    code: str
    what: str
    layers: Layers
    slots: Tensor
    mismatch: Tensor
    group: Group
    requests: Mapping[int, str]
    load: Load | None = None
    by_record: bool = True
    row_of: RowOf | None = None
    site: str = "move"
    is_by_position: bool = False


@dataclass(eq=False, slots=True)
class Forward:
    """What a forward is about to read and to write; tensors on the device, int32 or int64.

    requests:   their names, in the order of the batch
    numbers:    [rows] on the host, where they stand among all rows of the engine
    ends:       [>= rows] on the host, at least the entries of each row, new ones included; read at once
    num_tokens: that are fed
    tables:     by group, [>= rows, width] block tables of the batch, or of all rows
    lengths:    [>= rows] entries of each row, new ones included
    starts:     [>= rows + 1] where each row's new entries begin
    tokens, positions: [>= num_tokens]
    slots:      by group, [>= num_tokens] where they are stored
    known:      tokens that the engine knows, as in `Fed`
    in_place:   tables have a line for each row of the engine, by number; False: they are in batch order
    """

    requests: Sequence[str]
    numbers: NDArray[np.integer]
    site: tuple[str, int]
    ends: Tensor
    num_tokens: int
    tables: Sequence[Tensor]
    lengths: Tensor
    starts: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Sequence[Tensor]
    known: tuple[Tensor, Tensor] | tuple[()] = ()
    in_place: bool = False
