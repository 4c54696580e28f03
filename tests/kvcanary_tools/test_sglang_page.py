"""The tables of what ran in SGLang: those of the record, which agrees with what the adapter says it was tried with."""

from __future__ import annotations

import json

from kvcanary.adapters.sglang.compatibility import NEEDED, TESTED
from kvcanary_tools.bench.sglang import page
from kvcanary_tools.bench.sglang.cpu import BESIDE, BITS, RESULTS, SCENES, pinned
from kvcanary_tools.bench.sglang.misreading import GRAPHS


def test_the_page_quotes_the_record() -> None:
    """The tables of docs/sglang.md are those of the record as it is, which is of every scene."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert "\n".join((page.BEGIN, *page.lines(), page.END)) in text
    assert "\n".join((page.BEGIN_BESIDE, *page.beside(), page.END_BESIDE)) in text
    assert set(page.read()["scenes"]) == set(SCENES)
    assert page.read()["machine"]["sglang"] == pinned() == TESTED[-1]


def test_sound_scenes_are_silent_and_faults_are_found_in_the_record() -> None:
    """No finding and equal tokens where nothing was broken; a finding with its cause where something was."""
    for name, scene in page.read()["scenes"].items():
        for act in scene["acts"]:
            fired = sum(sum(pool["fired"].values()) for pool in act["pools"].values())
            struck = act.get("touched")
            assert act["findings"] or not act.get("raised"), name  # nothing else ended it
            if "equal_tokens" in act:
                assert (fired, act["equal_tokens"], act.get("raised")) == (0, True, None), name
            elif act.get("fault", "").endswith("hook_error") or (name in BESIDE and "fault" not in act):
                assert fired == 0, name
            elif (act.get("misreading"), fired) == (GRAPHS, 0):
                assert act["pools"], name
            elif (act.get("rank"), act.get("fault")) == (0, "bit"):
                assert fired == 0, name  # it lies in the other rank's memory
            elif struck is None or any(struck.values()):
                assert act["findings"][0]["cause"], name
            else:
                assert fired == 0, name


def test_a_million_entries_were_judged_without_a_finding() -> None:
    """All sound scenes together, in all pools."""
    sound = [act for scene in page.read()["scenes"].values() for act in scene["acts"] if "equal_tokens" in act]
    assert sum(pool["slots_checked"] for act in sound for pool in act["pools"].values()) >= 1_000_000


def test_what_the_canary_of_sglang_finds_of_the_bits_is_found_here_too() -> None:
    """Ours finds a bit of K and V in the first layer and in the last; SGLang's, by default, that of K in the first."""
    for name in BESIDE:
        acts = {act.get("fault", ""): act for act in page.read()["scenes"][name]["acts"]}
        assert all(acts[bit]["findings"][0]["code"] == "R9" for bit in BITS)
        assert [bit for bit in BITS if "peer" in acts[bit]] == ["first_k"], name


def test_the_names_were_looked_up_as_they_are_now() -> None:
    """The record of `make drift` is of as many names as the adapter has; none is gone from what it was tried with."""
    record = json.loads((RESULTS.parent / "drift_sglang.json").read_text(encoding="utf-8"))
    assert record["names"] == len(NEEDED)
    assert all(record["releases"][release]["gone"] == {} for release in TESTED)
    assert record["releases"]["0.5.17"]["gone"]
