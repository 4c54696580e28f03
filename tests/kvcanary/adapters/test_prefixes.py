"""Chains of prefixes on the host: those of plain integers, whatever their length."""

from __future__ import annotations

import pytest

from kvcanary.adapters.observed import prefix_hashes as prefixes
from kvcanary.adapters.observed.prefix_hashes import Prefixes
from kvcanary_kernels.record.layout import Identity, chain_host, chain_root, make_keys, signed

KEYS = make_keys(5, 1, 1)


@pytest.mark.parametrize("count", [1, 2, 17, 4095, 4096, 9000])
@pytest.mark.parametrize("salt", [Identity(), Identity("", "lora", "3", "w")])
def test_the_end_and_every_chain_are_those_of_plain_integers(count: int, salt: Identity) -> None:
    """Below, at and behind the size of the table of powers; a salt gives other chains."""
    held, tokens = Prefixes(KEYS), [(31 * n) % 32000 for n in range(count)]
    wanted = [signed(value) for value in chain_host(tokens, 0, chain_root(KEYS, "paged", *salt), KEYS)]
    assert held.end(tokens, salt) == wanted[-1]
    assert held.end(tokens[: count // 2], salt) == (wanted[count // 2 - 1] if count > 1 else held.root(salt))
    assert held.every(tokens, salt).tolist() == wanted
    begun = held.every(tokens[: count // 2], salt)
    assert len(begun) == count // 2
    assert held.every(tokens[count // 2 :], salt, begun).tolist() == wanted


def test_what_is_kept_is_told_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens under two salts, and one prefix of another, have chains of their own; the oldest is forgotten."""
    monkeypatch.setattr(prefixes, "KEPT", 3)
    held = Prefixes(KEYS)
    ends = [held.end(*what) for what in (([1, 2], ""), ([1, 2], "a"), ([1, 2, 0], ""), ([1], ""))]
    assert len(set(ends)) == 4
    assert [salt for salt, _ in held._kept] == ["a", "", ""]
    assert held.end([1, 2]) == ends[0]
