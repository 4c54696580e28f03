"""Lines of captured forwards: the loop that looks through them leaves to the rules exactly what they would name."""

from __future__ import annotations

import random
from array import array
from itertools import accumulate, chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvcanary import PoolView
from kvcanary.captured.decoded import CollectedRun, DecodedForward
from kvcanary.captured.kernel_launches import HEADER
from kvcanary.captured.launch_group import Launched
from kvcanary.captured.moves import LaunchedMove
from kvcanary.captured.step import CapturedStep
from kvcanary.captured.substep import MASKS, SAFE, message_struct
from kvcanary.checks.fast_path import RunReader
from kvcanary.checks.lengths import judge_mask
from kvcanary.checks.tokens import judge_tokens
from kvcanary.ledger.ledger import Ledger, Role
from kvcanary.ledger.page_states import WRITTEN
from kvcanary.ledger.requests import Batch
from kvcanary.native.layout import (
    ALL_DONE,
    FINAL,
    HAS_MORE,
    HAS_RUN,
    IS_SHORT,
    LEFT_TO_RULES,
    MESSAGE_BITS,
    MOVE,
    NOT_QUIET,
    NOWHERE,
    PAGES_FRESH,
    ROWS,
    RUN,
    RUN_BITS,
    SAID,
    UNKNOWN,
)
from kvcanary.recorder.kept_forwards import RecordedMove
from kvcanary.records.mailbox import Message, PackedMask
from kvcanary.records.record_store import RecordStore
from kvcanary.records.state import CanaryState
from kvcanary_kernels.judge.count import NUM_BITS
from kvcanary_kernels.judge.settle import NUM_RUNS, RUN_READ
from kvcanary_kernels.judge.settle import RUN_WRITTEN as RUN_ENTRIES

ROOM = 3  # rows of the bucket; two of them are live
NODES = 3
ROW_LEN, TURN = 6, 5  # of rows into which something moves, and of the move
JUDGED = 7  # a slot whose record was judged
PARTS = ("bounds", "starts", "ends", "slots", "tokens", "positions", "parents", "safe", "ancestors")


class World:
    """Two requests with ten known tokens in twelve slots each, of a vocabulary of 50."""

    def __init__(self) -> None:
        kv = torch.zeros(2, 40, 1, 1)
        self.state = CanaryState([PoolView("target", [kv[0]], [kv[1]], 4, vocab_size=50)], 3)
        self.ledger = Ledger(10, 4, 1, self.state.keys, [Role("target")])
        self.record_store = RecordStore(self.state)
        self.run_reader = RunReader(self.state, self.ledger.pages, self.record_store)
        for name, pages in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
            self.ledger.admit(name, range(10, 20), 0)
            self.ledger.grant(name, pages, 0)

    def run(self, kind: str, line: Message, is_tree: bool, has_lineage: bool = False) -> Launched:
        forward = {"num_entries": 9, "num_rows": ROOM, "ancestors": 0, "indices": None}
        substep = SimpleNamespace(
            site=(kind, 0),
            number=0,
            pool=self.state.pools[0],
            width=1,
            masks=PackedMask(torch.zeros(ROOM, NODES, NODES, dtype=torch.bool)) if is_tree else None,
            forward=SimpleNamespace(lineage=torch.zeros(ROOM) if has_lineage else None, **forward),
            written=SimpleNamespace(message_of=lambda turn: line),
            num_kept=line.where[MASKS].stop,
        )
        self.message_struct = message_struct(substep)
        batch, written = Batch(self.ledger.requests.values()), array("q", [0, 0])
        rows = array("q", [UNKNOWN] * (2 * ROWS.size + 1))
        reported = 0, 1, rows.buffer_info()[0], written.buffer_info()[0], 0, 0, substep.num_kept, 0
        self.struct = self.message_struct.buffer_info()[0], line.at, 0, *batch.loop_arguments, *reported
        return Launched(substep, batch, rows, 1, 0, line, written)

    def read(self, run: Launched) -> int:
        """What is seen of the line; what is clean is true of pages and mirror then."""
        structs = array("q", self.struct)
        assert self.run_reader.read(0, 1, structs, array("q", [0] * NUM_RUNS), True) == 1
        assert structs[RUN.seen] & (HAS_RUN | IS_SHORT) == HAS_RUN
        seen = structs[RUN.seen] >> RUN_BITS
        assert self.run_reader.is_clean(seen, run.message[SAFE]) == (not seen & LEFT_TO_RULES)
        return seen


