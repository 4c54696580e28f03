"""What the torch references refuse: every array of another type or size, by its name."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

import kvcanary_kernels
from kvcanary_kernels.content.check import check_content_torch
from kvcanary_kernels.content.fingerprint import fingerprint_torch
from kvcanary_kernels.content.poison import poison_check_torch, poison_fill_torch
from kvcanary_kernels.engine.index import index_rows_torch
from kvcanary_kernels.judge.count import NUM_BITS, count_torch
from kvcanary_kernels.judge.forward import ForwardPlan, Planned, new_planned
from kvcanary_kernels.judge.move import move_torch
from kvcanary_kernels.judge.plan import plan_torch
from kvcanary_kernels.judge.post import parts_of, post_torch
from kvcanary_kernels.judge.settle import NUM_RUNS, settle_torch
from kvcanary_kernels.judge.verify import verify_torch
from kvcanary_kernels.record.chain import chain_scan_torch, chain_tree_torch
from kvcanary_kernels.record.layout import COLUMNS, POWERS, make_keys
from kvcanary_kernels.record.rows import pool_rows
from kvcanary_kernels.record.seal import seal_torch

SLOTS, LAYERS, N, ROWS = 8, 2, 3, 2
KEYS = make_keys(3, LAYERS, 4)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def a_forward() -> ForwardPlan:
    """Two rows that write three entries."""
    rows, entries = ("row_starts", "row_ends", "prefix_lens", "uids"), ("slots", "tokens", "positions")
    arrays = {name: ints(ROWS) for name in rows} | {name: ints(N) for name in entries}
    return ForwardPlan(
        indices=ints(4), bounds=torch.tensor([0, 2, 3]), parents=None, truths=None, num_live=ints(1), **arrays
    )


RECORDS, CONTENT_A = ints(SLOTS, COLUMNS), ints(LAYERS, SLOTS)
POOL = pool_rows([torch.zeros(SLOTS, 1, 2) for _ in range(LAYERS)], [torch.zeros(SLOTS, 1, 2) for _ in range(LAYERS)])
SEGMENTS = {"starts": ints(ROWS), "lengths": ints(ROWS)}
CASES = {
    "seal": (
        seal_torch,
        {name: ints(N) for name in ("slots", "tokens", "positions", "chains")}
        | {name: ints(N) for name in ("requests", "generations", "step", "sites")}
        | {"records": RECORDS, "num_live": ints(1), "pool_id": 0, "keys": KEYS},
    ),
    "move": (
        move_torch,
        {name: ints(N) for name in ("src", "dst", "generations", "step", "sites", "requests", "arrived")}
        | {"records": RECORDS, "content_a": CONTENT_A, "page_generations": ints(SLOTS // 4), "page_size": 4}
        | {"pool_id": 0, "keys": KEYS, "scratch": ints(N, COLUMNS + LAYERS)},
    ),
    "chain_scan": (
        chain_scan_torch,
        {"tokens": ints(N), "positions": ints(N), "indptr": torch.tensor([0, 1, 3]), "seeds": ints(ROWS)}
        | {"out": ints(N), "num_live": ints(1), "keys": KEYS},
    ),
    "chain_tree": (
        chain_tree_torch,
        {name: ints(N) for name in ("tokens", "positions", "parents", "seeds", "out")}
        | {"num_live": ints(1), "max_depth": 2, "keys": KEYS},
    ),
    "content": (
        check_content_torch,
        {"slots": ints(N), "content_a": CONTENT_A, "mismatch": ints(N, 2), "num_live": ints(1)}
        | {"rows": POOL, "keys": KEYS},
    ),
    "count": (
        count_torch,
        {"codes": ints(4), "indices": ints(4), "step": ints(1), "counts": ints(NUM_BITS), "first": ints(NUM_BITS, 4)}
        | {"row_violations": ints(ROWS), "row_ids": ints(ROWS), "num_live": ints(1), "arrivals": ints(1)}
        | SEGMENTS,
    ),
    "fingerprint": (
        fingerprint_torch,
        {"slots": ints(N), "fingerprint_a": ints(LAYERS, N), "fingerprint_b": ints(N)} | {"rows": POOL, "keys": KEYS},
    ),
    "index": (
        index_rows_torch,
        {"table": ints(4, 5), "rows": ints(1), "prefix_lens": ints(1), "tails": ints(N, 2), "tail_lens": ints(N)}
        | {"kv_indptr": ints(N + 1), "kv_indices": ints(3 * 7), "num_slots": SLOTS},
    ),
    "poison_fill": (poison_fill_torch, {"slots": ints(N), "rows": POOL}),
    "poison_check": (
        poison_check_torch,
        {"slots": ints(N), "mismatch": ints(N, 2), "rows": POOL},
    ),
    "post": (post_torch, {"turn": ints(1), "box": ints(3, N + ROWS), "parts": parts_of([ints(N), ints(ROWS)])}),
    "verify": (
        verify_torch,
        {"records": RECORDS, "indices": ints(4), "codes": ints(4), "layers": ints(2), "step": ints(1)}
        | {name: ints(ROWS) for name in ("first_positions", "predecessors", "seeds", "readers")}
        | {name: ints(SLOTS // 4) for name in ("generations", "states", "owners")}
        | {"num_live": ints(1), "page_size": 4, "null_slots": 0, "pool_id": 0, "keys": KEYS}
        | SEGMENTS,
    ),
    "plan": (
        plan_torch,
        {name: ints(SLOTS // 4) for name in ("generations", "states", "owners")}
        | {"records": RECORDS, "claims": ints(SLOTS), "roots": ints(2), "site": 1, "page_size": 4, "width": 1}
        | {"null_slots": 0},
    ),
    "settle": (
        settle_torch,
        {"records": RECORDS, "expected": RECORDS.clone(), "layers": ints(2), "claims": ints(SLOTS), "twice": ints(N)}
        | {"codes": ints(4), "runs": ints(NUM_RUNS), "null_slots": 0},
    ),
}
ARRAYS = [(case, name) for case, (_, given) in CASES.items() for name, value in given.items() if torch.is_tensor(value)]
#: Told in the words of another.
SAID = {("settle", "expected"): "records"}


def call(case: str, **changes: object) -> None:
    perform(CASES[case][0], case, **changes)


def perform(operation: Callable[..., None], case: str, **changes: object) -> None:
    given = CASES[case][1]
    if case in ("plan", "settle"):
        forward = a_forward()
        operation(forward, changes.pop("planned", new_planned(forward)), **given | changes)
    else:
        operation(**given | changes)


def words_of(case: str, **changes: object) -> str:
    with pytest.raises(ValueError) as caught:
        call(case, **changes)
    return str(caught.value)


class LaunchedError(Exception):
    """A kernel was given a grid."""


class Kernel:
    def __getitem__(self, grid: object) -> None:
        raise LaunchedError


@pytest.mark.parametrize("case", CASES)
def test_a_reference_launches_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the operation without its kernels, which by itself launches one."""
    operation = CASES[case][0].func
    names = operation.__globals__
    for name in [name for name in names if name.endswith("_kernel")]:
        monkeypatch.setitem(names, name, Kernel())
    call(case)
    with pytest.raises(LaunchedError):
        perform(operation, case)


