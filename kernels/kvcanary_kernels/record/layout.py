"""The 64-byte record of a slot and the keys of every hash: the layout, once, for host and device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvcanary_kernels.record.formulas import SPLITMIX_FIRST, SPLITMIX_SECOND, chain_step, mix_of, seal_column

RECORD_VERSION = 1

# A record is 8 int64 columns, which are 16 little-endian 32-bit words. The first four columns are the identity.
COLUMNS = 8
TOKEN_POSITION = 0  # token | position << 32
CHAIN = 1
REQUEST_GENERATION = 2  # request | generation << 32
STEP_SITE = 3  # step | site << 32
CONTENT_B = 4
LAYERS_LOW = 5  # bit l: layer l was written, layers 0 to 63
LAYERS_HIGH = 6  # layers 64 to 127
SEAL = 7
IDENTITY_WORDS = 8
MAX_LAYERS = 128

# Keys.constants: the scalars that kernels read on the device.
SEAL_START = 0
SEAL_KEYS = 1  # 8 identity words, then the slot number, then the pool id
SEAL_SLOT_KEY = SEAL_KEYS + IDENTITY_WORDS
SEAL_POOL_KEY = SEAL_SLOT_KEY + 1
MIX_KEY = SEAL_POOL_KEY + 1
MULTIPLIER = MIX_KEY + 1
START_B = MULTIPLIER + 1
NUM_CONSTANTS = START_B + 1

# One bit a check in a 64-bit code word: R<n> is bit n - 1, W<n> is bit 31 + n, P1 is bit 48, N1 is bit 49.
CODE_BITS = {f"R{n}": 1 << n - 1 for n in range(1, 14)} | {f"W{n}": 1 << 31 + n for n in range(1, 10)}
CODE_BITS |= {"P1": 1 << 48, "N1": 1 << 49}

# Bits of what is wrong with what an entry stored: W4 and N1.
STORED_TWICE = 1
STORED_NOT_FINITE = 2

# States of a page in the device's truth. Reading the first two and any other word is R7, the next three R12.
FREE = 0
QUARANTINED = 1
NEVER_WRITTEN = 2  # granted, but nothing was ever stored in it
LOADING = 3
LOAD_FAILED = 4
RESERVED = 5  # granted for writing, slots may hold records
WRITTEN = 6
COMMITTED = 7
SHARED = 8

# Owners of a page: the uid of the request whose private page it is, or one of these.
NO_OWNER = -1
SHARED_OWNER = -2

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1
SPLITMIX_STEP = 0x9E3779B97F4A7C15

POWER_BITS = 12  # powers of the multiplier: one table for the low 12 bits of the exponent, one for the next 12
POWERS = 1 << POWER_BITS
MAX_WORDS_PER_ROW = 1 << 20  # float64 sums of 32-bit words times one key bit are exact up to it


class Identity(NamedTuple):
    """What beside its tokens makes K and V of a row what they are: rows share bytes where all of it is equal.

    adapter_version, weights: names of what was loaded, of the adapter and of the model; empty: nobody says
    """

    salt: str = ""
    adapter: str = ""
    adapter_version: str = ""
    weights: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Keys:
    """All keys of one pool, from one secret seed. Seal, mix and chain keys are the same for every pool of a seed.

    fingerprint_a, fingerprint_b: [layers, words_per_row] int32, the keys' bits: 32-bit, odd, distinct within layer and
                                  fingerprint
    start_a:        [layers] int64, starting constant of fingerprint a in each layer
    start_b:        starting constant of fingerprint b, the sum over the layers
    pieces:         [layers, words_per_row, 2 * pieces] float64, fingerprint a's then fingerprint b's keys cut into
                    pieces of piece_bits bits, lowest first (fingerprint_torch)
    constants:      [NUM_CONSTANTS] int64, the scalars above as kernels read them
    powers:         [2, 2, POWERS] int64, multiplier and inverse to the powers i and i << POWER_BITS
    The plain integers are unsigned 64-bit values.
    """

    seed_id: str
    num_layers: int
    words_per_row: int
    fingerprint_a: Tensor
    fingerprint_b: Tensor
    start_a: Tensor
    start_b: int
    pieces: Tensor
    piece_bits: int
    constants: Tensor
    powers: Tensor
    seal_start: int
    seal_keys: tuple[int, ...]
    mix_key: int
    multiplier: int
    inverse: int
    root_key: int

    def __repr__(self) -> str:
        """Without the keys: they are secret, and a repr ends up in logs."""
        return f"Keys(seed_id={self.seed_id!r}, num_layers={self.num_layers}, words_per_row={self.words_per_row})"


@dataclass(frozen=True)
class Share:
    """What a pool holds of the rows of the whole model: some layers, and some heads of each.

    layers:     by layer of the pool, its number in the model
    words:      by part of a row, the numbers of its words in the whole row
    first_head, end_head, whole_heads: its heads, [first_head, end_head) of so many
    """

    layers: tuple[int, ...]
    words: tuple[range, ...]
    first_head: int
    end_head: int
    whole_heads: int


def make_keys(
    seed: int, num_layers: int, words_per_row: int, device: torch.device | str = "cpu", share: Share | None = None
) -> Keys:
    """Derive every key from `seed`. `words_per_row`: 32-bit words of one layer's K row plus its V row.

    A word has the key of its layer and place in the whole model, and the starts of shares that make up a row add up to
    that of the row: so do their fingerprints, mod 2^64. share: None: the pool has all heads, of layers 0, 1, ...
    """
    if not 0 < num_layers <= MAX_LAYERS:
        raise ValueError(f"num_layers must be 1 to {MAX_LAYERS}, got {num_layers}")
    if not 0 < words_per_row <= MAX_WORDS_PER_ROW:
        raise ValueError(f"words_per_row must be 1 to {MAX_WORDS_PER_ROW}, got {words_per_row}")
    share = share or Share(tuple(range(num_layers)), (range(words_per_row),), 0, 1, 1)
    if len(share.layers) != num_layers or sum(map(len, share.words)) != words_per_row:
        raise ValueError(
            f"a share must be of {num_layers} layers and {words_per_row} words, got {len(share.layers)} and "
            f"{sum(map(len, share.words))}"
        )
    fingerprints = [[_word_keys(seed, f"lane {side} {i}", share.words) for i in share.layers] for side in "ab"]
    starts = [[_start(seed, f"start {side} {i}", share) for i in share.layers] for side in "ab"]
    seal_keys = _odd_keys(seed, "seal", IDENTITY_WORDS + 2)
    seal_start, mix_key = next(_draws(seed, "seal start")), next(_draws(seed, "mix"))
    multiplier = next(_draws(seed, "chain")) & ~7 | 5  # 5 mod 8: full period, and odd, so that it has an inverse
    inverse = pow(multiplier, -1, 1 << 64)
    fingerprint_a, fingerprint_b = torch.tensor(fingerprints, dtype=torch.int64)
    piece_bits = _piece_bits(words_per_row)
    start_b = sum(starts[1]) & MASK_64
    constants = [signed(c) for c in (seal_start, *seal_keys, mix_key, multiplier, start_b)]
    return Keys(
        seed_id=seed_id(seed),
        num_layers=num_layers,
        words_per_row=words_per_row,
        fingerprint_a=fingerprint_a.to(torch.int32).to(device),
        fingerprint_b=fingerprint_b.to(torch.int32).to(device),
        start_a=torch.tensor([signed(c) for c in starts[0]]).to(device),
        start_b=start_b,
        pieces=torch.cat([_cut(fingerprint, piece_bits) for fingerprint in (fingerprint_a, fingerprint_b)], dim=2).to(
            device
        ),
        piece_bits=piece_bits,
        constants=torch.tensor(constants).to(device),
        powers=torch.stack([_powers(multiplier), _powers(inverse)]).to(device),
        seal_start=seal_start,
        seal_keys=tuple(seal_keys),
        mix_key=mix_key,
        multiplier=multiplier,
        inverse=inverse,
        root_key=next(_draws(seed, "root")),
    )


def seed_id(seed: int) -> str:
    """A public name of the seed: two sides compare it without showing the seed."""
    return hashlib.sha256(f"kvcanary seed {seed & MASK_64} record {RECORD_VERSION}".encode()).hexdigest()[:16]


def mix(tokens: Tensor, positions: Tensor, keys: Keys) -> Tensor:
    """[n] int64: the keyed splitmix finaliser of (token << 32 | position), a bijection. Both inputs [n] int64."""
    return _finalised((tokens << 32).bitwise_or_(positions & MASK_32).add_(signed(keys.mix_key)))


def _finalised(z: Tensor) -> Tensor:
    """The splitmix64 finaliser of int64, in place."""
    z ^= (z >> 30).bitwise_and_(MASK_64 >> 30)  # the mask makes the shift logical
    z *= SPLITMIX_FIRST
    z ^= (z >> 27).bitwise_and_(MASK_64 >> 27)
    z *= SPLITMIX_SECOND
    z ^= (z >> 31).bitwise_and_(MASK_64 >> 31)
    return z


def mix_host(token: int, position: int, keys: Keys) -> int:
    """`mix` of one pair in plain integers, unsigned."""
    return mix_of(token, position, keys.mix_key) & MASK_64


def chain_root(
    keys: Keys, role: str, salt: str = "", adapter: str = "", adapter_version: str = "", weights: str = ""
) -> int:
    """The chain value before the first token, unsigned: a keyed hash of a role and the fields of an `Identity`.

    Fields are hashed apart: no salt is ever the name of an adapter.
    """
    key, name = keys.root_key.to_bytes(8, "little"), repr((role, salt, adapter, adapter_version, weights)).encode()
    return int.from_bytes(hashlib.blake2b(name, key=key, digest_size=8).digest(), "little")


def chain_host(tokens: list[int], first_position: int, value: int, keys: Keys) -> list[int]:
    """The chain values of consecutive tokens in plain integers, unsigned; `value` is the predecessor's."""
    pairs = enumerate(tokens, first_position)
    return chain_of([mix_host(token, position, keys) for position, token in pairs], value, keys)


