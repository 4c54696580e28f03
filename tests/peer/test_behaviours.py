"""Behaviours and limits of other canaries, re-enacted against ours through the manager's public calls.

`index.toml` says which test answers which behaviour or limit; those that other folders show already are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from kvcanary import CanaryConfig, Finding, KVCorruptionError, PlanError, PoolView, ReadPlan, WritePlan
from kvcanary.config import ROTATION_STEPS
from kvcanary.sweep import STRIDE
from kvcanary_kernels.count import count_torch, unset_first
from kvcanary_tools.bench.toy_engine import ToyEngine
from kvcanary_tools.bench.toy_forwards import ToyRow, ToyShape

EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., ToyEngine]]:
    """A toy engine by keyword settings; those of ToyShape go there, the others to CanaryConfig."""

    def make(**settings: object) -> ToyEngine:
        shape = {name: settings.pop(name) for name in list(settings) if name in ToyShape.__dataclass_fields__}
        return ToyEngine(CanaryConfig(**{"content": "full", "seed": 7, **settings}), ToyShape(**shape))

    with torch.inference_mode():
        yield make


@pytest.fixture
def engine(make_engine) -> ToyEngine:
    """Two requests, one drafting step behind their prompts."""
    engine = make_engine()
    engine.start("first", 13)
    engine.start("second", 9)
    engine.draft()
    engine.canary.drain()
    return engine


def found(run: Callable[..., object], *arguments: object) -> list[Finding]:
    """The findings with which a call is stopped."""
    with pytest.raises(KVCorruptionError) as caught:
        run(*arguments)
    return list(caught.value.findings)


def places(findings: list[Finding]) -> list[tuple[str, int, int | None]]:
    return [(finding.code, finding.slot, finding.position) for finding in findings]


def slot_of(engine: ToyEngine, name: str, position: int) -> int:
    return int(engine.rows[name].slots[position])


def bits(engine: ToyEngine, layer: int, slot: int, part: str = "K", pool: str = "target") -> Tensor:
    """The bits of one row, [heads * head_dim] int32 in the pool's memory."""
    return engine.pools[pool].kv[layer, slot, "KV".index(part)].view(torch.int32).flatten()


def with_entry(tensor: Tensor, place: int, value: int) -> Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


def on(kind: str, change: Callable[..., object], pool: str | None = None) -> Callable[..., object]:
    """A hook of the toy engine that changes plans of this kind alone."""
    return lambda k, index, p, plan: change(plan) if k == kind and pool in (None, p) else plan


# what a row is


def test_a_row_of_one_token_is_right(make_engine):
    """One token at position 0 continues the root; as the start of another row it would not be found right."""
    engine = make_engine()
    engine.start("only", [5])
    engine.decode()
    engine.draft()
    engine.finish("only")
    assert engine.canary.findings == []


def test_a_row_that_begins_with_another_token_is_not_the_request_s(make_engine):
    """The single token of a row is judged at its write, not by a successor."""
    engine = make_engine()
    engine.change_write = on("prefill", lambda plan: replace(plan, tokens=plan.tokens + 1), "target")
    assert places(found(engine.start, "only", [5])) == [("W6", slot_of(engine, "only", 0), 0)]


def test_the_newest_token_of_a_row_is_protected_where_it_is_read(make_engine):
    """Also without the check at the write: the record itself is compared with the request's own tokens."""
    engine = make_engine(disable={"W6"})
    engine.change_write = on("prefill", lambda plan: replace(plan, tokens=plan.tokens + 1), "target")
    engine.start("only", [5])
    assert places(found(engine.decode)) == [("R6", slot_of(engine, "only", 0), 0)]


@pytest.mark.parametrize(("pool", "place"), [("target", 3), ("target", 8), ("draft", 3), ("draft", 7)])
def test_another_token_than_the_request_s_is_found_once(make_engine, pool, place):
    """A wrong input token is one finding at its write, and those behind it none; a draft row is one token ahead."""
    engine = make_engine()
    engine.change_write = on(
        "prefill", lambda plan: replace(plan, tokens=plan.tokens ^ (plan.positions == place)), pool
    )
    (finding,) = found(engine.start, "only", 9)
    assert (finding.code, finding.pool, finding.position, finding.evidence) == ("W6", pool, place, ())


