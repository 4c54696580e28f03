"""Compiled loops: what they are given, and that they give what the torch references and the plain rules give."""

from __future__ import annotations

import os
import random
import sys
from subprocess import run
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

import kvcanary.calls.forward as forwards
from kvcanary import CanaryConfig, CanaryManager, PlanError, PoolView, ReadPlan, WritePlan
from kvcanary.calls.forward import Forward, refuse_contradiction
from kvcanary.checks import writes as refusing
from kvcanary.ledger.ledger import Ledger, Role
from kvcanary.ledger.request_state import RequestState
from kvcanary.ledger.row_truth import RowTruth
from kvcanary.native import jit as memory
from kvcanary.native import loops
from kvcanary.native.layout import UNKNOWN
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.record_store import NOT_ALL, Move, RecordStore
from kvcanary.records.state import CanaryState
from kvcanary_kernels.record.layout import SEAL, chain_host, make_keys, read_record, seal_host, signed

SLOTS = 40
AS_TEXT = {"capture_output": True, "text": True, "timeout": 120, "check": False}


def stored(values, dtype=torch.float32):
    """The canary's fingerprints of values [n, 2, 8] that went through a store, and those of the same bytes in the
    pool.
    """
    kv = torch.zeros(2, SLOTS, 2, 8, dtype=dtype)
    view = PoolView("target", [kv[0]], [kv[1]], 4)
    canary = CanaryManager(CanaryConfig(mode="raise", content="full", seed=1), [view])
    canary.arm()
    canary.begin_step(1)
    n = len(values[0])
    canary.admit("only", list(range(n)))
    canary.on_alloc("only", [1, 2])
    substep, slots = canary.forward("prefill", 0, "target"), torch.arange(4, 4 + n)
    read = ReadPlan(torch.tensor([0, n]), slots, ("only",), 1, torch.tensor([0]), n)
    substep.open(read, WritePlan(slots, slots - 4, slots - 4))
    substep.store(0, *values)
    for part, value in zip(kv, values, strict=True):
        part[slots] = value.to(dtype)
    substep.close()
    canary.collect(canary.end_step())
    pool = canary.session.state.pools[0]
    canary.detach()
    return (pool.content_a[:, slots], pool.records[slots, 4]), fingerprints_of_slots(pool, slots)


def split(product):
    return product[:, 1:3], product[:, 4:6]


VALUES = {
    "dense": lambda x: (x[:, :2].contiguous(), x[:, 2:4].contiguous()),
    "views of one product": split,
    "transposed": lambda x: tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in split(x)),
    "of another type": lambda x: tuple(part.double() for part in split(x)),
    "a row repeated": lambda x: (x[:1, :2].expand(len(x), 2, 8), x[:, 2:4]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("given", VALUES)
@pytest.mark.parametrize("n", [1, 5])
def test_values_of_any_strides_have_the_fingerprints_of_the_bytes_that_they_become(given, dtype, n):
    """Rows that lie apart, in another order or in another type are fingerprinted as the pool will hold them."""
    product = torch.randint(0, 250, (n, 6, 8), generator=torch.Generator().manual_seed(3)).to(dtype)
    taken, lie = stored(VALUES[given](product), dtype)
    assert all(torch.equal(a, b) for a, b in zip(taken, lie, strict=True))


def test_values_at_an_address_that_is_no_word_are_read_all_the_same():
    """Half-word elements may begin in the middle of a 32-bit word."""
    flat = torch.arange(1 + 5 * 34, dtype=torch.bfloat16)[1:].view(5, 34)
    taken, lie = stored((flat[:, :16].view(5, 2, 8), flat[:, 16:32].view(5, 2, 8)), torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(taken, lie, strict=True))


# plans


def new_pool():
    """A pool of ten pages of four, and pages of which the first six belong to two requests."""
    kv = torch.zeros(2, SLOTS, 1, 1)
    state = CanaryState([PoolView("target", [kv[0]], [kv[1]], 4)], 3)
    pool = state.pools[0]
    ledger = Ledger(10, 4, 1, pool.keys, [Role("target")])
    state.bind(ledger.pages)
    for name, pages in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        ledger.admit(name, [0] * 12, 0)
        ledger.grant(name, pages, 0)
    return pool, ledger


def random_plan(rng):
    """A plan of two rows that is right, but for what is sometimes changed in it."""
    written, prefixes = [rng.randrange(4) for _ in "ab"], [rng.randrange(5) for _ in "ab"]
    firsts, rows = (4, 16), []
    for first, prefix, count in zip(firsts, prefixes, written, strict=True):
        rows.append(list(range(first, first + prefix + count)))
    slots = [slot for row, count in zip(rows, written, strict=True) for slot in row[len(row) - count :]]
    parents = [-1 if not i or rng.random() < 0.3 else rng.randrange(i) for count in written for i in range(count)]
    parents = [p if p < 0 else p + (i >= written[0]) * written[0] for i, p in enumerate(parents)]
    plan = {
        "indptr": [0, len(rows[0]), len(rows[0]) + len(rows[1])],
        "indices": rows[0] + rows[1],
        "prefixes": prefixes,
        "written": written,
        "starts": [0, 0],
        "slots": slots,
        "parents": parents,
    }
    if rng.random() < 0.7:
        values = plan[rng.choice(list(plan))]
        if values:
            values[rng.randrange(len(values))] += rng.choice([-40, -7, -2, -1, 1, 2, 5, 12, 36, 1 << 40])
    return plan


def forward_of(pool, ledger, plan, mask):
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in plan.items()}
    n = len(plan["slots"])
    read = ReadPlan(
        tensors["indptr"],
        tensors["indices"],
        ("a", "b"),
        1,
        tensors["prefixes"],
        tensors["written"],
        tree_mask=torch.ones(2, mask, mask, dtype=torch.bool) if mask else None,
        starts=tensors["starts"],
    )
    write = WritePlan(tensors["slots"], torch.zeros(n, dtype=torch.int64), torch.arange(n), tensors["parents"])
    return Forward("verify", 0, pool, 1, [ledger.request("a"), ledger.request("b")], read, write)


