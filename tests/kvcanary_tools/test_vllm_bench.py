"""The measurement inside vLLM: what of it needs no vLLM."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcanary.adapters.hosted.guard import Guard
from kvcanary.adapters.hosted.replacements import Replacements
from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.vllm import clock as vllm_clock
from kvcanary_tools.bench.vllm import engine as vllm_engine
from kvcanary_tools.bench.vllm import faults as vllm_faults
from kvcanary_tools.bench.vllm import model as vllm_model
from kvcanary_tools.bench.vllm import parallel as vllm_parallel
from kvcanary_tools.bench.vllm import plugin as vllm_plugin
from kvcanary_tools.bench.vllm import turns as vllm_turns


def test_prompts_share_prefixes_and_are_the_same_each_time() -> None:
    """Equal order in every run; as many beginnings as prefixes; longer than one chunk together."""
    prompts = vllm_model.make_prompts()
    assert prompts == vllm_model.make_prompts()
    assert len(prompts) == vllm_model.REQUESTS
    assert len({tuple(prompt[: vllm_model.PREFIX_TOKENS]) for prompt in prompts}) == vllm_model.PREFIXES
    assert all(vllm_model.PREFIX_TOKENS < len(prompt) < 800 for prompt in prompts)
    needed = sum(len(prompt) + vllm_model.OUTPUT_TOKENS - vllm_model.PREFIX_TOKENS for prompt in prompts)
    assert needed > 16 * vllm_model.BLOCKS  # some are preempted


def test_agreement_counts_tokens_and_names_the_first_difference() -> None:
    """Shorter answers count as different; a place for each request that differs."""
    found = vllm_turns.agreement([[1, 2, 3], [4, 5], [6]], [[1, 2, 3], [4, 9], [6, 7]])
    assert found == {"share": 5 / 7, "first_different": {1: 1}}
    assert vllm_turns.agreement([], []) == {"share": 0.0, "first_different": {}}


def test_throughput_is_that_of_pairs_and_the_noise_that_of_runs_without() -> None:
    """Ratios of sums within a pair and over all turns; every other run without over the ones between."""
    found = vllm_turns.throughput([[2.0, 2.0], [3.0, 2.0], [2.0, 2.2]], [[2.0, 3.0], [3.0, 2.0], [4.2, 4.2]])
    assert found["ratios"] == pytest.approx([0.8, 1.0, 0.5])
    assert found["throughput_ratio"] == pytest.approx(13.2 / 18.4)
    assert found["off_over_off"] == pytest.approx([1.0, 1.5, 1 / 1.1])
    assert found["fastest_runs_ratio"] == 1.0
    assert found["median_runs_ratio"] == pytest.approx(2.0 / 3.0)


def turn(*seconds: float) -> list[tuple[float, float]]:
    return [(own, own / 2) for own in seconds]


def test_steps_are_compared_with_their_own_kind() -> None:
    """The median of each step over the turns: a step that was disturbed once counts nothing; the noise is told."""
    off = [turn(1.0, 3.0), turn(1.0, 9.0), turn(1.0, 3.0)]
    on = [turn(1.1, 3.3), turn(7.0, 3.3), turn(1.1, 3.3)]
    found = vllm_turns.by_step(off, on)
    assert found["steps"] == [2]
    assert found["turns"] == [3, 3]
    assert found["ms"] == pytest.approx([2000.0, 2200.0])
    assert found["ratio"] == found["thread_ratio"] == found["quiet_ratio"] == pytest.approx(1 / 1.1)
    assert found["range"][0] < 1 / 1.1 < found["range"][1]
    assert found["thread_range"] == pytest.approx(found["range"], rel=0.5)
    assert found["tenths"] == [pytest.approx([1000.0, 1100.0]), pytest.approx([3000.0, 3300.0])]
    assert found["off_over_off"] == pytest.approx(4 / 10)
    assert vllm_turns.by_step(off[:1], on[:1])["off_over_off"] is None
    assert json.dumps(found)


def test_turns_of_other_steps_are_not_compared() -> None:
    """A scheduler that decided otherwise once made other steps: their numbers are told, and no ratio."""
    found = vllm_turns.by_step([turn(1.0, 2.0), turn(1.0)], [turn(1.0, 2.0)])
    assert found == {"steps": [1, 2], "turns": [2, 1]}


class Engine:
    """What a Bench steps."""

    def step(self) -> str:
        time.sleep(0.01)
        return "output"


def test_every_step_of_an_engine_is_timed() -> None:
    """Seconds and the thread's own, one pair a step; afterwards the engine's method is its own again."""
    engine = Engine()
    with vllm_turns.stepped(engine) as spent:
        assert [engine.step(), engine.step()] == ["output"] * 2
    assert not vars(engine)
    assert [wall >= 0.01 > own for wall, own in spent] == [True, True]


ENTRIES = 1000  # that a run judges


class Rig(vllm_engine.Bench):
    """A Bench whose engine takes one second a run, half as long again with the plug-in."""

    is_plugged = is_late = False

    def __init__(self) -> None:
        self.is_on, self.order, self.shifts, self.started = False, [], itertools.count(), time.perf_counter()
        self.llm = SimpleNamespace(llm_engine=Engine())

    @contextmanager
    def watched(self, mode: str = "raise", content: str = "rolling", is_heard: bool = False):
        self.is_on = is_heard  # as users have it
        yield SimpleNamespace(report=lambda: {"findings": [], "waits": 0, "slots_checked": ENTRIES})
        self.is_on = False

    def run(self, prompts, tokens=4, **sampling):
        self.order.append(self.is_on)
        self.llm.llm_engine.step()
        outputs = [SimpleNamespace(token_ids=[1, 2, 3], logprobs=[{}]) for _ in prompts]
        return outputs, 1.5 if self.is_on else 1.0

    def preemptions(self) -> int:
        return next(self.shifts)


def test_pairs_are_interleaved_and_as_long_as_was_asked() -> None:
    """Warm-up runs are discarded, then without, with, with, without; an even number that fills the time."""
    rig = Rig()
    *_, result = rig.compare(3, 2.5)
    assert rig.order == [False, True] * vllm_engine.WARM_UPS + [False, True, True, False] * 6
    assert result["runs_a_side"] == 4
    assert result["ratios"] == pytest.approx([2 / 3] * 3)
    assert result["off_over_off"] == [1.0] * 3
    assert {len(runs) for name in ("off_s", "on_s", "waits") for runs in result[name]} == {4}
    assert result["hooks_us"] == [0.0] * vllm_engine.WARM_UPS
    assert [entry["share"] for entry in result["on_off"] + result["off_off"]] == [1.0] * 5
    assert result["by_step"]["turns"] == [12, 12]
    assert result["by_step"]["steps"] == [1]
    assert result["findings"] == 0
    assert result["entries_judged"] == 12 * ENTRIES
    assert result["largest_gap_where_different"] == 0.0
    assert json.dumps(result)


def test_only_what_a_strike_added_is_its_finding() -> None:
    """Also what is found before the prompt is asked again. Reports list the first rank's findings first: what was there
    before is left out wherever it stands.
    """
    rig, findings = object.__new__(vllm_parallel.Bench), ["old of 1"]

    def strike(call: object) -> list[int | None]:
        findings[:] = ["new of 0", "old of 1", "new of 1"]
        return [None, 7]

    rig.run, rig.device = lambda prompts, tokens: 0.0, "cpu"
    rig.llm = SimpleNamespace(collective_rpc=strike)
    rig.report = lambda: {"findings": [*findings]}
    assert rig.struck([1], 4) == {"struck": [1], "slots": [None, 7], "found": ["new of 0", "new of 1"]}


def test_canaries_that_took_turns_are_one_report() -> None:
    """What each judged is summed by worker, and no finding of an earlier turn is lost."""
    counts = {"forwards": 3, "slots_checked": 40, "bytes_checked": 500}
    reports = [
        {"armed": True, "findings": found, "workers": [{"rank": 0, **counts}, {"rank": 1, **counts}]}
        for found in (["R9"], [])
    ]
    told = vllm_parallel.summed(reports)
    assert told["findings"] == ["R9"]
    assert told["workers"] == [
        {"rank": rank, "forwards": 6, "slots_checked": 80, "bytes_checked": 1000} for rank in (0, 1)
    ]
    assert reports[1]["workers"][0]["forwards"] == 3


def test_a_part_that_breaks_is_written_down() -> None:
    """An error in one fault is a result, and the others go on."""
    rig = object.__new__(vllm_faults.Faults)

    def breaks() -> dict[str, object]:
        raise RuntimeError("no such block")

    assert json.dumps(rig.attempt(breaks)) == '{"raised": "RuntimeError", "message": "no such block"}'
    assert rig.attempt(lambda: {"found": []}) == {"found": []}


def test_the_clock_leaves_out_what_the_engine_takes_itself() -> None:
    """Calls of a hook, and its own time: that of the method it stands before is not the canary's."""

    def hook(method, *args):
        time.sleep(0.002)
        return method(*args)

    right = Replacements.replace
    owner = SimpleNamespace(step=lambda: time.sleep(0.05))
    with vllm_clock.clocked() as spent:
        Replacements(Guard("vllm", "raise")).replace(owner, "step", hook)
    owner.step()
    owner.step()
    found = vllm_clock.reported(spent, 1.0)
    assert found["hooks"]["step"]["calls"] == 2
    assert 2000 <= found["hooks"]["step"]["us"] < 40000
    assert found["share_of_run"] == pytest.approx(2e-6 * found["hooks"]["step"]["us"])
    assert Replacements.replace is right