def test_a_token_that_the_host_learns_later_is_judged_by_its_first_reader(make_engine):
    """The last entry of a draft prefill is fed what was sampled in the same step; wrong, it is no request's row."""
    engine = make_engine()
    engine.change_write = on("prefill", lambda plan: replace(plan, tokens=plan.tokens ^ (plan.positions == 8)), "draft")
    engine.start("only", 9)
    (finding,) = found(engine.draft)
    assert (finding.code, finding.pool, finding.position, finding.evidence) == ("R6", "draft", 8, ())


@pytest.mark.parametrize("length", [5, 200])
def test_extreme_tokens_are_right_on_host_and_device(make_engine, length):
    """Host truth and records agree for every 32-bit token, in chunks of few entries and of many."""
    engine = make_engine()
    engine.start("only", (EXTREMES * length)[:length])
    engine.decode()
    engine.draft()
    engine.finish("only")
    assert engine.canary.findings == []


@pytest.mark.parametrize("start", [1, 7])
def test_a_first_prefill_at_wrong_positions_is_found_at_once(make_engine, start):
    """Positions that do not begin at 0 are found in the forward that writes them, not in the next one."""
    engine = make_engine()
    engine.change_write = on("prefill", lambda plan: replace(plan, positions=plan.positions + start), "target")
    (finding,) = found(engine.start, "only", 4)
    assert (finding.code, finding.position, finding.step) == ("W5", start, 1)


def test_truth_that_is_not_known_is_counted_not_assumed(engine):
    """Rows whose tokens the host was not told are neither a finding nor silently right."""
    engine.canary.append = lambda *_: None
    engine.decode("first")
    engine.draft("first")
    assert engine.canary.findings == []
    assert engine.canary.certificate()["unchecked"].get("truth not known to the host", 0) > 0


# what is read


def test_a_zeroed_entry_is_a_null_slot_and_its_successor_stays_checked(engine):
    """An unfilled mapping is named at its place, and so is a fault right behind it."""
    other = slot_of(engine, "second", 6)
    engine.rows["first"].slots[5] = 0
    assert places(found(engine.decode, "first")) == [("R2", 0, 5)]
    engine.rows["first"].slots[6] = other
    (finding,) = found(engine.decode, "first")
    assert any("R8" in line and str(other) in line for line in finding.evidence)


def test_what_attention_reads_is_judged_not_the_row_s_own_slots(engine):
    """The engine's table is right and the forward's index array is not: the array decides."""
    other = slot_of(engine, "second", 2)
    engine.change_read = on("verify", lambda plan: replace(plan, indices=with_entry(plan.indices, 2, other)))
    table = engine.rows["first"].slots.copy()
    assert places(found(engine.draft, "first")) == [("R8", other, 2)]
    assert np.array_equal(engine.rows["first"].slots[: len(table)], table)


def test_a_rejected_draft_slot_that_is_read_again_is_found(make_engine):
    """A node that acceptance dropped is no entry of the row, whatever it holds."""
    engine = make_engine(page_size=1, num_pages=256)
    engine.start("only", 9)
    engine.random.randrange = lambda *_: 0  # the root alone is accepted
    engine.draft()
    del engine.random.randrange
    row = engine.rows["only"]
    assert row.committed == 10
    rejected = int(row.slots[11])
    engine.change_read = on("decode", lambda plan: replace(plan, indices=with_entry(plan.indices, 9, rejected)))
    (finding,) = found(engine.decode)
    assert (finding.code, finding.slot) == ("R4", rejected)


def test_a_forward_without_rows_is_nothing(engine):
    """An empty plan is opened and closed, and counts nothing."""
    nothing = torch.zeros(0, dtype=torch.int64)
    counted = ("slots_checked", "slots_sealed", "bytes_checked", "findings", "unchecked")
    before = engine.canary.certificate()
    engine.begin()
    read = ReadPlan(torch.zeros(1, dtype=torch.int64), nothing, (), 1, nothing, 0)
    substep = engine.canary.substep("decode", 0, "target")
    substep.open(read, WritePlan(nothing, nothing, nothing))
    substep.close()
    engine.canary.check()
    after = engine.canary.certificate()
    assert [after[key] for key in counted] == [before[key] for key in counted]


