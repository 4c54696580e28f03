"""Captured substeps: every check on the device path, without a look at a device value between open and close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvcanary import HookOrderError, PlanError
from kvcanary.captured import kernel_launches as launches_module
from kvcanary.captured.buffers import Batch
from kvcanary.captured.readback import VIOLATIONS_PER_CHECK
from kvcanary.pools.launch_site import pack_site
from kvcanary.records.dispatch import KERNELS
from kvcanary.records.side_stream import SideStream
from kvcanary_kernels.judge.count import NUM_BITS
from kvcanary_kernels.judge.plan import NO_CLAIM
from kvcanary_kernels.judge.verify import ROOT, verify_torch
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.layout import chain_host, chain_root, signed

ANN, BOB = 11, 22
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: the cuda variant runs")
INTERPRETED = pytest.param("interpreted", marks=[ON_CPU, pytest.mark.slow])


def make_rig(make_static, monkeypatch, how: str):
    """Torch twins, the kernels themselves in Triton's interpreter, or the kernels on a GPU."""
    if how == "interpreted":
        monkeypatch.setattr(launches_module, "ops_for", lambda device: KERNELS)
    rig = make_static("cuda" if how == "cuda" else "cpu")
    rig.grant(ANN, 1, 2)
    rig.grant(BOB, 3, 4)
    return rig