def random_line(rng: random.Random, is_tree: bool, has_lineage: bool = False) -> Message:
    """Of two rows that are right, but for what is sometimes changed."""
    counts = [NODES if is_tree else rng.randrange(4) for _ in "ab"]
    begins = [rng.randrange(9) for _ in "ab"]
    bounds, n = [0, *accumulate(counts)], sum(counts)
    starts = [5, 70]
    places = [(row, begin + i) for row, begin in enumerate(begins) for i in range(counts[row])]
    slots = [4 + 12 * row + place for row, place in places]
    values = {
        "bounds": [*bounds, n],
        "starts": [*starts, 0],
        "ends": [*map(sum, zip(starts, begins, counts, strict=True)), 0],
        "slots": slots,
        "tokens": [10 + place if place < 10 else rng.randrange(50) for _, place in places],
        "positions": [place for _, place in places],
        "parents": [],
        "safe": [slot if slot < 40 else 0 for slot in slots],
        "ancestors": [],
    }
    mask = np.zeros((ROOM, NODES, NODES), np.bool_)
    if is_tree:
        own = [(-1, rng.choice((-1, 0)), rng.choice((0, 1))) for _ in "ab"]
        values["parents"] = [parent if parent < 0 else parent + NODES * row for row in (0, 1) for parent in own[row]]
        for row, parents in enumerate(own):
            for node, parent in enumerate(parents):
                mask[row, node] = mask[row, parent] if parent >= 0 else False
                mask[row, node, node] = True
    if rng.random() < 0.6:
        part = rng.choice([name for name in ("bounds", "starts", "ends", "tokens", "parents") if values[name]])
        place = rng.randrange(1, len(values[part])) if len(values[part]) > 1 else 0
        values[part][place] += rng.choice([-60, -3, -1, 1, 2, 60])
    elif is_tree and rng.random() < 0.3:
        mask[rng.randrange(2), rng.randrange(NODES), rng.randrange(NODES)] ^= True
    if has_lineage:
        values["parents"] = [rng.choice([-9, 0, 1, 60]) for _ in range(n)]
    rooms = dict.fromkeys(("slots", "tokens", "positions", "safe"), 9)
    rooms["parents"] = 9 if is_tree or has_lineage else 0
    words = np.zeros(4 if is_tree else 0, np.int64)
    if is_tree:
        words.view(np.bool_)[: mask.size] = mask.ravel()
    padded = [
        np.pad(np.array(values[name], np.int64), (0, max(rooms.get(name, 0) - len(values[name]), 0))) for name in PARTS
    ]
    parts = [*padded, words, np.zeros(ROOM, np.int64), np.zeros(2 * NUM_BITS + 3, np.int64)]
    ends = [0, *accumulate(map(len, parts))]
    return Message(np.concatenate(parts), list(map(slice, ends, ends[1:])))


@pytest.mark.parametrize(("kind", "has_lineage"), [("decode", 0), ("verify", 0), ("draft", 0), ("draft", 1)])
def test_a_line_is_left_to_the_rules_exactly_where_they_find_something(kind: str, has_lineage: bool) -> None:
    """The compiled look, and the rules that name what is wrong, are of one mind; what was kept of it is the same."""
    world, rng, seen = World(), random.Random(3), {"clean": 0, "no plan": 0, "named": 0}
    for _ in range(1500):
        line = random_line(rng, kind == "verify", has_lineage)
        run = world.run(kind, line, kind == "verify", has_lineage)
        reported = world.read(run)
        forward = DecodedForward(run.substep, 1, 2, line.parts(), None, run.batch.requests)
        is_plan = forward.is_plan
        violations = [*judge_tokens(forward), *judge_mask(forward)] if is_plan else []
        assert bool(reported & LEFT_TO_RULES) == (not is_plan or bool(violations)), line.parts()
        seen["no plan" if not is_plan else "named" if violations else "clean"] += 1
        if is_plan and not violations:
            assert reported >> MESSAGE_BITS == forward.num_entries
            kept, plan = CollectedRun.of(run), forward.plan.tolist()
            assert (forward.has_lineage, forward.has_parents) == (has_lineage, kind == "verify")
            line.numbers[:] = 0
            again = kept.learned()
            assert again.plan.tolist() == plan
            assert (again.kind, again.step, again.num_rows, again.accepted) == (kind, 1, 2, None)
    assert min(seen.values()) > 50, seen