def test_a_row_that_writes_nothing_is_read_all_the_same(engine):
    """A request without new entries in a forward is judged, and nothing of it is written."""
    engine.begin()
    row = engine.rows["first"]
    slots, length = torch.from_numpy(row.slots[: row.committed].copy()), torch.tensor([row.committed])
    nothing = slots[:0]
    read = ReadPlan(torch.tensor([0, row.committed]), slots, ("first",), 1, length, torch.tensor([0]))
    checked = engine.canary.certificate()
    substep = engine.canary.substep("extend", 0, "target")
    substep.open(read, WritePlan(nothing, nothing, nothing))
    substep.close()
    engine.canary.check()
    certificate = engine.canary.certificate()
    assert certificate["slots_checked"] == checked["slots_checked"] + row.committed
    assert certificate["slots_sealed"] == checked["slots_sealed"]


def test_each_of_40000_entries_is_checked_once(make_engine):
    """A row of many thousands of entries is counted whole, and a fault in its last one is found."""
    engine = make_engine(layers=1, heads=1, page_size=64, num_pages=700)
    engine.start("only", 40_000)
    before = engine.canary.certificate()["slots_checked"]
    engine.decode()
    assert engine.canary.certificate()["slots_checked"] == before + 40_001
    last = slot_of(engine, "only", 39_999)
    bits(engine, 0, last)[0] ^= 1
    assert places(found(engine.decode)) == [("R9", last, 39_999)]


# what is written


def test_a_skipped_slot_is_one_finding_and_its_successors_are_right(engine):
    """Slot -1 is refused and named; the next token of the chain has no wrong position."""
    engine.change_write = on("verify", lambda plan: replace(plan, slots=with_entry(plan.slots, 2, -1)))
    (finding,) = found(engine.draft, "first")
    assert (finding.code, finding.slot) == ("W1", -1)
    assert not any("W5" in line for line in finding.evidence)


def test_a_store_that_went_elsewhere_is_found(engine):
    """The hash is of the values that the body stored, so that a slot which never got them is not blessed."""
    engine.change_store = lambda kind, index, pool, layer, slots, k, v: (
        (slots * 0, k, v) if (kind, layer) == ("decode", 1) else (slots, k, v)
    )
    position = engine.rows["first"].committed
    (finding,) = found(engine.decode, "first")
    assert (finding.code, finding.slot, finding.layers) == ("R9", slot_of(engine, "first", position), (1,))


def test_two_requests_that_write_one_slot_are_found(engine):
    """Double allocation at a branch point: the page has one owner, so that the other's write is refused and named."""
    shared = int(engine.rows["first"].slots[engine.rows["first"].committed])
    engine.change_write = on("decode", lambda plan: replace(plan, slots=with_entry(plan.slots, 1, shared)))
    (finding,) = found(engine.decode)
    assert (finding.code, finding.slot, finding.writer, finding.owner) == ("W2", shared, "second", "first")


def test_bytes_that_move_without_a_word_are_found(engine):
    """An accepted node is copied forward and its record is not: the slot no longer holds what was written there."""
    row = engine.rows["first"]
    kv = engine.pools["target"].kv
    kv[:, row.slots[4]] = kv[:, row.slots[5]]
    assert places(found(engine.decode, "first")) == [("R9", slot_of(engine, "first", 4), 4)]


def test_copied_entries_are_written_and_no_others(engine):
    """A declared copy into a row counts as its writing, as far as it reaches: one entry more is a missing hook."""
    engine.fork("first", "copy", 8, 5)
    engine.canary.drain()
    engine.canary.commit("copy", 6)
    (finding,) = found(engine.canary.drain)
    assert (finding.code, finding.reader, finding.expected, finding.found) == (
        "H1",
        "copy",
        {"entries": 6},
        {"entries": 5},
    )


def test_what_was_written_long_ago_and_just_now_moves_together(make_engine):
    """Fingerprints that are taken already and values that wait for theirs may be sources of one move."""
    engine = make_engine(content="rolling", num_pages=200)
    engine.start("only", 300)
    engine.decode()
    engine.fork("only", "copy", 302, 301)
    for name in ("copy", "only"):
        engine.finish(name)
    assert engine.canary.findings == []


