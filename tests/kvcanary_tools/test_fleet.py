"""`kvcanary fleet`: certificates and incidents of many members joined, and who is to blame for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from math import exp, factorial
from pathlib import Path

import pytest

from kvcanary_tools.bench import common
from kvcanary_tools.bench import fleet as simulated
from kvcanary_tools.fleet.blame import (
    DRAIN,
    FILE,
    GPU,
    PATH,
    RESTART,
    SITE,
    VERSION,
    Incident,
    Watched,
    binomial_tail,
    blame,
    poisson_tail,
)  # fmt: skip
from kvcanary_tools.fleet.members import members_in
from kvcanary_tools.fleet.merging import SUMMED, fleet_certificate, lines

ROOT = Path(__file__).parents[2]
SEEDS = 12  # of those whose record is committed
FINDING = {
    "code": "R9", "site": ["verify", 0], "layer": 3, "causes": [{"family": "bits"}], "undeclared": True, "part": "K",
    "sentence": "bytes are not those that were written",
}  # fmt: skip


def certificate(gpu: str = "GPU-a", **own: object) -> dict:
    """As a server gives it, as far as a fleet reads it."""
    told = {
        **dict.fromkeys(SUMMED, 10), "mode": "raise", "content": "full", "max_unread_steps": 1, "unchecked": {},
        "inactive_classes": {}, "classes": ["R9"], "version": "0.1.0", "hardware": {"gpu_uuid": gpu},
    }  # fmt: skip
    return told | own


def members(*certificates: dict, incidents: Sequence[dict] = ()) -> list:
    told = [{"certificate": own, "incidents": incidents if n == 0 else []} for n, own in enumerate(certificates)]
    return list(members_in("fleet.json", told))


def test_the_weakest_is_said_first_with_its_place() -> None:
    """Mode, content and unread time may each be another's."""
    weak = certificate(mode="log"), certificate(content="write", mode="abort"), certificate(max_unread_steps=99)
    told = fleet_certificate(members(*weak))
    assert told["weakest"] == {
        "mode": ("log", "fleet.json[0]"), "content": ("write", "fleet.json[1]"),
        "max_unread_steps": (99, "fleet.json[2]"),
    }  # fmt: skip
    text = list(lines(told))
    assert text[0] == "3 of 3 members watched"
    assert text[1] == "weakest mode: log, at fleet.json[0]"


def test_sums_and_what_is_inactive_anywhere() -> None:
    """Counters add up; a class that one member cannot report is named with the reason and the place."""
    own = certificate(inactive_classes={"W7": "not fed"}, unchecked={"late": 2}), certificate(unchecked={"late": 3})
    told = fleet_certificate(members(*own))
    assert told["sums"] == dict.fromkeys(SUMMED, 20)
    assert told["unchecked"] == {"late": 5}
    assert told["inactive_classes"] == {"W7": {"not fed": ["fleet.json[0]"]}}
    assert told["is_whole"]


def test_who_is_not_watched_has_a_reason() -> None:
    """Off, not armed, or no turn this week: then the fleet is not whole."""
    waiting = {"mode": "off", "turn": {"share": 0.05, "week": "2026-W48"}}
    told = fleet_certificate(members(certificate(), None, waiting, {"armed": False, "mode": "log"}))
    assert list(told["not_watched"].values()) == [
        "its canary is off", "no turn in 2026-W48, share 0.05", "it is not armed",
    ]  # fmt: skip
    assert (told["watched"], told["is_whole"]) == (1, False)


def test_incidents_are_joined_by_what_they_share() -> None:
    """One line for a code path on many GPUs; another layer, version or cause is another line."""
    others = [FINDING, {**FINDING, "layer": 4}, {**FINDING, "causes": []}, FINDING]
    joined = fleet_certificate(members(certificate(), incidents=others))["incidents"]
    assert [(one["layer"], one["family"], one["count"]) for one in joined] == [
        (3, "bits", 2), (4, "bits", 1), (3, "unknown", 1),
    ]  # fmt: skip


