"""What a gated delta net's layers are given: their shape and weights, and between which states their tokens go."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaShape(NamedTuple):
    """Heads of queries and keys, heads of values, a multiple of them; numbers of one; tokens that the convolution sees.

    A state is [width - 1, channels], the oldest input first, then [v_heads, k_dim, v_dim], all flat.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.k_heads * self.k_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of what a token reads, of all heads."""
        return self.v_heads * self.v_dim

    @property
    def matrix(self) -> tuple[int, int, int]:
        """Shape of what a state has behind its window."""
        return self.v_heads, self.k_dim, self.v_dim

    @property
    def window(self) -> int:
        """Numbers of the last inputs."""
        return (self.width - 1) * self.channels

    @property
    def size(self) -> int:
        """Numbers of a state."""
        return self.window + self.k_dim * self.values


class DeltaWeights(NamedTuple):
    """conv: [channels, width];  decay, shift: [v_heads], of the logarithm of a token's decay;  norm: [v_dim]"""

    conv: Tensor
    decay: Tensor
    shift: Tensor
    norm: Tensor


class Span(NamedTuple):
    """Which tokens a forward's rows have, and between which entries of the states each goes.

    starts:  [rows + 1] int64: tokens [starts[r], starts[r + 1]) are row r's, each behind its parent
    parents: [n] int64, the token of the forward that it follows; -1: the row's state
    sources: [rows] int64, entries of the rows' states;  targets: [n] int64, where the state after a token goes; -1:
             nowhere. An entry that a row reads is written by this row alone, and a token that another one than the next
             follows leaves its state somewhere, but in rows of padding, which read anything
    """

    starts: Tensor
    parents: Tensor
    sources: Tensor
    targets: Tensor