@pytest.mark.parametrize("size", [1, 4])
def test_a_full_page_can_be_published_as_soon_as_its_tokens_are_known(make_engine, size):
    """The draft pool's last entry comes behind the commit; what is full in both pools is final, and may be shared."""
    engine = make_engine(page_size=size, num_pages=200)
    engine.start("first", 7)
    engine.decode()
    assert engine.share("first") == 8 // size
    engine.admit("second", engine.rows["first"].tokens)
    assert engine.acquire("second") == 8 // size
    engine.prefill({"second": 9})
    engine.draft()
    for name in ("first", "second"):
        engine.finish(name)
    assert engine.canary.findings == []


def test_a_plan_may_change_after_the_body_ran(engine):
    """Models that count positions up in place cause no false alarm: what was planned is what was opened."""
    positions = []

    def keep(plan: WritePlan) -> WritePlan:
        positions.append(plan.positions)
        return plan

    def count_up(kind, index, pool, layer, slots, k, v):
        if (kind, layer) == ("decode", 1):
            positions[-1] += 1
        return slots, k, v

    engine.change_write, engine.change_store = on("decode", keep), count_up
    engine.decode()
    engine.decode()
    assert engine.canary.findings == []


def test_an_error_of_the_model_stays_the_error(engine):
    """A body that fails is not hidden behind an error of the canary."""

    def fail(*_: object) -> None:
        raise ArithmeticError("the model failed")

    engine.change_store = fail
    with pytest.raises(ArithmeticError, match="the model failed"):
        engine.decode()


# which bytes are covered


@pytest.mark.parametrize(("layer", "part"), [(0, "K"), (0, "V"), (69, "K"), (69, "V")])
def test_the_last_of_many_layers_is_covered(make_engine, layer, part):
    """K and V of all of 70 layers are covered from their first bit to their last."""
    engine = make_engine(layers=70)
    engine.start("only", 6)
    row = bits(engine, layer, slot_of(engine, "only", 3), part)
    row[-1] ^= 1 << 30
    (finding,) = found(engine.decode)
    assert (finding.code, finding.position, finding.layers, finding.part) == ("R9", 3, (layer,), part)


@pytest.mark.parametrize("position", [15, 16])
def test_the_borders_of_a_page_are_covered(make_engine, position):
    """The last slot of a page and the first of the next are told apart, and named."""
    engine = make_engine(page_size=16, num_pages=16)
    engine.start("only", 20)
    slot = slot_of(engine, "only", position)
    bits(engine, 1, slot, "V")[0] ^= 1
    (finding,) = found(engine.decode)
    assert (finding.slot, finding.position, finding.offset) == (slot, position, position % 16)


def test_the_last_slot_of_the_pool_is_covered(make_engine):
    """Records and fingerprints reach as far as the pool does."""
    engine = make_engine(num_pages=4)
    engine.pages.free = [3]
    engine.start("only", 3)
    engine.decode()
    last = engine.shape.num_slots - 1
    assert slot_of(engine, "only", 3) == last
    bits(engine, 1, last, "V")[-1] ^= 1
    assert places(found(engine.finish, "only")) == [("R9", last, 3)]


@pytest.mark.parametrize("what", ["layers", "parts"])
def test_exchanged_sources_are_found(engine, what):
    """K of two layers, or K and V of one, exchanged: the same words in another order are another content."""
    slot = slot_of(engine, "first", 4)
    pairs = {"layers": ((0, "K"), (1, "K")), "parts": ((1, "K"), (1, "V"))}[what]
    one, other = (bits(engine, layer, slot, part) for layer, part in pairs)
    one[:], other[:] = other.clone(), one.clone()
    (finding,) = found(engine.decode, "first")
    assert (finding.code, finding.slot) == ("R9", slot)
    assert set(finding.layers) == {layer for layer, _ in pairs}


def test_content_write_never_compares_bytes(make_engine):
    """With nothing to compare no byte of the pool is read, a changed one is no finding, and the certificate says so."""
    engine = make_engine(content="write")
    engine.start("only", 6)
    bits(engine, 1, slot_of(engine, "only", 2))[0] ^= 1
    engine.decode()
    engine.finish("only")
    certificate = engine.canary.certificate()
    assert (certificate["findings"], certificate["bytes_checked"]) == ([], 0)
    assert "R9" in certificate["inactive_classes"]


