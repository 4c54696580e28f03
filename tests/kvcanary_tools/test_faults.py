"""`kvcanary faults` lists what `kvcanary generate --reenact` brings back; a re-enacted bug ends as a finding does."""

from __future__ import annotations

import json

import pytest

from kvcanary.faults.catalogue import faults
from kvcanary.faults.published import reached, summary, unreached

GENERATE = ("generate", "--prompt", "def f(x):", "--max-new-tokens", "8", "--kv-canary")


def test_the_list_names_every_fault(kvcanary) -> None:
    """Each with its bugs, its settings and what must find it."""
    result = kvcanary("faults")
    assert result.exit_code == 0
    for fault in faults():
        assert fault.name in result.stdout
        assert ", ".join(fault.bugs) in result.stdout
        assert fault.expected in result.stdout


def test_the_list_as_json(kvcanary) -> None:
    """Stable keys for scripts."""
    entries = json.loads(kvcanary("faults", "--json").stdout)["faults"]
    assert [entry["name"] for entry in entries] == [fault.name for fault in faults()]
    entry = next(entry for entry in entries if entry["name"] == "bounds.kv_indices_without_topk")
    assert {"name", "k", "family", "state", "reason", "bugs", "expected_code"} <= entry.keys()
    assert entry["k"] == "K01"
    assert entry["expected_code"] == "IndexBufferError"


def test_a_reenacted_bug_ends_as_a_finding(kvcanary) -> None:
    """Exit code 1, the fault and the typed error in a sentence, no traceback."""
    result = kvcanary(*GENERATE, "--topk", "1", "--reenact", "draft.parents_dtype")
    assert result.exit_code == 1
    assert "draft.parents_dtype ended in TreeShapeError: parent_list must be contiguous int64" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reenacted_bug_as_json(kvcanary) -> None:
    """One object that names fault and error."""
    result = kvcanary(*GENERATE, "--topk", "1", "--reenact", "draft.parents_dtype", "--json")
    assert result.exit_code == 1
    ended = json.loads(result.stdout)
    assert (ended["reenacted"], ended["error"]) == ("draft.parents_dtype", "TreeShapeError")


def test_the_environment_reenacts_too(kvcanary) -> None:
    """KVCANARY_REENACT stands for --reenact."""
    result = kvcanary(*GENERATE, "--topk", "1", env={"KVCANARY_REENACT": "draft.parents_dtype"})
    assert result.exit_code == 1
    assert "TreeShapeError" in result.stderr


def test_a_fault_that_changes_nothing_says_so(kvcanary) -> None:
    """A run whose settings never come to the formula is no proof of anything."""
    result = kvcanary(*GENERATE, "--topk", "2", "--reenact", "draft.parents_dtype")
    assert result.exit_code == 0
    assert "draft.parents_dtype changed nothing here: it applies to topk 1" in result.stderr


def test_needless_retractions_are_counted(kvcanary) -> None:
    """The worst-case estimate ends in no error without a canary: retractions stand in the JSON, 0 without it."""
    settings = ("--page-size", "16", "--topk", "4", "--max-total-tokens", "512", "--max-new-tokens", "40", "--json")
    prompts = [part for text in ("def f(x):", "class A:", "import os") for part in ("--prompt", text)]
    clean = kvcanary("generate", *prompts, *settings)
    faulty = kvcanary("generate", *prompts, *settings, "--reenact", "lengths.worst_case_estimate")
    assert (clean.exit_code, faulty.exit_code) == (0, 0)
    clean_run, faulty_run = json.loads(clean.stdout), json.loads(faulty.stdout)
    assert clean_run["num_retractions"] == 0
    assert faulty_run["num_retractions"] > 0
    assert clean_run["outputs"] == faulty_run["outputs"]
    assert "look for StalledError, or needless retractions and the same tokens" in faulty.stderr


def test_an_endless_run_ends_in_a_sentence(kvcanary) -> None:
    """The same estimate under a canary goes round for ever, and the command says who retracts whom."""
    prompts = [part for text in ("a", "class A:", "import os", "def g") for part in ("--prompt", text)]
    pressed = ("--max-new-tokens", "40", "--max-total-tokens", "576", "--new-token-ratio", "0", "--kv-canary", "--json")
    result = kvcanary("generate", *prompts, *pressed, "--reenact", "lengths.worst_case_estimate")
    assert result.exit_code == 1
    ended = json.loads(result.stdout)
    assert ended["error"] == "StalledError"
    assert "gave up their pages: req-" in ended["message"]


@pytest.mark.parametrize(
    ("name", "closest"), [("bounds.row_widht", "bounds.row_width"), ("worst_case", "lengths.worst_case_estimate")]
)
def test_an_unknown_fault_is_wrong_usage(kvcanary, name: str, closest: str) -> None:
    """A sentence with the closest names, a hint, exit code 2."""
    result = kvcanary(*GENERATE, "--reenact", name)
    assert result.exit_code == 2
    assert f"got '{name}': did you mean {closest}" in result.stderr
    assert "\n\nhint: kvcanary faults lists them all" in result.stderr


MORE = ("--max-new-tokens", "24", "--kv-canary-content", "full", "--page-size", "4")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bits.flip", "content changed (R9)"),
        ("addressing.pages_exchanged", "wrong position (R4)"),
        ("draft.position_off_by_one", "write position (W5)"),
        ("lifetime.torn_free", "lifetime.torn_free ended in PageStateError"),
        ("draft.token_offset_0", "wrong token (W6)"),
    ],
)
def test_a_state_fault_strikes_a_running_engine(kvcanary, name: str, said: str) -> None:
    """Bytes, tables, plans and lifecycle calls, also with a request of the fault's own: exit code 1 and the report."""
    result = kvcanary(*GENERATE, *MORE, "--reenact", name)
    assert result.exit_code == 1
    assert said in result.stderr


def test_a_state_fault_needs_a_canary(kvcanary) -> None:
    """There is nothing that could see it."""
    result = kvcanary(*GENERATE[:5], "--reenact", "bits.flip")
    assert result.exit_code == 2
    assert "hint: add --kv-canary" in result.stderr


def test_a_fault_that_waits_is_not_made(kvcanary) -> None:
    """Its reason is the sentence."""
    result = kvcanary(*GENERATE, "--reenact", "addressing.beams_reordered")
    assert result.exit_code == 2
    assert "the engine has no beam search" in result.stderr


def test_a_state_fault_that_does_not_apply_says_so(kvcanary) -> None:
    """Two requests are needed, one runs."""
    result = kvcanary(*GENERATE, "--reenact", "graphs.wrong_stride")
    assert result.exit_code == 0
    assert "graphs.wrong_stride changed nothing here: it applies to drafting for two requests and more" in result.stderr


def test_the_command_says_how_much(kvcanary):
    """The list ends with a sentence; the JSON has every bug."""
    assert kvcanary("faults").stdout.rstrip().endswith(summary(faults()))
    published = json.loads(kvcanary("faults", "--json").stdout)["published"]
    assert published["reached"] == reached(faults())
    assert published["unreached"] == unreached(faults())
