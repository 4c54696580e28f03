"""State views: where the recurrent states of a model lie, one entry a request, tree node or block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

import torch
from torch import Tensor

from kvcanary.errors import PlanError
from kvcanary.pools.views import PoolView
from kvcanary_kernels.record.rows import WORD_BYTES, PoolRows, pool_rows

NO_STATE = -1  # in the place of an entry: a row begins from nothing, or its state goes nowhere
SLICES = 64  # into which an entry is cut, of which the rolling check compares one a step

Parts = Mapping[str, Sequence[Tensor]] | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class StateView:
    """The states that a model's recurrent layers keep: convolution windows, SSM or delta-net matrices.

    parts:        by name ("conv", "ssm"), one tensor a layer, [num_entries, ...] of any dense shape, elements of 1, 2,
                  4 or 8 bytes, an entry's bytes whole 32-bit words. A sequence alone is one part, "state".
                  Entry i of all tensors is one state: of a request, of a tree node, or of a block
    null_entries: entries [0, null_entries) are where padding may write; 0 where there are none

    whole, slices, num_slices: derived: an entry as one row, and cut into `num_slices` rows (at most 64)
    PlanError where any of this does not fit together.
    """

    name: str
    parts: Parts
    null_entries: int = 1
    whole: PoolView = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = self.parts if isinstance(self.parts, Mapping) else {"state": self.parts}
        try:
            own = {name: [_row(name, tensor) for tensor in tensors] for name, tensors in parts.items()}
            if not own or not all(own.values()):
                raise PlanError("parts must have one tensor a layer, got none: name what the layers keep")
            (first, rows), *others = own.items()
            num_entries = len(rows[0])
            if not 0 <= self.null_entries < num_entries:
                raise PlanError(
                    f"null_entries must be from 0 to {num_entries - 1}, got {self.null_entries}: padding has some of "
                    "the entries, requests the others"
                )
            whole = PoolView(self.name, rows, None, 1, null_slots=max(self.null_entries, 1), extras=dict(others))
            object.__setattr__(whole.parts[0], "name", first)
        except PlanError as error:
            raise PlanError(f"states {self.name!r}: {error}") from error.__cause__
        object.__setattr__(self, "whole", whole)

    @property
    def num_entries(self) -> int:
        return self.whole.num_slots

    @property
    def num_layers(self) -> int:
        return self.whole.num_layers

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @cached_property
    def entry_bytes(self) -> int:
        """Of all parts and layers."""
        return self.whole.slot_bytes

    @cached_property
    def num_slices(self) -> int:
        """The most, up to 64, into which every part can be cut evenly."""
        return gcd(SLICES, *(piece.words for piece in self.whole.rows.pieces))

    @cached_property
    def slices(self) -> PoolRows:
        """Row `entry * num_slices + n` is slice n of the entry."""
        cut = [
            [tensor.view(torch.int32).unflatten(2, (self.num_slices, -1)).transpose(1, 2) for tensor in part.tensors]
            for part in self.whole.parts
        ]
        return pool_rows(cut[0], (), layout="NHD", page_size=self.num_slices, extras=cut[1:])


def _row(name: str, tensor: Tensor) -> Tensor:
    """[num_entries, 1, elements], a view: what lies in an entry, in the order of memory."""
    if not isinstance(tensor, Tensor) or not tensor.dim():
        raise PlanError(f"part {name!r} must be tensors [num_entries, ...], got {type(tensor).__name__}")
    inner = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
    try:
        row = tensor.detach().permute(0, *inner).view(len(tensor), 1, -1)
        is_dense = row.shape[2] == 1 or row.stride(2) == 1
    except RuntimeError:
        is_dense = False
    if not is_dense:
        shape = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        raise PlanError(f"an entry of part {name!r} must be dense, got {shape}: give the memory that it is cut from")
    if row.shape[2] * row.element_size() % WORD_BYTES:
        raise PlanError(
            f"an entry of part {name!r} must be whole 32-bit words, got {row.shape[2]} elements of "
            f"{row.element_size()} B: give a wider one"
        )
    return row