def test_a_pool_without_layers_is_refused(make_engine):
    """A model none of whose layers uses this pool is a sentence at attach time, not an error of an index."""
    with pytest.raises(PlanError, match="pool 'full': k and v must have one tensor a layer, got 0 and 0"):
        PoolView("full", (), (), 4)


# pages of many, and bytes from elsewhere


def cached(engine: ToyEngine, pool: str = "target") -> tuple[list[int], int]:
    """Tokens of a request that has ended, and the slot of one of its entries that the prefix cache keeps."""
    engine.start("ended", 9)
    tokens, slot = engine.rows["ended"].tokens, slot_of(engine, "ended", 5)
    engine.share("ended")
    engine.finish("ended")
    return tokens, slot


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_flip_in_an_idle_cached_page_is_found_in_turn(make_engine, pool):
    """What no request holds is read again within a rotation, in its own pool."""
    engine = make_engine(content="rolling")
    _, slot = cached(engine)
    bits(engine, 0, slot, pool=pool)[0] ^= 1
    (finding,) = found(lambda: [(engine.begin(), engine.canary.check()) for _ in range(ROTATION_STEPS)])
    assert (finding.code, finding.pool, finding.slot, finding.site[0]) == ("R9", pool, slot, "sweep")


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_flip_in_a_cached_page_is_found_by_its_hit(make_engine, pool):
    """A hit reads its pages whole, before the forward that computes behind them gives a token."""
    engine = make_engine(content="rolling")
    tokens, slot = cached(engine)
    bits(engine, 0, slot, pool=pool)[0] ^= 1
    engine.admit("hit", tokens[:9])
    assert engine.acquire("hit") == 2
    (finding,) = found(engine.prefill, {"hit": 9})
    assert (finding.code, finding.pool, finding.slot, finding.reader) == ("R9", pool, slot, "hit")


@pytest.mark.parametrize("event", ["share", "acquire"])
def test_a_look_between_two_steps_does_not_count_as_the_next_one(make_engine, event):
    """With a budget for all bytes the step after a publication, or after a hit, reads them again."""
    engine = make_engine(content="rolling", budget=1 << 30)
    engine.start("only", 9)
    engine.share("only")
    if event == "acquire":
        engine.admit("hit", engine.rows["only"].tokens[:9])
        engine.acquire("hit")
        engine.finish("only")
    slot = slot_of(engine, "only" if event == "share" else "hit", 5)
    bits(engine, 0, slot)[0] ^= 1
    engine.begin()
    (finding,) = found(engine.canary.check)
    assert (finding.code, finding.slot, finding.last_good_step) == ("R9", slot, 1)


@pytest.mark.parametrize("named", [{"salt": "weights 2"}, {"adapter": "lora"}], ids=str)
def test_equal_tokens_of_another_namespace_are_another_row(make_engine, named):
    """A cache that forgets what else K and V depend on is found where the row begins; its clean twin is not."""
    engine = make_engine()
    tokens, _ = cached(engine)
    engine.admit("same", tokens[:9])
    engine.acquire("same")
    engine.prefill({"same": 9})
    engine.rows["other"] = ToyRow(tokens[:9], 9)
    engine.canary.admit("other", tokens[:9], **named)
    engine.acquire("other")
    assert ("R5", slot_of(engine, "other", 0), 0) in places(found(engine.prefill, {"other": 9}))


def test_drafting_over_a_shared_prefix_is_watched(make_engine):
    """Two requests draft over the pages of one; what is damaged there is one finding that names both."""
    engine = make_engine()
    engine.start("first", 10)
    engine.fork_by_reference("first", "second")
    for _ in range(3):
        engine.draft()
    assert engine.canary.findings == []
    slot = slot_of(engine, "second", 5)
    assert slot == slot_of(engine, "first", 5)
    bits(engine, 1, slot)[0] ^= 1
    (finding,) = found(engine.draft)
    assert (finding.code, finding.slot, set(finding.readers)) == ("R9", slot, {"first", "second"})


