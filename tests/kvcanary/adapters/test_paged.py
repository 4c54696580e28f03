"""A watched pool without an engine around it: on the CPU by references, on a GPU by captured launches."""

from __future__ import annotations

import random

import pytest
import torch

from kvcanary import PoolView
from kvcanary.adapters.observed.incident import blocks_of
from kvcanary.adapters.observed.launches import Launches
from kvcanary.adapters.observed.report import report_step
from kvcanary.adapters.observed.state import Forward
from kvcanary_kernels.watch.reread import LAYERS_PER_ENTRY

from .row_engine import BLOCK, BLOCKS, DIM, HEADS, LAYERS, ROWS, TOKENS, WIDTH, RowEngine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
@pytest.mark.parametrize("device", DEVICES)
def test_sound_rows_have_no_violation(device: str, content: str) -> None:
    """Prefill, decode, many rows at once, an end, a prefix that is resumed; launches are replays."""
    engine = RowEngine(device, content)
    for number in range(3):
        engine.begin(number, [])
    assert engine.step({n: [(7 * n + i) % 50 for i in range(9 + 5 * n)] for n in range(3)}) == 0
    for step in range(12):
        assert engine.step({n: [(step + n) % 50] for n in (2, 0, 1)}) == 0
    engine.end(1)
    kept = list(engine.tokens[1])
    engine.begin(1, kept, 8)
    assert engine.step({1: kept[8:], 0: [3]}) == 0
    engine.canary.admit([(3 + n, f"n{n}", [], 0, "") for n in range(17)])
    assert engine.step({1: [4], 2: [5]}) == 0
    assert engine.canary.memory.truth.ends[3:].tolist() == [0] * 17
    graphs = engine.canary.launches._replays._graphs
    assert ("before" in {key[0] for key in graphs}) == (device == "cuda")
    once = [key[3] for key, graph in graphs.items() if graph is None]
    assert once == ([ROWS] if device == "cuda" else [])  # so many came at once, and only then
    certificate = engine.canary.certificate(range(3))
    assert certificate["slots_checked"] > 500
    assert (certificate["bytes_checked"] > 0) == (content != "write")
    assert [report_step(engine.canary, step) for step in engine.canary.steps] == [0] * len(engine.canary.steps)