def test_a_plan_is_well_exactly_where_the_rules_find_nothing(monkeypatch):
    """The compiled looks through a plan, and the rules that name what is wrong with it, are of one mind."""
    pool, ledger = new_pool()
    seen, rng = {"contradiction": 0, "refused": 0, "well": 0}, random.Random(5)
    for _ in range(3000):
        plan, named = random_plan(rng), []
        mask = plan["written"][0] if rng.random() < 0.1 and plan["written"][0] > 0 else 0
        monkeypatch.setattr(forwards, "refuse_contradiction", named.append)
        forward = forward_of(pool, ledger, plan, min(mask, 5))
        try:
            refuse_contradiction(forward)
        except PlanError:
            assert named, plan
            seen["contradiction"] += 1
            continue
        assert not named, plan
        well, forward.is_usable = forward.is_usable, False
        violations = refusing.refuse(forward, ledger.pages, frozenset())
        assert well == (
            not violations and forward.refused is None and forward.refused_reads is None and not forward.short_rows
        ), plan
        assert not pool.seen.any()
        seen["well" if well else "refused"] += 1
    assert min(seen.values()) > 100, seen


# records


def test_a_truth_chain_that_grows_is_the_chain_of_its_tokens():
    """Asked for in pieces, it has the values of the plain recursion; so far as tokens are known."""
    keys, rng = make_keys(7, 1, 2), random.Random(2)
    tokens = [rng.randrange(1 << 31) for _ in range(40)]
    known = RequestState(9, tokens, [(5, 0, 0), (keys.root_key, 1, 0)], keys)
    expected = chain_host(tokens[1:], 0, keys.root_key, keys)
    for length in (0, 1, 2, 9, 8, 39):
        assert known.reaches(1, length)
        assert known.chain(1)[:length].tolist() == expected[:length]
    assert (known.reaches(1, 40), len(known.chain(1))) == (False, 39)


def test_rows_are_told_as_the_host_knows_them():
    """Final entries and the chain behind them; where one step is not heard of, all whose tokens are known, or nothing.

    The draft pool's entries hold one token more, and its rows one entry.
    """
    keys, tokens = make_keys(7, 1, 2), list(range(20, 30))
    ledger = Ledger(6, 4, 1, keys, [Role("target"), Role("draft", 1, 1)])
    one, other = (ledger.admit(name, tokens, 0) for name in ("a", "b"))
    for request, committed_len in ((one, 9), (other, 4)):
        request.committed_len, request.row_lens = committed_len, [committed_len, committed_len + 1]
    batch, roots = ledger.batches[("a", "b")], [one.root(0), one.root(1)]

    def reported(pool_id: int, pending_acceptances: int, lens: list[int], uncollected: list[int], unknown: int) -> None:
        chains = list(map(signed, chain_host(tokens[pool_id:], 0, roots[pool_id], keys)))
        numbers, count = ledger.steps.describe_rows(batch, pool_id, pending_acceptances)
        rows = RowTruth(numbers, 0)
        assert (rows.uids, rows.roots) == ([one.uid, other.uid], [signed(roots[pool_id])] * 2)
        assert (rows.prefix_lens, rows.uncollected, count) == (lens, uncollected, unknown)
        assert all(truth == chains[n - 1] for truth, n in zip(rows.truths, lens, strict=True) if n != UNKNOWN)

    other.row_lens[1] = 5
    reported(0, 1, [9, 4], [0, 0], 0)
    reported(1, 1, [UNKNOWN, 5], [0, 0], 1)
    one.pending_acceptances = other.pending_acceptances = 1
    reported(0, 1, [10, UNKNOWN], [1, 0], 1)
    reported(1, 1, [9, UNKNOWN], [1, 0], 1)
    reported(0, 0, [UNKNOWN, UNKNOWN], [0, 0], 2)
    one.pending_acceptances = 2
    reported(0, 1, [UNKNOWN, UNKNOWN], [0, 0], 2)
    one.pending_acceptances, one.row_lens = 1, [8, 10]
    reported(0, 1, [UNKNOWN, UNKNOWN], [0, 0], 2)


