"""Formulas on 64-bit integers: each stands once, and its numbers with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("kvcanary", "kernels/kvcanary_kernels", "tools/kvcanary_tools")  # an engine's mock models mix as they like
FORMULAS = "kernels/kvcanary_kernels/record/formulas.py"
#: A torch reference that computes in place takes the same numbers by their names.
TWINS = {"kernels/kvcanary_kernels/record/layout.py"}
FACTORS = {0xBF58476D1CE4E5B9, 0x94D049BB133111EB}
NUMBERS = FACTORS | {(1 << 64) - factor for factor in FACTORS} | {(1 << bits) - 1 for bits in (33, 34, 37)}


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every file of the packages."""
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def has_factors(tree: ast.AST) -> bool:
    """Whether a number of the mix is typed here."""
    return any(isinstance(node, ast.Constant) and node.value in NUMBERS for node in ast.walk(tree))


def has_chain_step(tree: ast.AST) -> bool:
    """Whether something is added to a product with the multiplier of chains."""
    sums = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
    return any(is_product(side) for node in sums for side in (node.left, node.right))


def is_product(node: ast.expr) -> bool:
    is_by_name = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    return is_by_name and any("multiplier" in ast.unparse(side).lower() for side in (node.left, node.right))


@pytest.mark.parametrize("is_copy", [has_factors, has_chain_step])
def test_a_formula_stands_in_one_file(root: Path, is_copy) -> None:
    """Whoever else needs it calls it, or compiles that function."""
    assert [path for path, text in sources(root) if is_copy(ast.parse(text))] == [FORMULAS]


def test_factors_are_taken_by_name_where_tensors_are_mixed_in_place(root: Path) -> None:
    """Loops and kernels have no need of them."""
    assert {path for path, text in sources(root) if "SPLITMIX_FIRST" in text} == {FORMULAS, *TWINS}


@pytest.mark.parametrize("source", ["x = 0x94D049BB133111EB", "y = z & 0x3FFFFFFFF"])
def test_typed_factors_are_seen(source: str) -> None:
    """What is forbidden is found where it stands."""
    assert has_factors(ast.parse(source))


@pytest.mark.parametrize("source", ["multiplier * v + m", "m + v * request.multiplier", "c[MULTIPLIER] * v + m"])
def test_typed_chain_steps_are_seen(source: str) -> None:
    """Whichever side is first, and wherever the multiplier lies."""
    assert has_chain_step(ast.parse(source))