def test_pages_are_written_and_what_was_judged_there_is_judged_anew() -> None:
    """As the rules' own way has it: of live entries outside null slots; padding changes nothing."""
    world = World()
    pages, record_store = world.ledger.pages, world.record_store
    numbers = [np.array(values, np.int64) for values in ([0, 1, 2, 2], [0, 0, 0], [3, 2, 0], [6, 2], [12, 11], [2, 1])]
    parts = [*numbers, numbers[0][:0], np.array([6, 2, 17]), *[numbers[0][:0]] * 2, numbers[1], np.zeros(131, np.int64)]
    ends = [0, *accumulate(map(len, parts))]
    line = Message(np.concatenate(parts), list(map(slice, ends, ends[1:])))
    run = world.run("decode", line, is_tree=False)
    record_store.judged[6] = True
    assert world.read(run) & (LEFT_TO_RULES | PAGES_FRESH) == PAGES_FRESH
    assert (pages.states == WRITTEN).nonzero()[0].tolist() == [1]
    assert (record_store.epoch, record_store.judged.any()) == (1, False)
    assert world.read(run) == 2 << MESSAGE_BITS
    assert record_store.epoch == 1


def test_what_is_short_is_told_before_anything_behind_it_is_booked() -> None:
    """A step has accepted what nobody wrote; a forward behind it could write the same rows."""
    world, rng = World(), random.Random(3)
    while True:
        line = random_line(rng, is_tree=False)
        run = world.run("decode", line, is_tree=False)
        if max(line[2] - line[1]) < 10 and not world.read(run) & LEFT_TO_RULES:
            break
    accepted, first = np.array([[1, 7], [0, 0]]), list(world.struct)
    first[RUN.written], first[RUN.accepted], first[RUN.places] = 0, accepted.ctypes.data, 2
    structs, planned = array("q", [*first, *world.struct]), array("q", [0] * NUM_RUNS)
    assert world.run_reader.read(0, 2, structs, planned, True) == 1
    assert structs[RUN.seen] & (HAS_RUN | IS_SHORT) == HAS_RUN | IS_SHORT
    assert world.run_reader.read(1, 2, structs, planned, True) == 2
    assert [request.committed_len for request in world.ledger.requests.values()] == [1, 0]


