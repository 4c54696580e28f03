"""What a store of names has to do.

A name is 16 bytes: the chain of a block's last token, and the sum of fingerprints of its entries. Kernels need not
compute the same prefix bit for bit each time, so a chain may have a few fingerprints, each with who wrote it first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

#: Fingerprints that a chain may have. One with more says nothing about what comes back.
MOST_WAYS = 4
#: Of one chain: by fingerprint, who wrote it first.
Named = Mapping[int, str]


class NameStore(Protocol):
    """Names by space: only names of one model, seed, layout and block size can be compared.

    Numbers are int64. Whatever goes wrong is the error of the library below, and its user's to hold back.
    """

    label: str  #: where it is, without passwords

    def put(self, space: str, by: str, names: Sequence[tuple[int, int]]) -> None:
        """Add (chain, fingerprint) of blocks that `by` wrote."""
        ...

    def get(self, space: str, chains: Sequence[int]) -> dict[int, Named]:
        """Of each chain that is known."""
        ...

    def chain_of(self, space: str, fingerprint: int) -> int | None:
        """A chain under which such bytes were written."""
        ...

    def spaces(self) -> list[str]:
        """Of which it has names."""
        ...

    def close(self) -> None:
        """Let go of file or connection."""
        ...