def chain_of(mixed: Iterable[int], value: int, keys: Keys) -> list[int]:
    """The chain values of consecutive entries from the `mix` of each; `value` is the predecessor's."""
    return list(accumulate(mixed, lambda chain, own: continue_chain(chain, own, keys), initial=value))[1:]


def continue_chain(value: int, mixed: int, keys: Keys) -> int:
    """The chain value of an entry from its predecessor's and the `mix` of its own token, unsigned."""
    return chain_step(value, mixed, keys.multiplier) & MASK_64


def signed(value: int) -> int:
    """The two's complement reading of an unsigned 64-bit value, as int64 tensors hold it."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """The unsigned 64-bit reading of an int64 tensor's element."""
    return value & MASK_64


@dataclass(frozen=True)
class Record:
    """One record in plain unsigned integers, as reports print it."""

    token: int
    position: int
    chain: int
    request: int
    generation: int
    step: int
    site: int
    content_b: int
    layers: int
    seal: int


def read_record(records: Tensor, slot: int) -> Record:
    """Read the record of one slot; `records`: [num_slots, 8] int64."""
    row = [unsigned(value) for value in records[slot].tolist()]
    token, position = row[TOKEN_POSITION] & MASK_32, row[TOKEN_POSITION] >> 32
    request, generation = row[REQUEST_GENERATION] & MASK_32, row[REQUEST_GENERATION] >> 32
    step, site = row[STEP_SITE] & MASK_32, row[STEP_SITE] >> 32
    layers = row[LAYERS_LOW] | row[LAYERS_HIGH] << 64
    return Record(token, position, row[CHAIN], request, generation, step, site, row[CONTENT_B], layers, row[SEAL])