class Steps:
    """A world in which two substeps run a step, with the headers that were taken of them."""

    def __init__(self) -> None:
        self.world, self.kept = World(), []
        self.seen, self.planned = np.zeros((2, HEADER), np.int64), array("q", [0] * (2 * NUM_RUNS))
        self.ledger, world = self.world.ledger, self.world
        headers = self.seen.ctypes.data, 2 * NUM_BITS, HEADER
        world.run_reader = RunReader(world.state, self.ledger.pages, world.record_store, headers)
        self.moves: list[LaunchedMove] = []

    def run(
        self, number: int, line: Message, turn: int, counts: list[int], accepts: int | None
    ) -> tuple[Launched, list[int]]:
        """It and its struct. `counts`: what the header says of checks and runs; its step word is of this turn.

        accepts: tokens that the first request has accepted before; None: its rows are written as the host said
        """
        numbers = np.append(line.numbers, turn << 32)
        numbers[len(line.numbers) - HEADER : -1] = counts
        made = self.world.run("decode", Message(numbers, line.where), is_tree=False)
        made.substep.number, struct = number, list(self.world.struct)
        own, rows = message_struct(made.substep), array("q", [UNKNOWN] * (2 * ROWS.size + 1))
        struct[0], struct[RUN.rows] = own.buffer_info()[0], rows.buffer_info()[0]
        accepted = None if accepts is None else np.array([[accepts, 7], [0, 0]])
        if accepted is not None:
            struct[RUN.written], struct[RUN.accepted], struct[RUN.places] = 0, accepted.ctypes.data, 2
            struct[RUN.keep] += accepted.size
        self.kept += [made, own, rows]
        return made._replace(message=Message(numbers, line.where), accepted=accepted), struct

    def move(self, places: list[tuple[int, int]], mismatch: int = 0, turn: int = TURN) -> None:
        """Entries that have arrived, (slot, position), and one that has not moved. `turn`: of the line."""
        self.ledger.requests["a"].row_lens[0] = self.ledger.requests["b"].row_lens[0] = ROW_LEN
        (slots, positions), size = zip(*places, (NOWHERE, 0), strict=True), len(places) + 1
        columns = [*slots, *range(30, 30 + size), *(9 | position << 32 for position in positions)]
        ends = [0, size, 2 * size, 3 * size, 5 * size]
        numbers = np.array([*columns, *[0] * (2 * size - 1), mismatch, turn << 32])
        line = Message(numbers, list(map(slice, ends, ends[1:])))
        moved = SimpleNamespace(message_of=lambda turn: line, has_run=lambda wanted: wanted == turn)
        move = SimpleNamespace(pool=self.world.state.pools[0], size=size, num_places=2 * size, moved=moved)
        self.moves.append(LaunchedMove(move, TURN, RecordedMove(0, "target")))

    @property
    def move_structs(self) -> array:
        structs = [
            (move.pool.struct_at, launched.message.at, move.size, launched.turn, move.num_places)
            for launched in self.moves
            for move in [launched.move]
        ]
        return array("q", chain.from_iterable(structs))

    @property
    def state(self) -> list[object]:
        """All that a step that lands changes."""
        pages, record_store = self.ledger.pages, self.world.record_store
        requests = [
            (request.in_flight, request.struct.tolist()[9:13], request.row_lens.tolist())
            for request in self.ledger.requests.values()
        ]
        return [
            pages.states.tolist(),
            record_store.epoch > 0,
            record_store.judged.tolist(),
            self.seen.tolist(),
            requests,
        ]

    def collect_at_once(self, structs: array) -> tuple[int, list[int]]:
        """What the loop answers, and what is kept of the step."""
        moves = self.move_structs
        kept = array("q", bytes(8 * (sum(structs[RUN.keep :: RUN.size]) + sum(moves[MOVE.keep :: MOVE.size]))))
        run_reader = self.world.run_reader
        run_reader.said[SAID.end] = 0
        return run_reader.prove(structs, len(self.moves), moves, self.planned, kept, True), kept.tolist()

    def land_one_by_one(self, runs: list[Launched], structs: array) -> tuple[int, bool, list[int], int]:
        """How many runs are heard of before the rules, whether nothing fired, what has run, where landing stands."""
        run_reader, totals = self.world.run_reader, array("q", [0] * NUM_RUNS)
        end = run_reader.read(0, len(runs), structs, self.planned, True)
        seen = [structs[RUN.size * number + RUN.seen] for number in range(end)]
        if end < len(runs) or any(one & (HAS_RUN | IS_SHORT) != HAS_RUN for one in seen):
            return end, False, [], 0
        if any(one >> RUN_BITS & LEFT_TO_RULES for one in seen):
            return end, False, [], 0
        if self.moves and not self.arrives():
            return end, False, [], 0
        at = self.seen.ctypes.data, self.planned.buffer_info()[0], totals.buffer_info()[0]
        loops = self.world.state.pools[0].loops
        if not loops.take_quiet(len(runs), structs.buffer_info()[0], *at, 2 * NUM_BITS, HEADER):
            return end, False, [], 0
        for run, one in zip(runs, seen, strict=True):
            run_reader.is_clean(one >> RUN_BITS, run.message[SAFE])
        CapturedStep.learn_moves(self, SimpleNamespace(moves=self.moves), self.world.record_store)
        return end, True, totals.tolist(), self.ledger.steps.finalise_runs(structs, 0)

    def arrives(self) -> bool:
        """Whether moves have run, of all bytes, into rows that reach further."""
        owner = {page: name for name, request in self.ledger.requests.items() for page in request.pages}
        for move in self.moves:
            slots, _, tokens = move.entries
            places = zip(slots.tolist(), (tokens >> 32).tolist(), strict=True)
            if not move.has_run or move.differs:
                return False
            if any(slot // 4 not in owner or position >= ROW_LEN for slot, position in places):
                return False
        return True

    # what `learn_moves` needs

    @property
    def _ledger(self) -> Ledger:
        return self.ledger

    @property
    def listener(self) -> SimpleNamespace:
        return SimpleNamespace(moved=lambda move: setattr(move.record, "places", move.places))


def results_of(ledger: Ledger) -> list[int]:
    """The pages of which the device is to be told."""
    ledger.record_final_pages(0)
    return sorted(ledger.pages.changes().tolist())


MOVES = {  # entries that arrive, and what is wrong with their move
    "moves": ([(4, 0), (JUDGED, 3), (17, 1)], {}),
    "did not move": ([(6, 2)], {"turn": TURN - 1}),
    "left bytes behind": ([(6, 2)], {"mismatch": 1 << 40}),
    "moves behind a row's end": ([(6, 2), (12, ROW_LEN)], {}),
    "moves to nobody's page": ([(6, 2), (29, 1)], {}),
    "moves out of the pool": ([(6, 2), (40, 1)], {}),
}
WAYS = ("quiet", "fired", "ran as nobody planned", "did not run", "short", "left to the rules", *MOVES)


def test_one_loop_lands_a_quiet_step_as_several_do() -> None:
    """It says the same as they, and the same is true behind it; in every way in which a step is not quiet, too."""
    rng, quiet, answers = random.Random(5), dict.fromkeys(WAYS, 0), set()
    for number in range(20 * len(WAYS)):
        way, seed, both = WAYS[number % len(WAYS)], rng.random(), []
        victim = rng.randrange(2)
        for _ in "ab":
            own, steps, made = random.Random(seed), Steps(), []
            for one in range(2):
                line = random_line(own, is_tree=False)
                is_odd = one == victim
                counts = [0] * (2 * NUM_BITS) + [2, 0, 0]
                counts[own.randrange(2 * NUM_BITS)] += way == "fired" and is_odd
                counts[2 * NUM_BITS + own.randrange(NUM_RUNS)] += way == "ran as nobody planned" and is_odd
                if way == "left to the rules" and is_odd:
                    line.numbers[line.where[0].start] = 1
                turn = 1 if way == "did not run" and is_odd else 0
                accepts = {"short": 1, "quiet": 0}.get(way) if is_odd else None
                made.append(steps.run(one, line, turn, counts, accepts))
            if own.random() < 0.5:
                steps.world.record_store.judged[own.randrange(40)] = True
            else:
                steps.ledger.pages.states[:] = WRITTEN
            if way in MOVES:
                places, fault = MOVES[way]
                steps.move(places, **fault)
                steps.world.record_store.judged[JUDGED] = True
            runs, structs = zip(*made, strict=True)
            both.append((steps, runs, array("q", chain.from_iterable(structs))))
        (first, runs, structs), (second, others, other_structs) = both
        said, (found, kept) = first.world.run_reader.said, first.collect_at_once(structs)
        is_quiet = found != NOT_QUIET
        end, was_quiet, totals, place = second.land_one_by_one(others, other_structs)
        assert (said[SAID.end], is_quiet) == (end, was_quiet)
        assert first.state == second.state
        if is_quiet:
            assert (said[SAID.ran_rows : SAID.ran_rows + NUM_RUNS].tolist(), said[SAID.place]) == (totals, place)
            assert place == NOWHERE or place >= 0
            struct = first.ledger.pages.final_struct
            follows = said[SAID.seen] >> RUN_BITS, place != NOWHERE, struct[FINAL.num_final], struct[FINAL.num_fresh]
            assert found == (HAS_MORE if any(follows) else ALL_DONE)
            answers.add(found)
            assert results_of(first.ledger) == results_of(second.ledger)
            entries, reads = totals[RUN_ENTRIES], totals[RUN_READ]
            assert said[SAID.forwards :].tolist() == [2, entries, reads, entries > 0]
            numbers = [number for run in others for number in CollectedRun.of(run).numbers]
            assert kept == [*numbers, *chain.from_iterable(move.record.places for move in second.moves)]
            assert not first.moves or first.world.record_store.epoch > 0
        else:
            assert not any(said[SAID.forwards :])
        quiet[way] += is_quiet
    assert min(quiet.pop("quiet"), quiet.pop("moves")) > 5
    assert set(quiet.values()) == {0}
    assert answers == {ALL_DONE, HAS_MORE}
