"""Chain values: scans and trees agree with the recursion in plain integers."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.record.chain import chain_scan, chain_scan_torch, chain_tree, chain_tree_torch
from kvcanary_kernels.record.layout import Keys, chain_host, make_keys

MASK = 2**64 - 1
POISON = -77
scans = pytest.mark.parametrize("operation", [chain_scan, chain_scan_torch], ids=["triton", "torch"])
trees = pytest.mark.parametrize("operation", [chain_tree, chain_tree_torch], ids=["triton", "torch"])


def mixed(token: int, position: int, keys: Keys) -> int:
    z = ((token << 32 | position) + keys.mix_key) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def sequence(n: int) -> tuple[list[int], list[int]]:
    return [(i * 2654435761 + 7) % 2**32 for i in range(n)], [(i * 3) % 2**32 for i in range(n)]


def scan_oracle(tokens: list[int], positions: list[int], indptr: list[int], seeds: list[int], keys: Keys) -> list[int]:
    out = []
    for begin, end, value in zip(indptr, indptr[1:], seeds, strict=False):
        for i in range(begin, end):
            value = (keys.multiplier * value + mixed(tokens[i], positions[i], keys)) & MASK
            out.append(value)
    return out


@scans
@pytest.mark.parametrize(
    "lengths",
    [[], [0], [1], [0, 0, 3, 0], [1, 1, 1], [5, 0, 130, 2], [127, 128, 129], [600], [1024], [1500, 0, 3], [129, 1500]],
    ids=str,
)
def test_chain_scan_equals_the_recursion(operation, lengths: list[int], device: str, tensor) -> None:
    """Every segment starts from its own seed; empty segments, borders of blocks and of parts included."""
    keys = make_keys(9, 1, 4, device)
    indptr = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    tokens, positions = sequence(indptr[-1])
    seeds = [(i + 1) * 0xDEADBEEFCAFEF00D & MASK for i in range(len(lengths))]
    out = torch.full((indptr[-1],), POISON, device=device)
    operation(tensor(tokens), tensor(positions), tensor(indptr), tensor(seeds), keys=keys, out=out)
    assert [v & MASK for v in out.tolist()] == scan_oracle(tokens, positions, indptr, seeds, keys)


def test_chain_scan_torch_beyond_one_table_of_powers(device: str, tensor) -> None:
    """More entries than the table has powers: the second table takes over."""
    keys = make_keys(9, 1, 4, device)
    tokens, positions = sequence(9001)
    out = torch.full((9001,), POISON, device=device)
    operands = tensor(tokens), tensor(positions), tensor([0, 4095, 4097, 9001]), tensor([1, 2, 3])
    chain_scan_torch(*operands, keys=keys, out=out)
    expected = scan_oracle(tokens, positions, [0, 4095, 4097, 9001], [1, 2, 3], keys)
    assert [v & MASK for v in out.tolist()] == expected


@scans
@pytest.mark.parametrize("live", [0, 1, 2, 9])
def test_chain_scan_leaves_padding_alone(operation, live: int, device: str, tensor) -> None:
    """Segments at and after the live count stay as they are."""
    keys = make_keys(9, 1, 4, device)
    tokens, positions = sequence(6)
    out = torch.full((6,), POISON, device=device)
    operands = tensor(tokens), tensor(positions), tensor([0, 2, 5, 6]), tensor([5, 6, 7])
    operation(*operands, keys=keys, out=out, num_live=tensor([live]))
    expected = scan_oracle(tokens, positions, [0, 2, 5, 6][: live + 1], [5, 6, 7], keys)
    assert [v & MASK for v in out.tolist()] == expected + [POISON & MASK] * (6 - len(expected))


@scans
def test_chain_scan_of_parts_leaves_padding_alone(operation, device: str, tensor) -> None:
    """Neither their sums nor their joints are written for a long segment behind the live count."""
    keys = make_keys(9, 1, 4, device)
    tokens, positions = sequence(1200)
    out = torch.full((1200,), POISON, device=device)
    operands = tensor(tokens), tensor(positions), tensor([0, 400, 1200]), tensor([5, 6])
    operation(*operands, keys=keys, out=out, num_live=tensor([1]))
    expected = scan_oracle(tokens, positions, [0, 400], [5], keys)
    assert [v & MASK for v in out.tolist()] == expected + [POISON & MASK] * 800


def test_chain_host_is_the_same_recursion() -> None:
    """The host's chain of consecutive tokens, in plain integers."""
    keys = make_keys(9, 1, 4)
    assert chain_host([5, 6, 7], 10, 3, keys) == scan_oracle([5, 6, 7], [10, 11, 12], [0, 3], [3], keys)