def references() -> Iterator[tuple[str, partial[None]]]:
    """By name every operation of the package that goes without its kernels."""
    for module in pkgutil.walk_packages(kvcanary_kernels.__path__, "kvcanary_kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, partial) and value.func.__module__ == module.name:
                yield f"{module.name}.{name}", value


def launched(body: list[ast.stmt]) -> list[str]:
    """Kernels that are given a grid there, and functions that give them one."""
    calls = [node.func for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)]
    grids = [ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)]
    return sorted([*grids, *(call.id for call in calls if isinstance(call, ast.Name) and call.id == "launch")])


def test_every_reference_goes_around_its_kernels() -> None:
    """All that an operation launches stands where `launches` says so, and there the operation ends."""
    every = dict(references())
    assert len(every) >= 41
    for name, reference in every.items():
        assert reference.keywords == {"launches": False}, name
        [operation] = ast.parse(inspect.getsource(reference.func)).body
        [branch] = [
            node for node in operation.body if isinstance(node, ast.If) and ast.unparse(node.test) == "launches"
        ]
        assert launched(branch.body) == launched(operation.body) != [], name
        assert isinstance(branch.body[-1], ast.Return), name


@pytest.mark.parametrize(("case", "name"), ARRAYS, ids=str)
def test_an_array_of_another_type_is_refused(case: str, name: str) -> None:
    """Arrays are int64, whatever they hold."""
    words = words_of(case, **{name: CASES[case][1][name].to(torch.int32)})
    assert words.partition(" must ")[0] == SAID.get((case, name), name)


@pytest.mark.parametrize("case", ["plan", "settle"])
def test_room_for_a_plan_fits_its_forward(case: str) -> None:
    """What is derived has the size of what it is derived from, where the operation looks."""
    names = {"plan": ("starts", "seeds", "safe_slots", "codes", "asked"), "settle": ("safe_slots",)}[case]
    planned = new_planned(a_forward())
    assert set(names) < {field.name for field in fields(Planned)}
    for name in names:
        words = words_of(case, planned=replace(planned, **{name: getattr(planned, name)[1:]}))
        assert words.startswith(f"{name} must be contiguous [{len(getattr(planned, name))}] int64, got ")


def test_what_else_is_refused() -> None:
    """Rules that are no array's alone, with their numbers."""
    assert words_of("plan", width=0) == "width must be at least 1, got 0: a request has at least one row"
    assert words_of("chain_tree", max_depth=-1) == "max_depth must not be negative, got -1"
    many = torch.zeros(1, dtype=torch.int64).expand(POWERS * POWERS)
    assert words_of("chain_scan", tokens=many) == f"a scan takes fewer than {1 << 24} entries, got {1 << 24}"
    for scratch in (ints(N - 1, 10), ints(N, 9), ints(10, N).t()):
        words = f"scratch must be contiguous [>= 3, 10] int64, got {list(scratch.shape)} torch.int64"
        assert words_of("move", scratch=scratch) == words
    for first in (ints(NUM_BITS, 3), ints(4, NUM_BITS).t()):
        words = f"first must be contiguous [{NUM_BITS}, 4] int64, got {list(first.shape)} torch.int64"
        assert words_of("count", first=first) == words
    other = make_keys(3, LAYERS, 6)
    for case in ("content", "fingerprint"):
        assert words_of(case, keys=other) == "keys are for 2 layers of 6 words, rows have 2 layers of 4"
    words = "mismatch must be contiguous [3, 2] int64, got [3, 3] torch.int64"
    assert words_of("content", mismatch=ints(N, 3)) == words


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("plan", "settle", "verify")])
def test_one_value_for_all_stands_only_where_it_may(case: str) -> None:
    """Of seal and move: request, generation, step and site; else every entry has its own."""
    shared = {"requests", "generations", "step", "sites"} if case in ("seal", "move") else set()
    entries = [name for name, value in CASES[case][1].items() if torch.is_tensor(value) and value.shape == (N,)]
    for name in entries:
        if name in shared:
            call(case, **{name: ints(1)})
        elif name not in ("slots", "src", "tokens"):  # these say how many entries there are
            assert words_of(case, **{name: ints(1)}).startswith(f"{name} must be contiguous [3] int64, got [1]")
