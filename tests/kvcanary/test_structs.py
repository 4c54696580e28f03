"""Structs and plans that compiled loops share with Python, and formulas that are one function for both."""

from __future__ import annotations

import ast
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvcanary.native import layout
from kvcanary.native.layout import LINE_FLAGS, RUN_FLAGS, SETTLED_FLAGS, filled, flags, plan_layout, struct
from kvcanary.native.records import chain_tokens, mix, step_of
from kvcanary_kernels.record.formulas import chain_step, mix_of
from kvcanary_kernels.record.layout import MASK_64, chain_host, make_keys, signed

NATIVE = Path(layout.__file__).parent
PACKAGE = NATIVE.parent
STRUCTS = {name: value for name, value in vars(layout).items() if name.isupper() and hasattr(value, "_fields")}


def numbers_of(statement: ast.stmt) -> list[int]:
    """The integers that an assignment types, in their order."""
    if not isinstance(statement, ast.Assign):
        return []
    values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
    return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, int)]


def typed_places(source: str) -> list[int]:
    """Integers that stand for places: those that count up in assignments of a module, and indices of fields."""
    tree = ast.parse(source)
    typed = [number for statement in tree.body for number in numbers_of(statement)]
    counting = [after for before, after in pairwise(typed) if after == before + 1]
    indices = [node.slice.value for node in ast.walk(tree) if isinstance(node, ast.Subscript) and is_place(node.slice)]
    return counting + [index for index in indices if index > 1]


def is_place(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


@pytest.mark.parametrize("path", sorted(NATIVE.glob("*.py")), ids=lambda path: path.stem)
def test_nobody_types_places(path: Path) -> None:
    """Places come from lists of fields."""
    assert typed_places(path.read_text()) == []


@pytest.mark.parametrize("source", ["A = 0\nB = 1", "A, B = 3, 4", "def of(card):\n    return card[5]"])
def test_typed_places_are_seen(source: str) -> None:
    """What is forbidden is found where it stands."""
    assert typed_places(source)


def test_places_are_distinct_and_dense() -> None:
    """A struct of n fields has the places 0 to n - 1, and size n."""
    assert len(STRUCTS) > 20
    for fields in STRUCTS.values():
        assert list(fields) == list(range(len(fields._fields)))
        assert fields._fields[-1] == "size"


def test_every_field_is_read() -> None:
    """Every field has a reader, in loops or where Python takes it by its name; kernels alone read one of a piece."""
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path != Path(layout.__file__)]
    users = [source for source in sources if "kvcanary.native.layout" in source]
    read = {name for source in users for name in re.findall(r"\.([a-z_]+)\b(?! = )", source)}
    unread = {f"{name}.{field}" for name, own in STRUCTS.items() for field in own._fields if field not in read}
    assert unread == {"PIECE.block"}


def test_a_struct_is_filled_by_name() -> None:
    """What is not named is 0, and a name that it has not is refused."""
    own = struct("Own", "first second third")
    assert filled(own, third=7, first=-1).tolist() == [-1, 0, 7]
    with pytest.raises((ValueError, TypeError), match="unexpected field"):  # TypeError since Python 3.13
        filled(own, fourth=1)


def test_flags_are_single_bits() -> None:
    """Of what a loop says each bit says one thing, and the number above them begins behind the last."""
    assert flags(4) == [1, 2, 4, 8]
    bits = (LINE_FLAGS, layout.MESSAGE_BITS), (RUN_FLAGS, layout.RUN_BITS), (SETTLED_FLAGS, layout.SEALED_BITS)
    assert [1 << above for _, above in bits] == [2 * own[-1] for own, _ in bits]


@pytest.mark.parametrize(("entries", "width", "requests"), [(0, 1, 0), (1, 1, 1), (7, 1, 3), (12, 4, 3)])
def test_a_plan_is_its_arrays_one_behind_the_other(entries: int, width: int, requests: int) -> None:
    """Each has its own numbers under its name, and nothing lies between two."""
    rows = width * requests
    where, sizes = plan_layout(entries, rows, requests), [entries] * 4 + [rows + 1] + [rows] * 5 + [requests]
    sizes += [2 * requests, entries]
    arrays = [np.full(size, number) for number, size in enumerate(sizes)]
    memory = np.concatenate(arrays)
    assert len(memory) == where.end
    for name, wanted in zip(where._fields[:-1], arrays, strict=True):
        assert np.array_equal(where.part(memory, name), wanted), name


def test_formulas_are_the_functions_that_loops_were_compiled_from() -> None:
    """No second copy of a formula is written for the loops."""
    assert (mix.py_func, step_of.py_func) == (mix_of, chain_step)


def test_formulas_wrap_alike_everywhere() -> None:
    """Plain integers that grow, loops that wrap and arrays of int64 have the same low 64 bits."""
    draw = random.Random(5)
    for _ in range(50):
        token, position, key = (signed(draw.getrandbits(64)) for _ in range(3))
        plain = mix_of(token, position, key) & MASK_64
        [by_array] = mix_of(np.array([token]), np.array([position]), key)
        assert {plain, int(mix(token, position, key)) & MASK_64, int(by_array) & MASK_64} == {plain}


def test_a_chain_in_loops_is_the_chain_of_plain_integers() -> None:
    """Token by token, from any value on."""
    keys, tokens, chains = make_keys(3, 1, 4), [5, 1 << 31, 0, 77], np.empty(4, np.int64)
    chain_tokens(np.array(tokens), 9, -3, signed(keys.multiplier), signed(keys.mix_key), chains)
    assert chains.tolist() == [signed(value) for value in chain_host(tokens, 9, -3, keys)]
