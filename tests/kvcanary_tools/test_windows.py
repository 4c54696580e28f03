"""`kvcanary windows`: map and books agree as it runs; where they do not, row, position and last agreement are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_engine import Engine
from spec_engine.memory.pools.window_pool import WindowPool
from spec_engine.models.embedded import EMBEDDED_MODEL

SMALL = ("--max-new-tokens", "12", "--page-size", "4", "--window", "8", "--topk", "2", "--num-steps", "2")
PROMPT = ("--prompt", " ".join(str(token) for token in range(1, 20)))


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After the fourth step one entry of the map leads nowhere: its position, once that has happened."""
    struck, inner = [], Engine.step

    def step(engine: Engine):
        events = inner(engine)
        if engine.metrics.num_steps == 4:
            [request] = engine.running
            struck.append(request.committed_len - 3)
            engine.windows.slot_map[int(engine.request_table.table[request.row, struck[0]])] = 0
        return events

    monkeypatch.setattr(Engine, "step", step)
    return struck


@pytest.mark.parametrize("canary", [(), ("--kv-canary",)])
def test_a_clean_run_shows_every_row(kvcanary, canary) -> None:
    """A random model, three prompts: one line each with the slots of its window, exit code 0."""
    result = kvcanary("windows", *SMALL, *canary)
    assert result.exit_code == 0, result.stderr
    head, titles, *rows = result.stdout.splitlines()
    assert head == "window of 8 positions in 2 of 4 layers, pages of 4 slots"
    assert titles.split()[:3] == ["request", "step", "committed"]
    assert [row.split()[0] for row in rows] == ["req-0", "req-1", "req-2"]
    assert all(" nowhere " in row and row.endswith("now") for row in rows)
    assert "map and books agree" in result.stderr
    assert ("nothing found" in result.stderr) == bool(canary)


def test_json_is_alone_on_stdout(kvcanary) -> None:
    """The reports as one object, taken every third step."""
    result = kvcanary("windows", *SMALL, *PROMPT, "--every", "3", "--draft", "none", "--json")
    assert result.exit_code == 0, result.stderr
    run = json.loads(result.stdout)
    assert (run["window"], run["page_size"], run["window_layers"], run["num_layers"]) == (8, 4, 2, 4)
    assert (run["steps"], run["reports"], run["divergences"], run["canary"]) == (12, 3, 0, None)
    [row] = run["rows"]
    assert (row["step"], row["is_clean"], row["first_position"]) == (9, True, row["committed_len"] - 7)
    assert len(row["window_slots"]) >= 8
    assert 0 not in row["window_slots"]


def test_a_divergence_is_told_and_fails(kvcanary, unmapped) -> None:
    """Row, position, last agreement and the event; the first report that saw it is kept."""
    result = kvcanary("windows", *SMALL, *PROMPT, "--draft", "none")
    assert result.exit_code == 1
    [row] = result.stdout.splitlines()[2:]
    assert row.split()[:2] == ["req-0", "4"]
    assert f"unmapped {unmapped[0]} " in row
    assert row.endswith("step 3")
    assert "spec_engine.window_divergence" in result.stderr
    assert "1 row diverged" in result.stderr


def test_the_canary_ends_a_run_that_reads_through_it(kvcanary, unmapped) -> None:
    """Its report is said, the comparison is still shown, and both are in the object."""
    result = kvcanary("windows", *SMALL, *PROMPT, "--draft", "none", "--kv-canary", "--json")
    assert result.exit_code == 1
    run = json.loads(result.stdout)
    assert run["rows"][0]["unmapped"] == unmapped
    assert run["rows"][0]["last_agreed_step"] == 3
    assert "null slot" in run["stopped"]
    assert [finding["code"] for finding in run["canary"]["findings"]] == ["R2"]


def test_a_page_given_back_too_early_is_evicted(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before the forward ends the run; the report says which positions are gone."""
    inner = WindowPool.slide

    def slide(pool, row):
        end = min(row.committed_len + 8, len(row.pages) * pool.page_size)
        return inner(pool, row._replace(committed_len=end))

    monkeypatch.setattr(WindowPool, "slide", slide)
    result = kvcanary("windows", *SMALL, *PROMPT)
    assert result.exit_code == 1
    assert "evicted " in result.stdout
    assert "has no window page, but readers see positions from" in result.stderr


def test_a_given_model_brings_its_own_window(kvcanary, tmp_path: Path) -> None:
    """A checkpoint folder with a window in some layers; the prompt is text."""
    for part in EMBEDDED_MODEL.iterdir():
        if part.is_file() and part.name != "config.json":
            (tmp_path / part.name).symlink_to(part)
    raw = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * 12
    raw |= {"architectures": ["MistralForCausalLM"], "sliding_window": 6, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    result = kvcanary(
        "windows", "--model", str(tmp_path), "--prompt", "def fibonacci(n):\n", "--max-new-tokens", "6", "--json"
    )
    assert result.exit_code == 0, result.stderr
    run = json.loads(result.stdout)
    assert (run["window"], run["window_layers"], run["num_layers"]) == (6, 12, 24)
    assert run["reports"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "DIR"], "windows needs a prompt beside --model, got none"),
        (["--prompt", "5 x"], "prompts of the random model must be token ids, got '5 x'"),
        (["--prompt", "5 97"], "prompt token 97 is out of the vocabulary of 97 tokens"),
        (["--every", "0"], "invalid value for '--every': 0 is not in the range x>=1"),
        (["--attention-backend", "paged"], "attention_backend 'paged' reads no sliding windows"),
        (["--model", str(EMBEDDED_MODEL), "--prompt", "x"], "window_report needs a model with a sliding window"),
    ],
)
def test_wrong_usage_is_a_sentence(kvcanary, arguments: list[str], sentence: str) -> None:
    """Exit code 2, before anything runs."""
    result = kvcanary("windows", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