def seal_host(record: Record, slot: int, pool_id: int, keys: Keys) -> int:
    """The seal that this identity should carry, unsigned."""
    pairs = (record.token, record.position), (record.request, record.generation), (record.step, record.site)
    token_position, request_generation, step_site = (low | high << 32 for low, high in pairs)
    columns, own = (token_position, record.chain, request_generation, step_site, slot | pool_id << 32), keys.seal_keys
    sums = (seal_column(column, own[2 * i], own[2 * i + 1]) for i, column in enumerate(columns))
    return (keys.seal_start + sum(sums)) & MASK_64


def layers_bitmap(num_layers: int, device: torch.device | str = "cpu") -> Tensor:
    """[2] int64: the bitmap of a slot whose every layer was written."""
    low, high = bitmap_columns((1 << num_layers) - 1)
    return torch.tensor([signed(low), signed(high)], device=device)


def bitmap_columns(layers: int) -> tuple[int, int]:
    """The two columns of a record that say which layers were written, unsigned."""
    return layers & MASK_64, layers >> 64


def _finalise(z: int) -> int:
    return mix_of(z >> 32, z, 0) & MASK_64


def _first_state(seed: int, purpose: str) -> int:
    return _finalise(seed) ^ int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")


def _draws(seed: int, purpose: str) -> Iterator[int]:
    """The splitmix64 stream of one purpose."""
    state = _first_state(seed, purpose)
    while True:
        state = (state + SPLITMIX_STEP) & MASK_64
        yield _finalise(state)


