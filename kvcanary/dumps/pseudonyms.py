"""Pseudonyms: token ids under a secret bijection, and chains computed again for them."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcanary_kernels.record.formulas import mix_of
from kvcanary_kernels.record.layout import CHAIN, MASK_32, STEP_SITE, TOKEN_POSITION, Keys, continue_chain, signed

Words = NDArray[np.uint64]
MOST_TOKENS = 1 << 31


class TokenPseudonyms:
    """Every token id that was seen, and what stands for it; ids keep to their side of each vocabulary's size."""

    def __init__(self, tokens: Iterable[int], sizes: Iterable[int], is_plain: bool = False) -> None:
        """`sizes`: of the pools' vocabularies. `is_plain`: every id stands for itself."""
        seen, draw, low = sorted(set(tokens)), random.SystemRandom(), 0
        self._codes = {token: token for token in seen}
        for high in () if is_plain else sorted({*sizes, MOST_TOKENS}):
            own = [token for token in seen if low <= token < high]
            self._codes.update(zip(own, draw.sample(range(low, high), len(own)), strict=True))
            low = high

    def of(self, tokens: Any) -> NDArray[np.int64]:
        """[n] int64: what stands for these ids."""
        return np.array([self._codes[int(token)] for token in tokens], np.int64)

    def of_words(self, words: Words) -> Words:
        """The same for column `TOKEN_POSITION` of records; what nobody has fed stands for 0."""
        tokens = words & np.uint64(MASK_32)
        distinct, where = np.unique(tokens, return_inverse=True)
        signed_ids = distinct.astype(np.uint32).view(np.int32).tolist()
        codes = np.array([self._codes.get(token, 0) & MASK_32 for token in signed_ids], np.uint64)
        return words & np.uint64(MASK_32 << 32) | codes[where].reshape(words.shape)


class Chains:
    """Chain values under other keys and codes: equal values stay equal, and continue each other as they did."""

    def __init__(self, old: Keys, new: Keys, pseudonyms: TokenPseudonyms) -> None:
        self._old, self._new, self._pseudonyms = old, new, pseudonyms
        self._known: dict[int, int] = {}
        self._secret = secrets.token_bytes(16)

    def learn_root(self, old: int, new: int) -> None:
        self._known[old] = new

    def learn(self, root: int, tokens: Sequence[int]) -> None:
        """The chains of a request's own tokens, behind a root that is known."""
        from kvcanary.native.loops import chain_tokens

        if not len(tokens):
            return
        both = []
        for keys, start, ids in (
            (self._old, root, np.array(tokens, np.int64)),
            (self._new, self._known[root], self._pseudonyms.of(tokens)),
        ):
            out = np.empty(len(ids), np.int64)
            chain_tokens(ids, 0, signed(start), signed(keys.multiplier), signed(keys.mix_key), out)
            both.append(out.view(np.uint64).tolist())
        self._known.update(zip(*both, strict=True))

    def of_records(self, records: Words) -> Words:
        """[n, 4] uint64: token and position, chain, request and generation, step and site, as they leave."""
        out = records.copy()
        out[:, TOKEN_POSITION] = self._pseudonyms.of_words(records[:, TOKEN_POSITION])
        out[:, CHAIN] = 0
        written = np.flatnonzero(records[:, STEP_SITE] >> np.uint64(32))
        order = written[np.argsort(records[written, TOKEN_POSITION] >> np.uint64(32), kind="stable")]
        mixed = [_mixed(rows[order, TOKEN_POSITION], keys) for rows, keys in ((records, self._old), (out, self._new))]
        chains = records[order, CHAIN]
        with np.errstate(over="ignore"):
            before = (chains - mixed[0]) * np.uint64(self._old.inverse)
        known, new = self._known, []
        for chain, parent, own in zip(chains.tolist(), before.tolist(), mixed[1].tolist(), strict=True):
            value = known.get(chain)
            if value is None:
                value = known[chain] = continue_chain(self._stand_in(parent), own, self._new)
            new.append(value)
        out[order, CHAIN] = np.array(new, np.uint64)
        return out

    def _stand_in(self, chain: int) -> int:
        """What stands for a value; one of which nobody knows what it continues gets a secret one."""
        value = self._known.get(chain)
        if value is None:
            name = hashlib.blake2b(chain.to_bytes(8, "little"), key=self._secret, digest_size=8)
            value = self._known[chain] = int.from_bytes(name.digest(), "little")
        return value


def _mixed(words: Words, keys: Keys) -> Words:
    own = words.view(np.int64)
    return mix_of(own, own >> 32, signed(keys.mix_key)).view(np.uint64)
