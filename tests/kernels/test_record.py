"""Keys, the pair hash and the layout of a record."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kvcanary_kernels.record import layout as record

MASK = 2**64 - 1


def unmix(value: int, mix_key: int) -> int:
    """The inverse of the splitmix finaliser, by hand: what proves that it is a bijection."""

    def unshift(z: int, shift: int) -> int:
        result = z
        for _ in range(64 // shift):
            result = z ^ (result >> shift)
        return result

    value = unshift(value, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    value = unshift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return (unshift(value, 30) - mix_key) & MASK


def test_make_keys_gives_odd_distinct_32_bit_keys() -> None:
    """Within a layer and a fingerprint no two words share a key, and every key has an inverse."""
    keys = record.make_keys(5, 3, 500)
    for fingerprint in (keys.fingerprint_a, keys.fingerprint_b):
        for layer in fingerprint.tolist():
            values = {v & 0xFFFFFFFF for v in layer}
            assert len(values) == 500
            assert all(v % 2 for v in values)
    assert len(set(keys.seal_keys)) == 10
    assert keys.multiplier % 8 == 5
    assert keys.multiplier * keys.inverse % 2**64 == 1


def test_make_keys_depends_on_the_seed_alone() -> None:
    """The same seed gives the same keys; pools of different sizes share seal, mix, chain and root."""
    one, again, other = record.make_keys(1, 2, 8), record.make_keys(1, 2, 8), record.make_keys(2, 2, 8)
    wide = record.make_keys(1, 4, 16)
    assert torch.equal(one.fingerprint_a, again.fingerprint_a)
    assert torch.equal(one.constants, again.constants)
    assert not torch.equal(one.fingerprint_a, other.fingerprint_a)
    shared = ("seal_start", "seal_keys", "mix_key", "multiplier", "root_key", "seed_id")
    assert all(getattr(one, name) == getattr(wide, name) for name in shared)
    assert one.seed_id == record.seed_id(1) != other.seed_id


@pytest.mark.parametrize("words", [1, 2, 24, 128, 1023, 1024, 1025, 2048, 2049, 30_000, 2**20])
def test_key_pieces_keep_float64_sums_exact(words: int) -> None:
    """The largest sum of words times one piece stays below 2^53, and the pieces cover 32 bits."""
    bits = record._piece_bits(words)
    assert words * (2**32 - 1) * (2**bits - 1) < 2**53
    if words < 2**15:  # making a million keys takes seconds
        keys = record.make_keys(1, 1, words)
        assert keys.piece_bits == bits
        pieces = keys.pieces[0].to(torch.int64).unflatten(1, (2, -1))
        shifts = torch.arange(pieces.shape[2]) * bits
        fingerprints = torch.stack((keys.fingerprint_a[0], keys.fingerprint_b[0])).to(torch.int64) & 0xFFFFFFFF
        assert torch.equal((pieces << shifts).sum(2).T, fingerprints)


@pytest.mark.parametrize(("layers", "words", "text"), [(0, 8, "num_layers"), (129, 8, "num_layers"), (1, 0, "words")])
def test_make_keys_refuses_what_the_layout_cannot_hold(layers: int, words: int, text: str) -> None:
    """The bitmap has 128 layers; a row has words."""
    with pytest.raises(ValueError, match=text):
        record.make_keys(1, layers, words)


def test_mix_is_a_bijection_and_equals_its_host_twin() -> None:
    """Every value of a sample, extremes included, can be taken back to its token and position."""
    keys = record.make_keys(3, 1, 4)
    tokens = [0, 1, 2**31, 2**32 - 1, 77, *range(100, 400)]
    positions = [0, 2**32 - 1, 2**31, 0, 5, *range(300)]
    values = record.mix(torch.tensor(tokens), torch.tensor(positions), keys).tolist()
    assert [v & MASK for v in values] == [record.mix_host(t, p, keys) for t, p in zip(tokens, positions, strict=True)]
    assert [unmix(v & MASK, keys.mix_key) for v in values] == [
        t << 32 | p for t, p in zip(tokens, positions, strict=True)
    ]


def test_chain_root_separates_role_and_salt() -> None:
    """No two (role, salt) pairs share a root, whatever their concatenation."""
    keys = record.make_keys(3, 1, 4)
    names = [("target", ""), ("draft", ""), ("target", "x"), ("targetx", ""), ("", "targetx")]
    assert len({record.chain_root(keys, *name) for name in names}) == len(names)
    assert record.chain_root(keys, "target") != record.chain_root(record.make_keys(4, 1, 4), "target")


def test_read_record_names_every_field() -> None:
    """Fields come out unsigned, from the word order token, position, chain, request, generation, step, site."""
    words = torch.arange(16, dtype=torch.int32) - 8
    records = torch.stack((torch.zeros(16, dtype=torch.int32), words)).view(torch.int64)
    found = record.read_record(records, 1)
    u = [(i - 8) & 0xFFFFFFFF for i in range(16)]
    assert (found.token, found.position, found.chain) == (u[0], u[1], u[3] << 32 | u[2])
    assert (found.request, found.generation, found.step, found.site) == (u[4], u[5], u[6], u[7])
    assert (found.content_b, found.seal) == (u[9] << 32 | u[8], u[15] << 32 | u[14])
    assert found.layers == u[10] | u[11] << 32 | u[12] << 64 | u[13] << 96


@pytest.mark.parametrize("layers", [1, 63, 64, 65, 128])
def test_layers_bitmap_has_a_bit_a_layer(layers: int) -> None:
    """Both columns together hold exactly `layers` ones, lowest first."""
    low, high = (v & MASK for v in record.layers_bitmap(layers).tolist())
    assert low | high << 64 == 2**layers - 1


def test_code_bits_are_distinct_and_fit_a_signed_word() -> None:
    """R1 to R13 are bits 0 to 12, W1 to W9 bits 32 to 40, P1 is bit 48, N1 49."""
    expected = {f"R{n}": 2 ** (n - 1) for n in range(1, 14)} | {f"W{n}": 2 ** (n + 31) for n in range(1, 10)}
    expected |= {"P1": 2**48, "N1": 2**49}
    assert expected == record.CODE_BITS


def test_page_states_and_owners_are_distinct() -> None:
    """What may be read lies above what may not, and no uid is an owner's special value."""
    refused = record.FREE, record.QUARANTINED, record.NEVER_WRITTEN, record.LOADING, record.LOAD_FAILED
    readable = record.RESERVED, record.WRITTEN, record.COMMITTED, record.SHARED
    assert (*refused, *readable) == tuple(range(9))
    assert len({record.NO_OWNER, record.SHARED_OWNER}) == 2
    assert max(record.NO_OWNER, record.SHARED_OWNER) < 0