def test_reports_of_adapters_are_members() -> None:
    """Of workers, of roles, of what `merged` gave: a finding that two ranks have is one."""
    worker = certificate(
        armed=True, rank=0, incidents=[FINDING], engine="vllm", host_version="0.33.0", connector="nixl"
    )
    [member] = members_in("w", worker)
    assert (member.version, member.connector, member.gpu, member.exposure) == ("vllm 0.33.0", "nixl", "GPU-a", 10.0)
    assert len(list(members_in("w", {"target": worker, "draft": worker}))) == 2
    both = {"armed": True, "findings": [FINDING | {"ranks": [0, 1]}], "workers": [worker, worker | {"rank": 1}]}
    assert [len(one.incidents) for one in members_in("w", both)] == [1, 0]
    with pytest.raises(ValueError, match="no certificate"):
        list(members_in("w", {"a": 1}))


def test_the_command_names_members_that_cannot_be_had(kvcanary, tmp_path) -> None:
    """Nobody is left out silently; the exit code says that the fleet is not whole."""
    file = tmp_path / "own.json"
    file.write_text(json.dumps([{"certificate": certificate(), "incidents": []}]))
    (tmp_path / "urls").write_text(f"# ours\n{file}\nhttp://127.0.0.1:9  # nobody\n")
    result = kvcanary("fleet", "--urls", str(tmp_path / "urls"))
    assert result.exit_code == 1
    assert "unreachable  http://127.0.0.1:9: " in result.stdout
    assert kvcanary("fleet", str(file)).exit_code == 0
    assert json.loads(kvcanary("fleet", str(file), "--json").stdout)["members"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [([], "a fleet has members, got none"), (["nowhere.json"], "nowhere.json says of no member"),
     (["--prometheus", "http://127.0.0.1:9"], "does not say who has a canary")],
)  # fmt: skip
def test_wrong_usage_is_a_sentence(kvcanary, arguments: list[str], sentence: str) -> None:
    """Exit code 2."""
    for command in (["fleet"], ["fleet", "show"], ["fleet", "blame"]):
        result = kvcanary(*command, *arguments)
        assert result.exit_code == 2
        assert sentence in result.stderr