def _start(seed: int, purpose: str, share: Share) -> int:
    """What all heads begin with is drawn by the purpose, what those below one of them do by its number as well."""

    def below(head: int) -> int:
        if head in (0, share.whole_heads):
            return next(_draws(seed, purpose)) if head else 0
        return next(_draws(seed, f"{purpose} below head {head}"))

    return (below(share.end_head) - below(share.first_head)) & MASK_64


def _word_keys(seed: int, purpose: str, words: tuple[range, ...]) -> list[int]:
    """The keys of these words among those of the whole row."""
    keys = _odd_keys(seed, purpose, 1 + max(part[-1] for part in words if part))
    return [key for part in words for key in keys[part.start : part.stop]]


def _odd_keys(seed: int, purpose: str, count: int) -> list[int]:
    """`count` distinct odd 32-bit keys, the first of them whatever the count."""
    state, drawn, keys = _first_state(seed, purpose), count, list[int]()
    while len(keys) < count:
        z = torch.arange(1, drawn + 1).mul_(signed(SPLITMIX_STEP)).add_(signed(state))
        keys = list(dict.fromkeys((_finalised(z) >> 32 & MASK_32 | 1).tolist()))
        drawn *= 2
    return keys[:count]


def _piece_bits(words_per_row: int) -> int:
    """How many key bits a float64 sum of words * pieces takes exactly: below 2^53 in all, and pieces of equal size."""
    most = 53 - 32 - (words_per_row - 1).bit_length()
    return -(-32 // -(-32 // most))


def _cut(keys: Tensor, bits: int) -> Tensor:
    """[layers, words, pieces] float64 of [layers, words] int64 keys."""
    pieces = [keys >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)]
    return torch.stack(pieces, dim=2).double()


def _powers(base: int) -> Tensor:
    """[2, POWERS] int64: base^i, and base^(i << POWER_BITS), for i in [0, POWERS), mod 2^64."""
    factors = torch.tensor([[signed(base)], [signed(pow(base, POWERS, 1 << 64))]]).repeat(1, POWERS)
    factors[:, 0] = 1
    return factors.cumprod(1)