def test_a_profile_names_functions() -> None:
    """The text that is written beside the result."""
    assert "make_prompts" in vllm_clock.functions(lambda: vllm_model.make_prompts(2))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (("1b", "dense", None, "v2", "full"), "vllm"),
        (("7b", "dense", "eagle", "v2", "full"), "vllm_7b_eagle"),
        (("1b", "dense", None, "v1", "piecewise"), "vllm_v1_piecewise"),
        (("1b", "dense", None, "v2", "none"), "vllm_eager"),
        (("1b", "mla", None, "v2", "full"), "vllm_mla"),
        (("1b", "hybrid", "ngram", "v1", "full"), "vllm_hybrid_ngram_v1"),
    ],
)
def test_every_setting_has_a_file_of_its_own(settings: tuple[str, str, str | None, str, str], name: str) -> None:
    """Results do not overwrite each other."""
    assert vllm_plugin.name_of(*settings) == name


def test_the_record_of_lmcache_inside_a_worker() -> None:
    """As both are: T1 that names the connector, and no token in mode raise; vLLM's own connector is silent."""
    told, clean = (
        json.loads((RESULTS / f"gpu_vllm_{name}.json").read_text(encoding="utf-8")) for name in ("lmcache", "example")
    )
    assert (told["connector"], clean["connector"]) == ("LMCacheConnectorV1", "ExampleConnector")
    for phase in ("load", "stop"):
        [first] = told[phase]["found"]
        assert (first["code"], first["found"]["came_back_by"]) == ("T1", "LMCacheConnectorV1")
        assert (first["found"]["verdict"], first["found"]["slots_wrong"]) == ("short", "74 of 128")
        assert clean[phase]["fired"] == {}
    assert (told["other_tokens"], told["prompts"], told["left_in_mode_raise"]) == (3, 4, 0)
    assert told["load"]["loads_checked"] == clean["load"]["loads_checked"] == 416
    page = " ".join((Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8").split())
    assert "compared all 416 entries" in page
    assert "three of four prompts got other tokens" in page
    assert "74 of 128 entries were wrong" in page


def test_the_clock_knows_every_kernel_of_ours() -> None:
    """By its whole name, wherever it lies; helpers of kernels are none."""
    assert {"_take_fingerprints_kernel", "_advance_kernel", "_choose_kernel"} <= vllm_clock.our_kernels()