def tree_oracle(tokens, positions, parents, seeds, keys: Keys) -> list[int]:
    def value(i: int) -> int:
        own = mixed(tokens[i], positions[i], keys)
        if parents[i] == -1:
            return (own + keys.multiplier * seeds[i]) & MASK
        if not 0 <= parents[i] < len(tokens):
            return own
        return (own + keys.multiplier * value(parents[i])) & MASK

    return [value(i) for i in range(len(tokens))]


TREES = {
    "none": ([], 1),
    "one": ([-1], 0),
    "chain": ([-1, 0, 1, 2, 3], 4),
    "two trees": ([-1, 0, 0, 1, 1, 2, -1, 6, 6, 8], 3),
    "parents after children": ([1, 2, -1, 0], 3),
    "deeper bound than needed": ([-1, 0, 0], 9),
    "parents that are nobody": ([-1, 6, -2, 1, 99, 2], 2),
}


@trees
@pytest.mark.parametrize("name", TREES)
def test_chain_tree_equals_the_recursion(operation, name: str, device: str, tensor) -> None:
    """Nodes continue their parents, in any order, whatever the bound above the depth."""
    keys = make_keys(9, 1, 4, device)
    parents, max_depth = TREES[name]
    n = len(parents)
    tokens, positions = sequence(n)
    seeds = [(i + 1) * 0xDEADBEEFCAFEF00D & MASK for i in range(n)]
    out = torch.full((n,), POISON, device=device)
    operands = [tensor(v) for v in (tokens, positions, parents, seeds)]
    operation(*operands, max_depth=max_depth, keys=keys, out=out)
    assert [v & MASK for v in out.tolist()] == tree_oracle(tokens, positions, parents, seeds, keys)


@trees
def test_chain_tree_spans_programs(operation, device: str, tensor) -> None:
    """A parent may be in another program's block."""
    keys = make_keys(9, 1, 4, device)
    n = 131
    parents = [-1] * 3 + [(i * 7) % 3 for i in range(3, 128)] + [127, 5, 128]
    tokens, positions = sequence(n)
    seeds = [i * 3 for i in range(n)]
    out = torch.full((n,), POISON, device=device)
    operation(*(tensor(v) for v in (tokens, positions, parents, seeds)), max_depth=3, keys=keys, out=out)
    assert [v & MASK for v in out.tolist()] == tree_oracle(tokens, positions, parents, seeds, keys)


@trees
def test_chain_tree_leaves_padding_alone(operation, device: str, tensor) -> None:
    """Entries at and after the live count stay as they are, and are nobody's parent."""
    keys = make_keys(9, 1, 4, device)
    tokens, positions = sequence(4)
    parents, seeds = [-1, 0, 3, 0], [5, 6, 7, 8]
    out = torch.full((4,), POISON, device=device)
    operands = [tensor(v) for v in (tokens, positions, parents, seeds)]
    operation(*operands, max_depth=2, keys=keys, out=out, num_live=tensor([3]))
    expected = tree_oracle(tokens[:3], positions[:3], parents[:3], seeds[:3], keys)
    assert [v & MASK for v in out.tolist()] == [*expected, POISON & MASK]


@scans
def test_chain_scan_refuses_wrong_sizes(operation, device: str, tensor) -> None:
    """indptr has one more element than there are seeds."""
    keys = make_keys(9, 1, 4, device)
    one = tensor([1])
    with pytest.raises(ValueError, match=r"indptr must be contiguous \[2\] int64, got \[1\]"):
        operation(one, one, one, one, keys=keys, out=tensor([0]))