def test_records_are_sealed_as_the_plain_formula_says():
    """Seal and record of every slot, in both copies, whatever bits its fields have."""
    pool, _ = new_pool()
    state = CanaryState([pool.view], 3)
    pool, record_store, rng = state.pools[0], RecordStore(state), random.Random(4)
    rows = np.array([5, 39, 4, 17])
    records = np.array([[rng.getrandbits(64) for _ in range(8)] for _ in rows], np.uint64)
    records[:, SEAL] = pool.seal_term
    record_store.write(rows, records)
    for row, given in zip(rows.tolist(), records, strict=True):
        record = read_record(pool.records, row)
        assert record.seal == seal_host(record, row, pool.pool_id, pool.keys)
        assert pool.records[row, :SEAL].tolist() == given[:SEAL].view(np.int64).tolist()
    assert torch.equal(pool.records, pool.expected)


@pytest.mark.parametrize("slot", [-1, 0, 6, SLOTS])
def test_a_move_of_slots_that_are_none_is_not_done(slot):
    """Memory outside the pool, null slots and entries that stay are seen before anything is written."""
    pool, ledger = new_pool()
    state = CanaryState([pool.view], 3)
    before, record_store = state.records.clone(), RecordStore(state)
    move = Move(*(np.array(slots) for slots in ([5, 6], [7, slot], [5, 6], [7, 8])))
    pages = ledger.generations, ledger.owners
    assert record_store.move(state.pools[0], state.pools[0], move, 1, True, *pages) == (NOT_ALL, False)
    assert torch.equal(state.records, before)


@pytest.mark.parametrize(("misses", "reported"), [(1, 1), (0, 0)])
def test_the_first_use_says_that_it_compiles(monkeypatch, misses: int, reported: int) -> None:
    """Where the disk has no loops one event tells of the wait, however many are compiled; else none does."""
    made = SimpleNamespace(stats=SimpleNamespace(cache_misses=misses))
    monkeypatch.setattr(memory, "LOOPS", {})
    monkeypatch.setattr(memory, "njit", lambda *signature, **settings: lambda function: made)
    memory._log_the_wait.cache_clear()
    with capture_logs() as logs:
        assert all(memory.loop("int64(int64)")(function) is made for function in (lambda n: n, lambda n: -n))
    assert [log["event"] for log in logs] == ["kvcanary.compiling"] * reported


NUMBERS, CALLED, LOOPED = (
    "from kvcanary.native.layout import struct\nPLACE, OWN = {}, struct('Own', {!r})",
    "from kvcanary.native.jit import loop\n@loop()\ndef called(n):\n    return n + {}",
    "import numpy as np\nimport numbers_of\nfrom called import called\nfrom kvcanary.native.jit import loop, view\n"
    "from numbers_of import OWN\n@loop('int64(int64, int64)')\ndef looped(n, card):\n"
    "    return called(n) + numbers_of.PLACE + view(OWN, card).value\n"
    "card = np.array([100, 200])\nprint(looped(0, card.ctypes.data))",
)


def test_a_loop_is_compiled_again_when_what_it_takes_from_other_files_changes(tmp_path) -> None:
    """Numbers, fields and other loops: its own file is as it was, the disk has what was compiled with the old ones."""
    (tmp_path / "looped.py").write_text(LOOPED)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    found = []
    plain, turned = "value other", "other value"
    for place, added, fields in ((1, 10, plain), (2, 10, plain), (2, 20, plain), (2, 20, turned)):
        (tmp_path / "numbers_of.py").write_text(NUMBERS.format(place, fields))
        (tmp_path / "called.py").write_text(CALLED.format(added))
        reported = run([sys.executable, "-B", "-m", "looped"], env={**os.environ, "PYTHONPATH": path}, **AS_TEXT)
        assert reported.returncode == 0, reported.stderr
        found.append(reported.stdout.splitlines()[-1])
    assert found == ["111", "112", "122", "222"]


def test_loops_over_numbers_are_entered_without_a_search_for_types():
    """Python calls what was compiled for them; the number of arguments is looked at, and kinds are made to fit."""
    entered = [name for name in memory.LOOPS if not hasattr(getattr(loops, name), "signatures")]
    assert {"launch_runs", "collect_quiet", "append_tokens", "commit_rows", "finalise_runs", "end_rows"} <= set(entered)
    with pytest.raises(TypeError, match="3 arguments, got 2"):
        loops.grow_chain(1, 2)


@pytest.mark.parametrize("name", ["take_slice", "put_slots", "are_finite"])
def test_loops_over_arrays_refuse_others(name):
    """What is no array of that type and layout would be read as if it were one."""
    (kinds,) = getattr(loops, name).signatures
    given = [np.zeros((2,) * kind.ndim, np.float32)[::2] if hasattr(kind, "ndim") else 0 for kind in kinds]
    with pytest.raises(TypeError, match="No matching definition"):
        getattr(loops, name)(*given)
