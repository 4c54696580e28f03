"""Where in an engine step something happened: the substep kind and index, as the record's site word holds them."""

from __future__ import annotations

from functools import lru_cache

SUBSTEP_KINDS = ("prefill", "decode", "draft", "verify", "extend")
#: Kinds that read or write the nodes of a draft tree.
TREE_KINDS = ("draft", "verify", "extend")
#: Number of each kind in a record; 0 is a slot that nobody has written.
KIND_NUMBERS = {
    name: number
    for number, name in enumerate(
        ("never", *SUBSTEP_KINDS, "move", "sweep", "release", "commit", "grant", "load", "stream")
    )
}
_KIND_NAMES = {number: name for name, number in KIND_NUMBERS.items()}


@lru_cache
def pack_site(kind: str, index: int, node: int = 0) -> int:
    """kind (8 bits) | index (8 bits) | branch or node (16 bits)."""
    return KIND_NUMBERS[kind] | (index & 0xFF) << 8 | (node & 0xFFFF) << 16


def unpack_site(word: int) -> tuple[str, int, int]:
    """(kind, index, branch or node); a kind that nobody packed is `unknown`."""
    return _KIND_NAMES.get(word & 0xFF, "unknown"), word >> 8 & 0xFF, word >> 16 & 0xFFFF


def site_name(kind: str, index: int) -> str:
    """`draft[2]` for kinds that repeat in a step, else the kind."""
    return f"{kind}[{index}]" if kind == "draft" else kind