@pytest.mark.parametrize("device", DEVICES)
def test_a_changed_bit_counts_in_the_step_that_reads_it(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The count is there when the step's launches are; the finding names request, position, layer and word.

    What closes its report is what was checked by then.
    """
    engine = RowEngine(device)
    for number in range(2):
        engine.begin(number, [])
    engine.step({n: list(range(10 + n)) for n in range(2)})
    block = int(engine.table[1, 1])
    engine.kv[1].view(torch.int32)[block, 1, 2, DIM + 3] ^= 1 << 9
    assert engine.step({0: [1]}) == 0
    assert engine.step({0: [1], 1: [2]}) == 1
    assert report_step(engine.canary, engine.canary.steps[-1]) == 1
    [found] = engine.canary.log.findings
    assert (found.code, found.reader, found.position, found.slot) == ("R9", "r1", 6, block * BLOCK + 2)
    assert (found.layer, found.part, found.head, found.dim, found.bit) == (1, "V", 1, 3, 9)
    checked = engine.canary.certificate()["slots_checked"]
    assert checked > 0
    assert f" {checked:,} slots checked, " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("said", [100, 2**31 - 1])
@pytest.mark.parametrize("content", ["full", "rolling"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_length_that_is_garbage_is_a_finding_like_any_other(
    device: str, content: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And costs no more: rows are judged as far as their tables go, and the last look at this one ends there too."""
    engine = RowEngine(device, content)
    for number in range(2):
        engine.begin(number, [])
    engine.step({number: list(range(10 + number)) for number in range(2)})
    inner = engine.canary.read

    def read(forward: Forward) -> None:
        engine.lengths[1] = said
        inner(forward)

    monkeypatch.setattr(engine.canary, "read", read)
    assert engine.step({0: [1], 1: [2]}) > 0
    assert report_step(engine.canary, engine.canary.steps[-1]) == 1
    [found] = engine.canary.log.findings
    assert (found.code, found.reader, found.position) == ("R4", "r1", 11)
    monkeypatch.setattr(engine.canary, "read", inner)
    engine.end(1)
    engine.step({0: [3]})
    assert engine.canary.certificate([0])["slots_checked"] < 4 * WIDTH * BLOCK


@pytest.mark.parametrize("device", DEVICES)
def test_a_last_look_names_the_slot_that_the_row_had(device: str) -> None:
    """The line of the block table is another's when the host collects it: the slot was noted when it was read."""
    engine = RowEngine(device, "rolling")
    for number in range(2):
        engine.begin(number, [])
    engine.step({n: list(range(9)) for n in range(2)})
    block = int(engine.table[1, 1])
    engine.kv[0].view(torch.int32)[block, 0, 3, 0] ^= 1 << 30
    engine.end(0)
    engine.end(1)
    engine.table[1] = engine.table[0]
    engine.begin(1, engine.tokens[0], 8)
    assert engine.step({1: [8], 0: [5]}) >= 1
    report_step(engine.canary, engine.canary.steps[-1])
    found = next(found for found in engine.canary.log.findings if found.code == "R9")
    assert (found.reader, found.position, found.slot, found.site) == ("r1", 7, block * BLOCK + 3, ("release", 0))


@pytest.mark.parametrize("between", ["nothing", "another row's", "one of no rows"])
@pytest.mark.parametrize("device", DEVICES)
def test_rolling_reads_every_entry_whatever_comes_between(
    device: str, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four forwards of a row read each of its entries once, also where the engine has another in between each time."""
    monkeypatch.setattr("kvcanary.adapters.observed.launches.ROTATION_STEPS", 4)
    engine = RowEngine(device, "rolling")
    for number in range(2):
        engine.begin(number, [])
        engine.step({number: list(range(9))})
    for position in range(4, 8):
        engine.kv[0].view(torch.int32)[int(engine.table[0, 1]), 0, position - 4, 0] ^= 1 << 30
    found = []
    for step in range(4):
        if between == "another row's":
            engine.step({1: [step]})
        elif between == "one of no rows":
            engine.canary.read(engine.forward_of([], 0, []))
        engine.step({0: [step]})
        [own] = engine.canary.violations_of(engine.canary.steps[-1])["read"][0, :, 0].tolist()
        found.append(own // LAYERS_PER_ENTRY)
    assert sorted(found) == [4, 5, 6, 7]


@pytest.mark.parametrize("device", DEVICES)
def test_short_rows_go_on_where_those_before_them_ended(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prefix that many read, each for one forward, all is read again in time."""
    monkeypatch.setattr("kvcanary.adapters.observed.launches.ROTATION_STEPS", 4)
    engine = RowEngine(device, "rolling")
    engine.begin(0, [])
    engine.step({0: list(range(9))})
    for position in range(4, 8):
        engine.kv[0].view(torch.int32)[int(engine.table[0, 1]), 0, position - 4, 0] ^= 1 << 30
    found = []
    for number in range(1, 5):
        engine.table[number] = engine.table[0]
        engine.table[number, 2] = engine.free.pop()
        engine.begin(number, engine.tokens[0], 8)
        engine.step({number: [8]})
        [own] = engine.canary.violations_of(engine.canary.steps[-1])["read"][0, :, 0].tolist()
        found.append(own // LAYERS_PER_ENTRY)
    assert sorted(found) == [4, 5, 6, 7]


@pytest.mark.parametrize("device", DEVICES)
def test_a_swapped_table_is_counted(device: str) -> None:
    """Two blocks exchanged: R4 at the first position of the first, and one count an entry."""
    engine = RowEngine(device, "write")
    engine.begin(0, [])
    engine.step({0: list(range(13))})
    engine.table[0, [0, 2]] = engine.table[0, [2, 0]]
    assert engine.step({0: [7]}) >= 8
    report_step(engine.canary, engine.canary.steps[-1])
    [found] = engine.canary.log.findings
    assert (found.code, found.reader, found.position) == ("R4", "r0", 0)
    assert (found.writer, found.causes[0].family) == ("r0", "addressing")


def test_one_damaged_slot_is_one_finding_that_names_all_who_read_it() -> None:
    """Two requests read a block that the first of them filled: as for pools whose grants are told."""
    engine = RowEngine("cpu")
    engine.begin(0, [])
    engine.step({0: list(range(9))})
    engine.table[1] = engine.table[0]
    engine.table[1, 2] = engine.free.pop()
    engine.begin(1, engine.tokens[0], 8)
    engine.step({1: [8], 0: [5]})
    engine.kv[1].view(torch.int32)[int(engine.table[1, 1]), 1, 2, 3] ^= 1 << 9
    assert engine.step({0: [1], 1: [2]}) == 2
    report_step(engine.canary, engine.canary.steps[-1])
    [found] = engine.canary.log.findings
    assert (found.code, found.readers, found.writer) == ("R9", ("r0", "r1"), "r0")
    assert engine.canary.coverage.fired == {"R9": 2}


def test_slots_that_two_rows_write_are_one_finding() -> None:
    """W4 of each slot of a page: the first is told with its writer, the others are its evidence."""
    engine = RowEngine("cpu", "write")
    for number in range(2):
        engine.begin(number, [])
    engine.table[1] = engine.table[0]
    engine.step({0: [1, 2, 3], 1: [4, 5, 6]})
    report_step(engine.canary, engine.canary.steps[-1])
    [found] = engine.canary.log.findings
    slots = [int(engine.table[0, 0]) * BLOCK + place for place in range(3)]
    assert (found.code, found.slot, found.writer) == ("W4", slots[0], "r1")
    others = [f"W4 duplicate write: target slot {slot}, seen by decode" for slot in slots[1:]]
    assert found.evidence == (f"group 0, block {slots[0] // BLOCK}, offset 0", *others)


def test_launches_know_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows grow to: the same launches for the same number of rows, tokens and events over the same tensors."""
    engine, sizes = RowEngine("cpu"), set()
    replays = engine.canary.launches._replays
    run, places = replays.run, 1 + len(("lengths", "starts", "tokens", "positions", "table"))
    monkeypatch.setattr(replays, "run", lambda key, launch: sizes.add(key[:-places]) or run(key, launch))
    for number in range(2):
        engine.begin(number, [])
    for _ in range(3):
        assert engine.step({0: [1], 1: [1]}) == 0
    known = set(sizes)
    for _ in range(WIDTH * BLOCK - 4):
        assert engine.step({0: [1], 1: [1]}) == 0
    assert sizes == known


def test_a_row_has_the_blocks_of_its_own_entries_alone() -> None:
    """Not those that lie behind them, which a longer request had in the same row: it gave them up, this one did not."""
    engine = RowEngine("cpu")
    [group] = engine.canary.groups
    for length in 11, 2:
        engine.begin(0, [])
        assert engine.step({0: list(range(length))}) == 0
        blocks = -(-length // BLOCK)
        assert blocks_of(engine.canary, 0, group) == engine.table[0, :blocks].tolist()
        engine.end(0)


def planted(engine: RowEngine, layer: int, number: int, position: int, value: float, element: int = 3) -> None:
    """An element that is not finite in the second head, as a forward of these layers would have stored it."""
    block = int(engine.table[number, position // BLOCK])
    engine.kv[layer][block, 1, position % BLOCK, element] = value


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_value_that_is_not_finite_is_told_where_it_was_stored(device: str) -> None:
    """NaN in both layers of one row's prefill: the first layer, its request, position and step, in the step itself."""
    engine = RowEngine(device, "write")
    for number in range(3):
        engine.begin(number, [])
    engine.step({n: list(range(9)) for n in range(2)})

    def spoil() -> None:  # 7 lies behind 5 in the row, and in the layer before
        planted(engine, 1, 2, 5, torch.nan)
        planted(engine, 0, 2, 7, torch.nan)

    engine.spoil = spoil
    assert engine.step({0: [1], 2: list(range(10)), 1: [2]}) == 2
    assert report_step(engine.canary, engine.canary.steps[-1]) == 1
    [found] = engine.canary.log.findings
    assert (found.code, found.writer, found.position, found.step) == ("N1", "r2", 7, 2)
    assert (found.layer, found.layers, found.site) == (0, (0,), ("decode", 0))
    assert found.found["elements"] == "NaN in 1 of 16 elements of K, the first in head 1, dim 3"
    assert found.causes[0].family == "numerics"


@pytest.mark.parametrize("device", DEVICES)
def test_nan_that_spreads_is_one_finding_of_its_first_layer(device: str) -> None:
    """From layer 0 on behind position 4, in later steps and in a row that shares the prefix: one incident, then R8's
    reader names who stored what it read.
    """
    engine = RowEngine(device)
    engine.begin(0, [])

    def spread() -> None:
        planted(engine, 0, 0, 4, torch.inf, element=DIM + 2)
        for position in range(4, 9):
            planted(engine, 1, 0, position, torch.nan)

    engine.spoil = spread
    engine.step({0: list(range(9))})
    report_step(engine.canary, engine.canary.steps[-1])
    engine.spoil = lambda: planted(engine, 1, 0, 9, torch.nan)
    engine.step({0: [5]})
    report_step(engine.canary, engine.canary.steps[-1])
    [found] = engine.canary.log.findings
    assert (found.code, found.writer, found.position, found.step, found.layers) == ("N1", "r0", 4, 1, (0, 1))
    assert found.found["elements"] == "Inf in 1 of 16 elements of V, the first in head 1, dim 2"
    engine.table[1] = engine.table[0]
    engine.table[1, 2] = engine.free.pop()
    engine.begin(1, engine.tokens[0], 8)
    engine.spoil = lambda: planted(engine, 1, 1, 8, torch.nan)
    engine.step({1: [8]})
    report_step(engine.canary, engine.canary.steps[-1])
    second = engine.canary.log.findings[-1]
    assert (second.code, second.writer, second.position, second.step) == ("N1", "r1", 8, 3)
    source = "position 4, l0, stored by decode of 'r0' at step 1"
    assert second.causes[0].evidence == (f"its row has read what is not finite: {source}",)
    assert engine.canary.coverage.fired == {"N1": 3}


def test_what_nobody_reads_may_be_anything() -> None:
    """NaN in the null block, behind the end of a row and in free blocks: no count, before and after a forward."""
    engine = RowEngine("cpu")
    engine.begin(0, [])
    for kv in engine.kv:
        kv[:] = torch.nan
    assert engine.step({0: list(range(9))}) == 0
    assert engine.step({0: [1]}) == 0


def test_the_check_can_be_left_out() -> None:
    """KVCANARY_DISABLE=N1: nothing is counted, and the certificate says so."""
    engine = RowEngine("cpu", disable=frozenset({"N1"}))
    engine.begin(0, [])
    engine.spoil = lambda: planted(engine, 1, 0, 2, torch.nan)
    assert engine.step({0: list(range(9))}) == 0
    assert engine.canary.certificate()["inactive_classes"]["N1"] == "disabled"
    assert "N1" in RowEngine("cpu").canary.certificate()["classes"]


def test_in_a_hundred_of_a_hundred_the_place_is_right() -> None:
    """Any layer, row and position, of prefills and decodes: layer, request, position and step are those of the blow."""
    for seed in range(100):
        draw, engine = random.Random(seed), RowEngine("cpu", ("full", "write")[seed % 2])
        for number in range(3):
            engine.begin(number, [])
        engine.step({n: list(range(draw.randint(1, 12))) for n in range(3)})
        for _ in range(draw.randint(0, 3)):
            assert engine.step({n: [draw.randrange(50)] for n in range(3)}) == 0
        batch = {n: list(range(draw.choice((1, 1, 5, 9)))) for n in draw.sample(range(3), 3)}
        number, layer = draw.randrange(3), draw.randrange(LAYERS)
        position = len(engine.tokens[number]) + draw.randrange(len(batch[number]))
        value, element = draw.choice((torch.nan, torch.inf, -torch.inf)), draw.randrange(2 * DIM)
        place = (layer, number, position, value, element)
        engine.spoil = lambda engine=engine, place=place: planted(engine, *place)
        assert engine.step(batch) == 1
        report_step(engine.canary, engine.canary.steps[-1])
        [found] = engine.canary.log.findings
        where = found.code, found.layer, found.writer, found.position, found.step
        assert where == ("N1", layer, f"r{number}", position, engine.canary.step), seed


def test_a_draft_s_nan_is_told_with_the_next_step() -> None:
    """Layers that a later forward of the step stores: phase draft, with the step that stored it; what was rejected may
    be anything.
    """
    engine = RowEngine("cpu", "write")
    late = [torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2)]
    view = PoolView("draft", [late[0][..., :DIM]], [late[0][..., DIM:]], page_size=BLOCK, layout="HND")
    engine.canary.memory.add_layers(engine.canary.groups[0], view, ["d0"], is_late=True)
    engine.canary.launches = Launches(engine.canary.config, engine.canary.memory, ROWS, TOKENS)
    engine.canary.kept = engine.canary.launches.kept
    engine.canary.violations_of = engine.canary.launches.violations_of
    for number in range(2):
        engine.begin(number, [])

    def drafted(rejected: list[int]) -> None:
        for number, position in (0, 8), (1, 8):
            late[0][int(engine.table[number, position // BLOCK]), 1, position % BLOCK, DIM] = torch.nan
        engine.canary.took(torch.tensor(rejected))

    assert engine.step({n: list(range(9)) for n in range(2)}) == 0
    drafted([1, 0])
    assert report_step(engine.canary, engine.canary.steps[-1]) == 1
    [found] = engine.canary.log.findings
    assert (found.code, found.writer, found.position, found.site) == ("N1", "r1", 8, ("draft", 0))
    assert (found.step, found.pool, found.layers) == (1, "draft", (0,))
    assert engine.step({n: [3] for n in range(2)}) == 1  # one entry, told once
    assert report_step(engine.canary, engine.canary.steps[-1]) == 0
    assert engine.canary.certificate()["watched"] == [
        {"pool": "target", "layers": 2, "parts": {"K": "float32 [2, 8]", "V": "float32 [2, 8]"}},
        {"pool": "draft", "layers": 1, "parts": {"K": "float32 [2, 8]", "V": "float32 [2, 8]"}},
    ]