def load(engine: ToyEngine, ends: str) -> list[int]:
    """A prefix of 8 entries comes from elsewhere, to a request of 9 tokens; how its load has ended so far."""
    engine.start("away", 9)
    old = engine.rows["away"]
    kept = {name: pool.kv[:, old.slots[:8]].clone() for name, pool in engine.pools.items()}
    engine.finish("away")
    engine.begin()
    engine.admit("back", old.tokens[:9])
    row, row.pages = engine.rows["back"], engine.pages.take(2, engine.num_steps)
    row.slots, row.committed = engine._slots_of(row.pages), 8
    engine.canary.on_alloc("back", row.pages, for_load=True)
    engine.canary.on_load_begin("back", row.pages)
    for name, pool in engine.pools.items():
        pool.kv[:, row.slots] = kept[name]
    if ends == "end":
        engine.canary.on_load_end("back", row.pages, 8)
        engine.canary.commit("back", 8)
    elif ends == "fail":
        engine.canary.on_load_fail("back", row.pages)
    return row.pages


def test_a_loaded_prefix_is_right(make_engine):
    """Bytes that were away are the request's row again, and are watched from then on."""
    engine = make_engine()
    load(engine, "end")
    engine.prefill({"back": 9})
    engine.draft()
    assert engine.canary.findings == []
    bits(engine, 1, slot_of(engine, "back", 3))[0] ^= 1
    assert places(found(engine.decode)) == [("R9", slot_of(engine, "back", 3), 3)]


@pytest.mark.parametrize("ends", ["not yet", "fail"])
def test_a_prefix_that_is_not_loaded_is_not_read(make_engine, ends):
    """Before its load has ended, and when it has failed, a page holds nothing for a forward, whatever lies there."""
    engine = make_engine()
    pages = load(engine, ends)
    assert {(finding.code, finding.page) for finding in found(engine.prefill, {"back": 9})} == {("R12", pages[0])}


# who looks, and when


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_flip_in_a_request_that_nobody_steps_is_found_by_the_sweep(make_engine, pool):
    """Committed bytes that no forward reads are read by the rolling check, in every pool."""
    engine = make_engine(content="rolling", budget=1 << 30)
    engine.start("idle", 9)
    engine.start("busy", 9)
    slot = slot_of(engine, "idle", 4)
    bits(engine, 0, slot, pool=pool)[0] ^= 1
    (finding,) = found(engine.decode, "busy")
    assert (finding.code, finding.pool, finding.slot, finding.site) == ("R9", pool, slot, ("sweep", 0))


def test_the_automatic_sweep_reads_every_few_steps_and_writes_nothing(make_engine):
    """Bytes are read in the steps that are multiples of the stride alone, and no record changes for it."""
    engine = make_engine(content="rolling")
    engine.start("only", 40)
    certificate = engine.canary.certificate()
    for _ in range(3 * STRIDE):
        engine.begin()
        engine.canary.check()
        after = engine.canary.certificate()
        assert (after["bytes_checked"] > certificate["bytes_checked"]) == (engine.num_steps % STRIDE == 0)
        assert after["slots_sealed"] == certificate["slots_sealed"]
        certificate = after
    engine.finish("only")
    assert engine.canary.findings == []


@pytest.mark.parametrize(("look", "site"), [("decode", "decode"), ("draft", "verify"), ("finish", "release")])
def test_a_finding_names_who_looked(make_engine, look, site):
    """The same fault carries the forward, or the look of the canary's own, that found it."""
    engine = make_engine(content="rolling" if look == "finish" else "full")
    engine.start("only", 9)
    bits(engine, 1, slot_of(engine, "only", 4))[0] ^= 1
    (finding,) = found(getattr(engine, look), "only")
    assert (finding.code, finding.site[0]) == ("R9", site)


def test_drain_judges_what_no_check_has_seen(engine):
    """The extend forward comes behind the step's check: at idle its finding is not lost."""
    engine.change_write = on("extend", lambda plan: replace(plan, positions=plan.positions + 1))
    engine.decode()
    assert engine.canary.findings == []
    assert {finding.code for finding in found(engine.canary.drain)} == {"W5"}


def test_a_forward_without_hooks_is_told_in_its_step(engine):
    """What is counted are entries: tokens that became final and that no hook has seen are missing at once."""
    forward = engine._forward
    engine._forward = lambda kind, *plans: None if kind == "decode" else forward(kind, *plans)
    committed = engine.rows["first"].committed
    engine.decode("first")
    (finding,) = found(engine.canary.drain)
    assert (finding.code, finding.reader, finding.step) == ("H1", "first", engine.num_steps)
    assert finding.expected == {"entries": committed + 1}