def test_keys_are_words_of_splitmix_streams() -> None:
    """Each purpose has its stream, begun by the seed and the purpose's name."""

    def finalised(z: int) -> int:
        z %= 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    def stream(purpose: str, count: int) -> list[int]:
        state = finalised(41) ^ int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
        return [finalised(state + n * 0x9E3779B97F4A7C15) for n in range(1, count + 1)]

    keys = record.make_keys(41, 2, 3)
    for name, fingerprint in (("a", keys.fingerprint_a), ("b", keys.fingerprint_b)):
        for layer in range(2):
            assert [key % 2**32 for key in fingerprint[layer].tolist()] == [
                w >> 32 | 1 for w in stream(f"lane {name} {layer}", 3)
            ]
    assert list(keys.seal_keys) == [word >> 32 | 1 for word in stream("seal", 10)]
    assert [start % 2**64 for start in keys.start_a.tolist()] == [
        stream(f"start a {layer}", 1)[0] for layer in range(2)
    ]
    assert keys.start_b == sum(stream(f"start b {layer}", 1)[0] for layer in range(2)) % 2**64
    drawn = {name: stream(name, 1)[0] for name in ("seal start", "mix", "chain", "root")}
    assert (keys.seal_start, keys.mix_key, keys.root_key) == (drawn["seal start"], drawn["mix"], drawn["root"])
    assert keys.multiplier == drawn["chain"] // 8 * 8 + 5
    assert keys.multiplier * keys.inverse % 2**64 == 1
