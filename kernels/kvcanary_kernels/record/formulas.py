"""Formulas on 64-bit integers, each once: for plain integers and int64 arrays, loops (numba) and kernels (Triton).

They are right in the low 64 bits, where integers wrap and where they grow; who calls with plain ones cuts off the rest.
Masks make shifts logical. A formula calls no other: numba and Triton compile it as it stands.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

SPLITMIX_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SPLITMIX_SECOND = 0x94D049BB133111EB - (1 << 64)


def mix_of(token, position, key, first=SPLITMIX_FIRST, second=SPLITMIX_SECOND):
    """The keyed splitmix64 finaliser of (token << 32 | position), a bijection; of both the low 32 bits count."""
    z = ((token << 32) | (position & 0xFFFFFFFF)) + key
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * first
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * second
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def chain_step(before, mixed, multiplier):
    """The chain value of an entry from its predecessor's and the mix of its own token and position."""
    return multiplier * before + mixed


def seal_column(column, low_key, high_key):
    """What one column of a record adds to its seal."""
    return low_key * (column & 0xFFFFFFFF) + high_key * ((column >> 32) & 0xFFFFFFFF)


def poison_of(slot, word, first=SPLITMIX_FIRST, second=SPLITMIX_SECOND):
    """What poison has in the low 32 bits at one word of all of a slot's layers, before some are cut to stay finite."""
    z = ((slot << 32) | word) * first
    return ((z ^ ((z >> 27) & 0x1FFFFFFFFF)) * second) >> 32