def test_what_is_switched_off_does_not_count_as_standing_still(make_engine):
    """Without content checks and poison, and with idle steps, 120 steps pass; the certificate says what was off."""
    engine = make_engine(content="write", poison="off", num_pages=64)
    engine.start("only", 5)
    for _ in range(60):
        engine.decode()
        engine.begin()
        engine.canary.check()
    assert engine.canary.findings == []
    assert engine.canary.certificate()["inactive_classes"]["R9"] == "content is not compared"


def test_counters_are_told_every_hundred_steps(make_engine):
    """Metrics without a finding: one event with totals and with what was added."""
    engine = make_engine()
    engine.start("only", 5)
    with capture_logs() as logs:
        for _ in range(99):
            engine.begin()
            engine.canary.check()
    (event,) = (log for log in logs if log["event"] == "kvcanary.stats")
    assert event["totals"]["slots_checked"] == engine.canary.certificate()["slots_checked"] > 0


# what a finding does


def test_50_faults_in_one_step_are_50_findings(make_engine):
    """All are counted, whatever their order."""
    engine = make_engine(mode="log", page_size=1, num_pages=300)
    engine.start("only", 200)
    struck = [slot_of(engine, "only", position) for position in range(0, 200, 4)]
    for slot in struck:
        bits(engine, 1, slot)[0] ^= 1
    with capture_logs() as logs:
        engine.decode()
    assert sorted(finding.slot for finding in engine.canary.findings) == sorted(struck)
    assert len(logs) == engine.canary.certificate()["findings"][0]["count"] == 50


def test_raise_lists_every_fault_of_the_step(engine):
    """One exception for two faults of two requests, each named with its reader."""
    for name in ("first", "second"):
        bits(engine, 1, slot_of(engine, name, 4))[0] ^= 1
    assert {(finding.code, finding.reader) for finding in found(engine.decode)} == {("R9", "first"), ("R9", "second")}


def fault_out_of_range(engine: ToyEngine) -> None:
    engine.rows["first"].slots[2] = 10**9


def fault_write_out_of_range(engine: ToyEngine) -> None:
    engine.change_write = on("decode", lambda plan: replace(plan, slots=with_entry(plan.slots, 0, -1)))


def fault_foreign_row(engine: ToyEngine) -> None:
    engine.rows["first"].slots[:8] = engine.rows["second"].slots[:8]


def fault_lost_stores(engine: ToyEngine) -> None:
    engine.change_store = lambda *_: None


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (fault_out_of_range, "R1"),
        (fault_write_out_of_range, "W1"),
        (fault_foreign_row, "R8"),
        (fault_lost_stores, "R12"),
    ],
)
def test_log_serves_on_whatever_it_finds(make_engine, fault, code):
    """No kind of finding ends the process in mode log, and tokens keep coming."""
    engine = make_engine(mode="log")
    engine.start("first", 13)
    engine.start("second", 9)
    fault(engine)
    with capture_logs():
        for _ in range(5):
            engine.decode()
        engine.finish("first")
        engine.canary.drain()
    assert code in {group["code"] for group in engine.canary.certificate()["findings"]}
    assert len(engine.rows["second"].tokens) == 9 + 1 + 5


def test_counters_count_on_beyond_32_bits():
    """Totals of findings are 64-bit: they neither wrap nor point anywhere."""
    counts, rows = torch.full((64,), 2**31 - 1), torch.full((1,), 2**32 - 1)
    one = torch.ones(1, dtype=torch.int64)
    header = {"counts": counts, "first": unset_first("cpu"), "row_violations": rows, "arrivals": one - 1}
    count_torch(one, one, starts=one - 1, lengths=one, step=one, **header)
    assert (int(counts[0]), int(rows[0])) == (2**31, 2**32)


def test_the_same_traffic_gives_the_same_records(make_engine):
    """Judging is a function of what it is given: two canaries with one seed write the same bits and count the same."""
    states = []
    for _ in range(2):
        engine = make_engine()
        engine.start("first", 13, chunks=3)
        engine.start("second", 9)
        for _ in range(4):
            engine.draft()
        engine.canary.drain()
        states.append((engine.canary.certificate(), engine.canary._state.records.clone()))
    (first, records), (second, again) = states
    assert first == second
    assert torch.equal(records, again)
