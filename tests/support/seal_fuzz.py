"""Bytes that want to be read as a seal: mutants of a good one under a right digest."""

from __future__ import annotations

import random

from kvcanary import Seal, SealError
from kvcanary.transfers.wire import DIGEST_BYTES, LEAST_BYTES, digest_of


def resealed(data: bytearray) -> bytes:
    """With the digest that these bytes should have: what somebody would send who wants them to be read."""
    data[16:24] = len(data).to_bytes(8, "little")
    return bytes(data[:-DIGEST_BYTES]) + digest_of(bytes(data[:-DIGEST_BYTES]))


def fuzz(data: bytes, count: int) -> tuple[int, int]:
    """How many of so many mutants, whose digests are right, were read and how many refused; others are raised."""
    chance, read, refused = random.Random(1), 0, 0
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            place = chance.choice((chance.randrange(8, 200), chance.randrange(8, len(mutant))))
            kind = chance.randrange(4)
            if kind == 0:
                mutant[place % len(mutant)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            elif kind == 1:
                mutant[place : place + 8] = chance.choice((b"\xff" * 8, b"\0" * 8, chance.randbytes(8)))
            elif kind == 2:
                del mutant[place : place + chance.randint(1, 64)]
            else:
                mutant[place:place] = chance.randbytes(chance.randint(1, 64))
        if len(mutant) < LEAST_BYTES:
            continue
        try:
            Seal.from_bytes(resealed(mutant))
            read += 1
        except SealError:
            refused += 1
    return read, refused