@pytest.fixture(params=["cpu", INTERPRETED, pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request, make_static, monkeypatch):
    return make_rig(make_static, monkeypatch, request.param)


@pytest.fixture
def rows(static_row):
    """Ann's and Bob's rows of a decode: Ann has written positions 0 to 4, Bob 0 to 2."""
    return [static_row(ANN, [4, 5, 6, 7, 8, 9], [55]), static_row(BOB, [12, 13, 14, 15], [33])]


@pytest.fixture
def decode(rig, static_row):
    return prefilled(rig, static_row)


def prefilled(rig, static_row):
    """A decode substep after a clean prefill of both rows."""
    substep = rig.add("decode", has_truths=True)
    prompts = [static_row(ANN, [4, 5, 6, 7, 8], [50, 51, 52, 53, 54]), static_row(BOB, [12, 13, 14], [30, 31, 32])]
    readback = rig.run(rig.add("prefill"), rig.batch(prompts))
    assert (readback.violations, readback.gaps) == ([], [])
    return substep


def truths(rig) -> list[int]:
    chains = (chain_host(tokens, 0, rig.pool.root, rig.pool.keys) for tokens in ([50, 51, 52, 53, 54], [30, 31, 32]))
    return [signed(chain[-1]) for chain in chains]


def clean(rig, rows, **changes: object) -> Batch:
    return rig.batch(rows, **{"truths": truths(rig)} | changes)


def reported(readback) -> list[tuple]:
    return [
        (violation.code, violation.row, violation.entry, violation.place, violation.slot)
        for violation in readback.violations
    ]


def test_clean_forwards_find_nothing(rig, decode, rows):
    """Prefill, then decode: no violation, no gap, every record judged right by the verify reference."""
    readback = rig.run(decode, clean(rig, rows), step=2)
    assert (readback.violations, readback.gaps) == ([], [])
    pool, state = rig.pool, rig.state
    codes, ids = torch.full((10,), -77), [4, 5, 6, 7, 8, 9, 12, 13, 14, 15]
    verify_torch(
        pool.records.cpu(),
        torch.tensor(ids),
        starts=torch.tensor([0, 6]),
        lengths=torch.tensor([6, 4]),
        first_positions=torch.tensor([0, 0]),
        predecessors=torch.tensor([ROOT, ROOT]),
        seeds=torch.tensor([signed(pool.root)] * 2),
        generations=state.generations.cpu(),
        layers=pool.layers.cpu(),
        page_size=state.page_size,
        null_slots=pool.view.null_slots,
        pool_id=0,
        keys=record.make_keys(7, rig.LAYERS, pool.rows.words_per_row),
        codes=codes,
    )
    assert codes.tolist() == [0] * 10
    assert torch.equal(pool.records, pool.expected)


def test_each_row_continues_its_own_root(rig, static_row):
    """Rows of requests under other roots, written and read; a row read under another's root is R5 at its head."""
    roots = [signed(chain_root(rig.pool.keys, "target", salt)) for salt in ("", "tenant")]
    prefill, decode = (rig.add(kind, has_roots=True) for kind in ("prefill", "decode"))
    prompts = [static_row(ANN, [4, 5, 6], [50, 51, 52]), static_row(BOB, [12, 13, 14], [50, 51, 52])]
    follows = [static_row(ANN, [4, 5, 6, 7], [55]), static_row(BOB, [12, 13, 14, 15], [33])]
    assert rig.run(prefill, rig.batch(prompts, roots=roots)).violations == []
    assert rig.run(decode, rig.batch(follows, roots=roots), step=2).violations == []
    chains = [int(rig.pool.records[slot, record.CHAIN]) for slot in (6, 14)]
    assert chains[0] != chains[1]
    violations = rig.run(decode, rig.batch(follows[1:], roots=roots[:1]), step=3).violations
    assert [(violation.code, violation.slot) for violation in violations] == [("R5", 12)]


def damage(rig, slot: int, column: int, value: int) -> None:
    rig.pool.records[slot, column] ^= value


def as_if_written(rig, slot: int, source: int) -> None:
    """The record of `source`, sealed anew in `slot`, as a copy of a record under the right seal would be."""
    rig.pool.records[slot] = rig.pool.records[source]
    key = signed(rig.pool.keys.seal_keys[-2] * (slot - source))
    rig.pool.records[slot, record.SEAL] += key


def counted(rig, substep, code: str) -> int:
    """Entries at which a check has fired since `arm`, as the device counts them."""
    counts = rig.registry._headers[substep.number, : 2 * NUM_BITS].view(2, NUM_BITS).sum(0)
    return int(counts[record.CODE_BITS[code].bit_length() - 1])


OTHER_OWN = [4, 5, 6, 7, 8, 10, 12, 13, 14, 15]
FAULTS = {
    "R1 read": (lambda rig: None, {"indices": [4, 5, 2**40, 7, 8, 9, 12, 13, 14, 15]}, ("R1", 0, -1, 2, 2**40)),
    "R1 negative": (lambda rig: None, {"indices": [4, 5, 6, 7, 8, 9, 12, -9, 14, 15]}, ("R1", 1, -1, 1, -9)),
    "R1 own": (lambda rig: None, {"indices": [4, 5, 6, 7, 8, 96, 12, 13, 14, 15]}, ("R1", 0, -1, 5, 96)),
    "R2 read": (lambda rig: None, {"indices": [4, 1, 6, 7, 8, 9, 12, 13, 14, 15]}, ("R2", 0, -1, 1, 1)),
    "R2 write": (lambda rig: None, {"slots": [9, 3]}, ("R2", 1, 1, -1, 3)),
    "R3": (lambda rig: damage(rig, 6, record.TOKEN_POSITION, 1), {}, ("R3", 0, -1, 2, 6)),
    "R3 zeroed": (lambda rig: rig.pool.records[13].zero_(), {}, ("R3", 1, -1, 1, 13)),
    "R4": (lambda rig: as_if_written(rig, 6, 7), {}, ("R4", 0, -1, 2, 6)),
    "R5": (lambda rig: as_if_written(rig, 6, 14), {}, ("R5", 0, -1, 2, 6)),
    "R5 own": (
        lambda rig: as_if_written(rig, 10, 4),
        {"indices": [4, 5, 6, 7, 8, 10, 12, 13, 14, 15]},
        ("R5", 0, -1, 5, 10),
    ),
    "R6": (lambda rig: None, {"truths": [1, 2]}, ("R6", 0, -1, 4, 8)),
    "R7 freed": (lambda rig: rig.state.page_states[2].fill_(record.FREE), {}, ("R7", 0, -1, 4, 8)),
    "R8": (lambda rig: rig.state.owners[1].fill_(BOB), {}, ("R8", 0, -1, 0, 4)),
    "R10": (lambda rig: None, {"prefix_lens": [4, 3]}, ("R10", 0, -1, -1, -1)),
    "R10 past the array": (lambda rig: None, {"indptr": [0, 6, 2**40]}, ("R10", 1, -1, -1, -1)),
    "R12 old grant": (lambda rig: rig.state.generations[1].fill_(2), {}, ("R12", 0, -1, 0, 4)),
    "R12 loading": (lambda rig: rig.state.page_states[1].fill_(record.LOADING), {}, ("R12", 0, -1, 0, 4)),
    "R12 layer": (lambda rig: rig.skipped_layers.add(1), {}, ("R12", 0, 0, -1, 9)),
    "W1": (lambda rig: None, {"slots": [9, 96]}, ("W1", 1, 1, -1, 96)),
    "W1 negative": (lambda rig: None, {"slots": [-(2**50), 15]}, ("W1", 0, 0, -1, -(2**50))),
    "W2": (lambda rig: None, {"slots": [9, 10]}, ("W2", 1, 1, -1, 10)),
    "W3": (lambda rig: rig.state.owners[2].fill_(record.SHARED_OWNER), {}, ("W3", 0, 0, -1, 9)),
    "W4 slot": (lambda rig: None, {"slots": [9, 9], "uids": [ANN, ANN]}, ("W4", 1, 1, -1, 9)),
    "W5": (lambda rig: None, {"positions": [5, 4]}, ("W5", 1, 1, -1, 15)),
    "W7": (lambda rig: rig.state.page_states[2].fill_(record.QUARANTINED), {}, ("W7", 0, 0, -1, 9)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_check_fires_where_the_fault_is(rig, decode, rows, fault):
    """One thing wrong is among the violations with its code, row, entry or place, and slot; nothing is read outside."""
    prepare, changes, expected = FAULTS[fault]
    prepare(rig)
    readback = rig.run(decode, clean(rig, rows, **changes), step=2)
    assert expected in reported(readback)
    assert readback.gaps == [] or fault == "R10 past the array"
    assert {(violation.pool, violation.site, violation.step) for violation in readback.violations} == {
        ("target", ("decode", 0), 2)
    }
    assert bool((rig.registry.shared.claims["target"] == NO_CLAIM).all())
    assert rig.read_back().violations == []


@ON_CPU
def test_interpreted_kernels_tell_the_same(make_static, monkeypatch, static_row, rows):
    """The path of a GPU, kernel by kernel: clean forwards are clean, and a damaged record is named."""
    rig = make_rig(make_static, monkeypatch, "interpreted")
    decode = prefilled(rig, static_row)
    assert reported(rig.run(decode, clean(rig, rows), step=2)) == []
    rig.pool.records[13].zero_()
    assert ("R3", 1, -1, 1, 13) in reported(rig.run(decode, clean(rig, rows, slots=[9, 96]), step=3))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_postponed_forward_tells_the_same(rig, decode, rows, fault):
    """Its stores were admitted before it was opened, and all else was found out behind them."""
    prepare, changes, expected = FAULTS[fault]
    prepare(rig)
    postponed = rig.add("draft", has_truths=True, is_deferred=True)
    assert expected in reported(rig.run(postponed, clean(rig, rows, **changes), step=2))
    assert bool((rig.registry.shared.claims["target"] == NO_CLAIM).all())
    assert rig.read_back().violations == []


def test_a_record_of_a_later_step_is_future(rig, decode, rows):
    """R11: the reader is in an earlier step than the record's writer."""
    readback = rig.run(decode, clean(rig, rows), step=0)
    assert {violation.code for violation in readback.violations} == {"R11"}
    assert len(readback.violations) == counted(rig, decode, "R11") == 8


def test_a_layer_that_stores_twice_is_a_duplicate(rig, decode, rows):
    """W4 by layer, once an entry; the values of the second store count."""
    substep = decode
    rig.before_close = lambda: substep.store(0, *rig.values(0, substep.forward.tokens, substep.forward.positions))
    readback = rig.run(substep, clean(rig, rows), step=2)
    assert reported(readback) == [("W4", 0, 0, -1, 9), ("W4", 1, 1, -1, 15)]
    rig.before_close = lambda: None
    assert rig.run(substep, clean(rig, rows), step=3).violations == []


def test_the_first_store_waits_for_the_plan(rig, decode, rows, monkeypatch):
    """What stands before it does not. It reads nothing early, nor does a layer that stores again.

    A plan that still runs would send it where the forward before wrote.
    """
    order: list[object] = []

    class Noted(SideStream):
        @contextmanager
        def behind(self) -> Iterator[None]:
            order.append("beside")
            with super().behind():
                yield
            order.append("back")

        def join(self) -> None:
            order.append("join")
            super().join()

    plan, store = decode._launch.plan, decode._launch.store

    def noted_store(layer: int, *arguments: object, is_ready: bool, **more: object) -> None:
        order.append((layer, is_ready))
        store(layer, *arguments, is_ready=is_ready, **more)

    monkeypatch.setattr(decode, "_side_stream", Noted(torch.device(rig.device)))
    monkeypatch.setattr(decode._launch, "plan", lambda: (order.append("plan"), plan()))
    monkeypatch.setattr(decode._launch, "store", noted_store)
    rig.before_close = lambda: decode.store(0, *rig.values(0, decode.forward.tokens, decode.forward.positions))
    rig.run(decode, clean(rig, rows), step=2)
    assert order[:5] == ["beside", "plan", "back", "join", (0, False)]
    assert [one for one in order if isinstance(one, tuple)] == [(0, False), (1, True), (0, False)]


def test_a_captured_body_is_judged_behind_its_last_store(rig, decode, rows, monkeypatch):
    """As often as it stored when it ran before; what would come behind that is refused, for nobody would judge it."""
    order: list[str] = []
    again: list[int] = []
    attest, forward = decode._launch.attest, decode.forward

    def before_close() -> None:
        order.append("body")
        for layer in again:
            decode.store(layer, *rig.values(layer, forward.tokens, forward.positions))

    rig.before_close = before_close
    monkeypatch.setattr(decode._launch, "attest", lambda: (order.append("attest"), attest()))
    for is_captured, expected in ((False, "body attest"), (False, "body attest"), (True, "attest body")):
        monkeypatch.setattr(SideStream, "is_captured", is_captured)
        order.clear()
        assert rig.run(decode, clean(rig, rows), step=2).violations == []
        assert order == expected.split()
    again.append(0)
    with pytest.raises(HookOrderError, match="a captured body must store as often as before its capture"):
        rig.run(decode, clean(rig, rows), step=3)


def test_nothing_but_stores_stands_in_a_postponed_body(rig, decode, static_row, monkeypatch):
    """What its forwards read is judged in their order, at a join or before another forward of their pool is planned.

    The first store waits for what admits it, and then reads early what was there before it.
    """
    prefix = [4, 5, 6, 7, 8]
    drafts = [rig.add("draft", index, ancestors=index, is_deferred=True) for index in range(2)]
    chain = [static_row(ANN, [*prefix, 9], [80]), static_row(ANN, [*prefix, 9, 10], [90], prefix_len=5)]
    order: list[object] = []

    def noted(what: object, launch):
        def note(*arguments: object, **more: object) -> None:
            order.append((*what, more["is_ready"]) if "is_ready" in more else what)
            launch(*arguments, **more)

        return note

    for substep in (*drafts, decode):
        for name in ("admit", "plan", "verify_prefixes", "store", "settle"):
            launch = getattr(substep._launch, name)
            monkeypatch.setattr(substep._launch, name, noted((str(substep)[:8], name), launch))
    rig.registry.begin_step(2)
    for draft, row in zip(drafts, chain, strict=True):
        rig.registry.load(draft, rig.batch([row]))
    for draft in drafts:
        rig.body(draft)
    is_gpu = rig.device == "cuda"
    waits = [[False, True], [False, True]] if is_gpu else [[True, True], [True, True]]
    stored = [
        one
        for name, settled in zip(("draft[0]", "draft[1]"), waits, strict=True)
        for one in ((name, "admit"), *((name, "store", flag) for flag in settled))
    ]
    assert order == stored
    order.clear()
    assert (
        rig.run(decode, rig.batch([static_row(ANN, [*prefix, 9], [55])], truths=truths(rig)[:1]), step=2).violations
        == []
    )
    judged = [(name, what) for name in ("draft[0]", "draft[1]") for what in ("plan", "verify_prefixes", "settle")]
    assert order[:7] == [*judged, ("decode o", "plan")]
    with pytest.raises(HookOrderError, match=r"open\(\) must follow admit\(\): nobody says where draft\[0\]"):
        drafts[0].open()


def drafted(rig, static_row, lineage: list[int], ancestors: list[int], live: int = 4) -> list[tuple]:
    """What fires where Ann's two rows and Bob's two draft twice, and the second forward reads these slots of the first.

    live: of the rows, in buckets of six
    """
    rig.grant(ANN, 5)
    drafts = [rig.add("draft", i, rows=6, ancestors=i, width=2, is_deferred=True, has_lineage=i > 0) for i in range(2)]
    heads = [(ANN, [4, 5, 6, 7, 8])] * 2 + [(BOB, [12, 13, 14])] * 2
    first = [static_row(uid, [*head, own], [60 + own]) for (uid, head), own in zip(heads, (9, 10, 15, 16), strict=True)]
    second = [
        static_row(uid, [*head, before, own], [60 + own], prefix_len=len(head))
        for (uid, head), before, own in zip(heads, ancestors, (20, 21, 17, 18), strict=True)
    ]
    rig.registry.begin_step(2)
    rig.registry.load(drafts[0], rig.batch(first[:live]))
    rig.registry.load(drafts[1], rig.batch(second[:live], lineage=lineage[:live]))
    for draft in drafts:
        rig.body(draft)
    rig.registry.join()
    return reported(rig.read_back())


@pytest.mark.parametrize(
    ("lineage", "ancestors", "astray"),
    [
        ([0, 1, 0, 1], [9, 10, 15, 16], []),
        ([1, 1, 1, 0], [10, 10, 16, 15], []),
        ([1, 1, 0, 0], [9, 10, 15, 16], [(0, 5, 9), (3, 3, 16)]),
        ([0, 2, -1, 1], [9, 10, 15, 16], [(1, 5, 10), (2, 3, 15)]),
    ],
)
def test_rows_that_do_not_read_what_they_descend_from(rig, decode, static_row, lineage, ancestors, astray):
    """R5 in front of their own entries, and nothing else."""
    expected = [("R5", row, -1, place, slot) for row, place, slot in astray]
    assert drafted(rig, static_row, lineage, ancestors) == expected


def test_lineages_of_live_rows_alone(rig, decode, static_row):
    """Padding rows have lineages too, and nobody judges these."""
    assert drafted(rig, static_row, [1, 0, 1, 0], [9, 10, 15, 16], live=2) == [
        ("R5", 0, -1, 5, 9),
        ("R5", 1, -1, 5, 10),
    ]


def test_a_lineage_needs_the_forward_before(rig):
    """Of as many rows, in the registry: what it wrote is compared."""
    rig.add("draft", 0, rows=2)
    with pytest.raises(PlanError) as caught:
        rig.add("draft", 1, rows=4, has_lineage=True)
    words = "a lineage names branches of draft[0] of the target pool with 4 rows: add() that before draft[1]"
    assert str(caught.value) == words


def test_padding_outside_null_slots(rig, decode, rows):
    """W9: a padding row that reads, and a padding entry that would write, what is no null slot."""
    batch = clean(rig, rows)
    rig.registry.begin_step(2)
    rig.registry.load(decode, batch)
    buffers = decode.buffers
    buffers.indptr[3:] = torch.tensor([11, 12], device=rig.device)
    buffers.indices[10:12] = torch.tensor([2, 20], device=rig.device)
    buffers.slots[5] = 21
    rig.body(decode)
    assert reported(rig.read_back()) == [("W9", -1, 5, -1, 21), ("W9", 3, -1, -1, 20)]


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_refused_write_changes_nothing(rig, decode, rows, is_deferred):
    """The record, the bytes and the fingerprint of a slot that may not be written stay as they are."""
    decode = rig.add("draft", has_truths=True, is_deferred=is_deferred)
    parts = rig.pool.records[8], rig.kv[:, 8], rig.pool.content_a[:, 8]
    before = [part.clone() for part in parts]
    readback = rig.run(decode, clean(rig, rows, slots=[9, 8]), step=2)
    assert ("W2", 1, 1, -1, 8) in reported(readback)
    assert all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))


def test_tree_nodes_continue_their_parents(rig, decode, static_row):
    """A tree's chains, positions and sites are those that the host computes node by node."""
    parents = [-1, 0, 0, 2]
    row = static_row(ANN, [4, 5, 6, 7, 8, 9, 10, 11, 16], [70, 71, 72, 73], parents)
    rig.grant(ANN, 4)
    rig.grant(BOB, 3)
    substep = rig.add("verify", is_tree=True, max_depth=3)
    assert rig.run(substep, rig.batch([row]), step=2).violations == []
    keys, records = rig.pool.keys, rig.pool.records.cpu()
    above = chain_host([50, 51, 52, 53, 54], 0, rig.pool.root, keys)[-1]
    paths = {9: [70], 10: [70, 71], 11: [70, 72], 16: [70, 72, 73]}
    for node, (slot, tokens) in enumerate(paths.items()):
        found = record.read_record(records, slot)
        assert found.chain == chain_host(tokens, 5, above, keys)[-1]
        assert (found.token, found.position, found.request) == (tokens[-1], 4 + len(tokens), ANN)
        assert (found.step, found.site) == (2, pack_site("verify", 0, node))


def test_draft_rows_read_their_ancestors(rig, decode, static_row):
    """draft[1] reads a branch of draft[0]; branches are numbered in sites, and a row without its ancestor is R10."""
    first, second = rig.add("draft", 0, width=2), rig.add("draft", 1, width=2, ancestors=1)
    prefix = [4, 5, 6, 7, 8]
    branches = [static_row(ANN, [*prefix, slot], [80 + slot]) for slot in (9, 10)]
    assert rig.run(first, rig.batch(branches), step=2).violations == []
    grown = [static_row(ANN, [*prefix, 10, 11], [90], prefix_len=5), static_row(ANN, [*prefix, 9], [91], prefix_len=5)]
    assert reported(rig.run(second, rig.batch(grown[:1]), step=2)) == []
    assert record.read_record(rig.pool.records.cpu(), 10).site == pack_site("draft", 0, 1)
    assert ("R10", 0, -1, -1, -1) in reported(rig.run(second, rig.batch(grown[1:]), step=2))


def test_row_violations_are_those_of_the_last_forward(rig, decode, rows):
    """Entries of each row with a finding, from zero in every forward."""
    rig.pool.records[12].zero_()
    rig.run(decode, clean(rig, rows), step=2)
    assert decode.work.planned.row_violations.tolist() == [0, 2, 0, 0]  # R5 follows R3
    rig.run(decode, clean(rig, rows[:1], truths=truths(rig)[:1], prefix_lens=[3]), step=2)
    assert decode.work.planned.row_violations.tolist() == [2, 0, 0, 0]  # R10 of the row, and R6
    rig.run(decode, clean(rig, rows[:1], truths=truths(rig)[:1]), step=3)
    assert decode.work.planned.row_violations.tolist() == [0] * 4


@pytest.mark.parametrize("following", [slice(1, None), slice(0)], ids=["another row", "padding only"])
def test_a_finding_survives_the_next_forward(rig, decode, rows, following):
    """Codes that a later forward overwrote are told by the first finding that the header keeps."""
    rig.pool.records[6].zero_()
    for batch in (clean(rig, rows), clean(rig, rows[following], truths=truths(rig)[following])):
        rig.registry.begin_step(2)
        rig.registry.load(decode, batch)
        rig.body(decode)
    readback = rig.read_back()
    assert ("R3", 0, -1, 2, 6) in reported(readback)
    assert readback.gaps == []


def test_arm_forgets_what_warm_up_counted(rig, rows):
    """Findings and runs of the time before arm() are not told."""
    substep = rig.add("decode")
    rig.body(substep)
    rig.registry.load(substep, rig.batch(rows))
    rig.body(substep)
    assert int((substep.work.firsts[1] >= 0).all(1).sum()) > 0
    rig.registry.arm()
    readback = rig.read_back()
    assert (readback.violations, readback.gaps) == ([], [])
    assert int((substep.work.firsts[1] >= 0).all(1).sum()) == 0


def test_each_bucket_tells_what_it_found(rig, decode, rows):
    """Two buckets of one forward are one site, and each names the damaged record."""
    rig.pool.records[13].zero_()
    larger = rig.add("decode", rows=6, has_truths=True)
    for substep in (decode, larger):
        rig.registry.begin_step(2)
        rig.registry.load(substep, clean(rig, rows))
        rig.body(substep)
    found = [(violation.code, violation.site) for violation in rig.read_back().violations]
    assert found.count(("R3", ("decode", 0))) == 2


def test_many_findings_are_counted_and_the_first_told(make_static, static_row):
    """Violations are bounded for each check, counts are exact."""
    rig = make_static()
    rig.grant(ANN, *range(1, 24))
    substep = rig.add("decode", indices=96)
    readback = rig.run(substep, rig.batch([static_row(ANN, list(range(4, 92)), [1])]))
    assert counted(rig, substep, "R12") == 87
    assert sum(violation.code == "R12" for violation in readback.violations) == VIOLATIONS_PER_CHECK