@pytest.mark.parametrize(("count", "mean"), [(0, 1.0), (1, 0.2), (3, 0.5), (7, 2.5), (2, 9.0), (30, 12.0)])
def test_tails_are_those_of_the_textbook(count: int, mean: float) -> None:
    """Against one minus the sum of the terms before, and exact fractions for the binomial."""
    before = sum(exp(-mean) * mean**n / factorial(n) for n in range(count))
    assert poisson_tail(count, mean) == pytest.approx(1 - before, rel=1e-6)
    chances = [Fraction(1, 3) ** heads * Fraction(2, 3) ** (9 - heads) for heads in range(10)]
    exact = sum(factorial(9) // factorial(n) // factorial(9 - n) * chances[n] for n in range(min(count, 9), 10))
    assert binomial_tail(min(count, 9), 9, 1 / 3) == pytest.approx(float(exact))


def test_a_tail_that_nobody_could_write_out_is_not_zero() -> None:
    """Far out one minus a sum would be rounding alone."""
    assert 1e-70 < poisson_tail(40, 0.5) < 1e-58
    assert poisson_tail(1, 0.0) == 0


def fleet_of(count: int = 20) -> list[Watched]:
    return [Watched(f"GPU-{n}", 1.0, "b" if n < 4 else "a") for n in range(count)]


def test_words_that_change_on_one_gpu_are_its_memory() -> None:
    """Drain and probe; other incidents that one process alone has are cured by a restart."""
    fleet = fleet_of()
    bits = [Incident(fleet[7], "R9 at release", n, True) for n in range(6)]
    [suspect] = blame(fleet, bits).suspects
    assert (suspect.dimension, suspect.value, suspect.advice) == (GPU, "GPU-7", DRAIN)
    [suspect] = blame(
        fleet, [Incident(own.watched, f"R{n} at verify", n, False) for n, own in enumerate(bits)]
    ).suspects
    assert (suspect.value, suspect.advice) == ("GPU-7", RESTART)


def test_one_code_path_on_many_gpus_is_software_and_names_its_version() -> None:
    """File with the engine, and not one of the GPUs on which it runs."""
    fleet = fleet_of()
    [suspect] = blame(fleet, [Incident(own, "R4 at verify", 3, False) for own in fleet[:4]]).suspects
    assert suspect.dimension in (SITE, PATH)
    assert suspect.advice == FILE
    assert suspect.names(VERSION, "b")
    [everywhere] = blame(fleet, [Incident(own, "R4 at verify", 3, False) for own in fleet]).suspects
    assert VERSION not in everywhere.with_it


def test_a_single_bit_here_and_there_is_nobodys_fault() -> None:
    """Isolated incidents are healed; where bits are found says nothing of the code that reads them."""
    fleet = fleet_of()
    verdict = blame(fleet, [Incident(fleet[n], "R9 at release", 3 * n, True) for n in (2, 9, 15)])
    assert (verdict.suspects, verdict.isolated) == ([], 3)
    assert blame(fleet, []).suspects == []


def test_who_is_left_is_not_blamed_for_being_left() -> None:
    """What a bad version was exposed to is put aside with its incidents: the other one does not stand out then."""
    fleet = [Watched(f"GPU-{n}", 1.0, "b" if n < 100 else "a") for n in range(500)]
    hit = [*fleet[:60], *fleet[100:130]]
    verdict = blame(fleet, [Incident(own, f"R{n} at verify", n, False) for n, own in enumerate(hit)])
    assert [(one.dimension, one.value) for one in verdict.suspects] == [(VERSION, "b")]
    assert verdict.isolated == 30


def test_a_fleet_of_one_version_does_not_blame_it() -> None:
    """There is nothing to compare it with."""
    fleet = [Watched(f"GPU-{n}", 1.0, "a") for n in range(9)]
    named = blame(fleet, [Incident(own, f"R{n} at verify", n, False) for n, own in enumerate(fleet)]).suspects
    assert named == []


def test_blame_of_a_file_of_reports(kvcanary, tmp_path) -> None:
    """The command says who, how surely and what to do; exit code 1 where somebody stands out."""
    told = [{"certificate": certificate(f"GPU-{n}"), "incidents": [FINDING] * 5 if n == 3 else []} for n in range(30)]
    (tmp_path / "fleet.json").write_text(json.dumps(told))
    result = kvcanary("fleet", "blame", str(tmp_path / "fleet.json"))
    assert result.exit_code == 1
    assert result.stdout.startswith("1. GPU GPU-3\n   5 incidents, 0.034 expected, p ")
    assert result.stdout.rstrip().endswith(": drain and probe")
    whole = json.loads(kvcanary("fleet", "blame", str(tmp_path / "fleet.json"), "--json").stdout)
    assert whole["suspects"][0]["value"] == "GPU-3"


def test_the_simulated_fleet_names_all_three_first() -> None:
    """A sample of the seeds here; their record has all of them, and holds at least 95 % of 200."""
    record = json.loads((common.RESULTS / "fleet.json").read_text(encoding="utf-8"))
    row = next(one for one in record["rows"] if one["strength"] == simulated.SHOWN_STRENGTH)
    assert (record["gpus"], record["gpu_seconds"], row["seeds"]) == (500, 1e9, 200)
    assert row["all_three_first"] >= 0.95 * row["seeds"]
    assert record["sound_without_blame"] >= 0.95 * row["seeds"]
    named = [simulated.hits(seed, simulated.Rates()) for seed in range(SEEDS)]
    assert sum(map(all, named)) >= SEEDS - 1
    sound = [simulated.verdict_of(seed, simulated.Rates(strength=0)).suspects for seed in range(SEEDS)]
    assert sum(not suspects for suspects in sound) >= SEEDS - 1


def test_the_page_has_the_record() -> None:
    """Its table is what the simulation wrote."""
    record = json.loads((common.RESULTS / "fleet.json").read_text(encoding="utf-8"))
    table = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8").partition("<!-- fleet: begin -->")[2]
    for row in record["rows"]:
        first, seeds = row["all_three_first"], row["seeds"]
        assert (
            f"| {row['strength']} | {first} of {seeds} | {row['hbm']} | {row['release']} | {row['connector']} |"
            in table
        )
    assert f"nobody is blamed in {record['sound_without_blame']} of 200" in table
