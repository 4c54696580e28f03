"""Everything that the README shows is true: its Python runs, its commands work, its folders exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def shown_commands(program: str) -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return [words[1:] for line in lines if (words := shlex.split(line[2:]))[0] == program]


def test_python_runs_and_prints(root: Path) -> None:
    """The Python example runs as it stands and says what it promises."""
    [code] = blocks("python")
    child = run(root, sys.executable, "-c", code)
    assert child.returncode == 0, child.stderr
    assert "tokens a forward" in child.stdout
    assert "slots checked" in child.stdout


@pytest.mark.parametrize("arguments", shown_commands("kvcanary"), ids=" ".join)
def test_command_works(root: Path, arguments: list[str]) -> None:
    """Each command line ends clean."""
    child = subprocess.run(
        [sys.executable, "-m", "kvcanary_tools", *arguments], cwd=root, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip()


@pytest.mark.parametrize("arguments", shown_commands("make"), ids=" ".join)
def test_make_target_exists(root: Path, arguments: list[str]) -> None:
    """Each make line names a target, and its variables reach pip."""
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", *arguments], cwd=root, capture_output=True, text=True
    )
    assert planned.returncode == 0, planned.stderr
    for argument in arguments:
        if argument.startswith("PIP_ARGS="):
            assert argument.removeprefix("PIP_ARGS=") in planned.stdout


def test_folders_of_the_map_exist(root: Path) -> None:
    """The map names real folders, and every package is on it."""
    named = re.findall(r"^\| `([\w/]+)/` \|", README.read_text(), re.MULTILINE)
    assert {"kernels/kvcanary_kernels", "kvcanary", "spec_engine", "tools/kvcanary_tools", "tests"} <= set(named)
    assert all((root / folder).is_dir() for folder in named)


def test_links_lead_somewhere(root: Path) -> None:
    """Relative links point at files that exist."""
    for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", README.read_text()):
        assert (root / target.partition("#")[0]).exists(), target


def test_codes_are_the_canary_s(root: Path) -> None:
    """The table lists every check of this version, and no other."""
    from kvcanary.codes import FED

    table = README.read_text().partition("## What it checks")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ") and "code" not in line]
    assert {code.strip() for row in rows for code in row.split(",")} == FED


def test_report_is_what_the_demo_prints() -> None:
    """The report of the flipped bit is the one that `kvcanary demo` prints today; numbers may differ by machine."""
    from kvcanary_tools.commands.demo import NUM_TOKENS
    from kvcanary_tools.runs.demonstration import flip_bit, strike
    from spec_engine.models.embedded import load_excerpts

    shown = blocks("text")[0]
    outcome = strike(load_excerpts()[0].prompt, NUM_TOKENS, flip_bit)
    assert outcome.report is not None
    assert without_numbers(shown.strip()) == without_numbers(outcome.report.text().strip())


def without_numbers(text: str) -> list[str]:
    return [re.sub(r"0x[0-9a-f]+|-?\d+(\.\d+)?(e-?\d+)?", "#", line.rstrip()) for line in text.splitlines()]


def test_readme_quotes_the_recorded_figures(root: Path) -> None:
    """Speed and cost in the README are those that the benchmark scripts wrote."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    drafting = json.loads((results / "cpu_drafting.json").read_text(encoding="utf-8"))
    overhead = json.loads((results / "cpu_overhead.json").read_text(encoding="utf-8"))
    assert f"| {drafting['speedup_whole']['median']:.2f} x |" in readme
    assert f"| {drafting['accepted_length']:.2f} |" in readme
    for row in overhead["rows"]:
        figures = f"{row['prefill']['median']:.2f}, {row['steps']['median']:.2f}"
        assert f"| canary on over off, batch {row['batch']}: prefill, steps | {figures} |" in readme


def test_readme_shows_what_two_minutes_print(root: Path) -> None:
    """The lines of `kvcanary bench quick` are those of its record."""
    from kvcanary_tools.bench import quick

    results = root / "tools" / "kvcanary_tools" / "bench" / "results"
    quick_record = json.loads((results / "gpu_quick.json").read_text(encoding="utf-8"))
    shown = blocks("text")[1].splitlines()
    assert shown == [line for line in quick.lines(quick_record) if line.startswith(("overhead", "accuracy"))]


def test_readme_quotes_what_was_found_and_what_was_not(root: Path) -> None:
    """Misses and false alarms in the README are those that the measured runs wrote."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    misses = json.loads((results / "misses.json").read_text(encoding="utf-8"))
    figures = []
    for part in ("words", "rows", "pool"):
        kinds = [row for kind, row in misses[part].items() if kind != "all"]
        found, tried = (sum(row[key] for row in kinds) for key in ("found", "tried"))
        figures.append(f"{found:,} of {tried:,}")
    assert f"| {', '.join(figures)} |" in readme
    alarms = json.loads((results / "false_alarms.json").read_text(encoding="utf-8"))
    assert f"| {alarms['findings']} in {alarms['slots_checked']:,} |" in readme


def test_readme_quotes_what_the_engine_was_measured_at(root: Path) -> None:
    """Ancestors against columns, retractions and host checks are those of the records."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    reads, pressed, checks = (
        json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        for name in ("ancestors", "retractions", "host_checks")
    )
    lengths = [f"{row['ancestors']:.2f} over {row['columns']:.2f}" for row in reads]
    assert f"| {', '.join(lengths)} |" in readme
    counts = {(row["schedule"], row["estimate"]): row["retractions"] for row in pressed}
    figures = [f"{counts[name, 'tight']} and {counts[name, 'worst case']}" for name in ("sync", "overlap")]
    assert f"| {', '.join(figures)} |" in readme
    shares = [f"{row['percent_of_step']:.2f} %" for row in checks]
    assert f"| {', '.join(shares)} |" in readme


def test_readme_quotes_what_kernels_reach_on_a_gpu(root: Path) -> None:
    """Fingerprints, checks and attention as shares of what the device can move, from the records."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    kernels, attention = (
        json.loads((results / f"gpu_{name}.json").read_text(encoding="utf-8")) for name in ("kernels", "attention")
    )
    for what in ("one lane", "both lanes", "check"):
        rates = [shape["rates"]["random pages of 1"][what]["of_copy"] for shape in kernels["shapes"]]
        assert f"| {', '.join(format(rate, '.2f') for rate in rates)} |" in readme
    assert f"| {', '.join(f'{time:.0f} us' for time in kernels['chain_us'].values())} |" in readme
    reads = [row for row in attention["reads"] if (row["case"], row["rows"]) == ("decode", 64)]
    assert [row["page_size"] for row in reads] == [1, 16]
    assert f"| {', '.join(format(row['of_ceiling'], '.2f') for row in reads)} |" in readme


def test_readme_quotes_steps_and_prefills_of_a_gpu(root: Path) -> None:
    """A step over its floor, and the canary on over off, from the records."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    steps, prefills = (
        json.loads((results / f"gpu_{name}.json").read_text(encoding="utf-8"))["rows"] for name in ("step", "prefill")
    )
    assert [row["batch"] for row in steps] == [1, 64]
    cases = [(1, 4032), (1, 8192), (64, 4032)]
    prefills = [row for row in prefills if (row["requests"], row["tokens"]) in cases]
    assert [(row["requests"], row["tokens"]) for row in prefills] == cases
    floors = [format(row["over_floor"], ".2f") for row in steps]
    costs = [[format(row["over_off"]["rolling"]["median"], ".2f") for row in rows] for rows in (steps, prefills)]
    for figures in (floors, *costs):
        assert f"| {', '.join(figures)} |" in readme


def test_readme_quotes_a_long_prefill(root: Path) -> None:
    """The canary on over off in a prompt of 131,072 tokens."""
    record = root / "tools" / "kvcanary_tools" / "bench" / "results" / "gpu_prefill_long.json"
    (row,) = json.loads(record.read_text(encoding="utf-8"))["rows"]
    line = next(line for line in README.read_text(encoding="utf-8").splitlines() if f"[{record.name}]" in line)
    assert f"{row['tokens']:,} tokens | {row['over_off']['rolling']['median']:.2f} |" in line


def test_readme_quotes_our_engine_beside_vllm(root: Path) -> None:
    """Our time over theirs, without a canary and with one."""
    record = root / "tools" / "kvcanary_tools" / "bench" / "results" / "gpu_beside_vllm.json"
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    cases = [(of, requests) for of in ("prefill", "decode") for requests in (1, 64)]
    ratios = {(row["canary"], row["of"], row["requests"]): f"{row['ratio']['median']:.2f}" for row in rows}
    sides = [", ".join(ratios[(canary, *case)] for case in cases) for canary in ("off", "rolling")]
    assert f"| {'; '.join(sides)} |" in README.read_text(encoding="utf-8")


def test_readme_quotes_steps_with_drafts_and_pools_of_all_sizes(root: Path) -> None:
    """The canary on over off, what it adds to a draft substep, and what to a step by the pool's size."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    drafted, scaling = (
        json.loads((results / f"gpu_{name}.json").read_text(encoding="utf-8"))["rows"]
        for name in ("drafted_step", "scaling")
    )
    cases = [("tree", 1), ("tree", 16), ("chain", 1), ("chain", 16), ("chain", 64)]
    assert [(row["drafts"], row["batch"]) for row in drafted] == cases
    over = [f"{row['over_off']['rolling']['median']:.3f}" for row in drafted]
    added = [(row["substep_added_us"]["rolling"]["median"], row["substep_us"]["off"]) for row in drafted]
    pools = [row for row in scaling if (row["requests"], row["tokens"]) == (1, 4096)]
    assert [row["pool_times"] for row in pools] == [1, 8, 32]
    for figures in (
        over,
        [f"{round(us):+d} of {off:.0f} us" for us, off in added],
        [f"{row['added_us']['rolling']['median']:+.0f} us" for row in pools],
    ):
        assert f"| {', '.join(figures)} |" in readme


def test_readme_quotes_drafting_on_a_gpu(root: Path) -> None:
    """Speed-ups of the whole engine and what the canary costs it; launches and time that constants of a chain save."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    runs, chains = (
        json.loads((results / f"gpu_{name}.json").read_text(encoding="utf-8"))["rows"] for name in ("engine", "chain")
    )
    runs = [row for row in runs if row["schedule"] == "sync"]
    assert [row["batch"] for row in runs] == [row["batch"] for row in chains] == [1, 8]
    for canary in ("off", "on"):
        assert f"| {', '.join(format(row['speedup'][canary]['median'], '.2f') + ' x' for row in runs)} |" in readme
    costs = [
        ", ".join(f"{row['canary'][draft]['median']:.2f}" for draft in ("none", "drafting"))
        + f" at batch {row['batch']}"
        for row in runs
    ]
    assert f"| {', '.join(costs)} |" in readme
    assert f"| {', '.join(format(row['chain']['us'] / row['general']['us'], '.2f') for row in chains)} |" in readme
    first, second = ([row[way]["launches"] for way in ("chain", "general")] for row in chains)
    docs = (root / "docs" / "engine.md").read_text(encoding="utf-8")
    assert f"{first[0]} launches instead of {first[1]} at batch 1, {second[0]} instead of {second[1]}" in docs


def test_readme_quotes_what_the_flight_recorder_costs(root: Path) -> None:
    """Its share of a step and the bytes of a full ring, of every machine on which they were measured."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    records = sorted(results.glob("*_recorder.json"))
    assert results / "gpu_recorder.json" in records
    for path in records:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        shares = ", ".join(f"{row['percent_of_median_step']:.2f} %, {row['bytes'] / 1e6:.0f} MB" for row in rows)
        line = next(line for line in readme.splitlines() if f"[{path.name}]" in line)
        assert f"| {shares} |" in line


def test_readme_quotes_what_is_added_to_transformers(root: Path) -> None:
    """Seconds of `generate` with the canary over without."""
    readme, results = README.read_text(encoding="utf-8"), root / "tools" / "kvcanary_tools" / "bench" / "results"
    ratios = json.loads((results / "cpu_transformers.json").read_text(encoding="utf-8"))["ratios"]
    assert f"| {ratios['rolling']:.2f}, {ratios['full']:.2f} |" in readme


def test_readme_quotes_what_was_measured_inside_vllm(root: Path) -> None:
    """By record: findings, outputs that are equal, throughput."""
    results = root / "tools" / "kvcanary_tools" / "bench" / "results"
    runs = [
        json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["compared"] for name in ("vllm", "vllm_7b")
    ]
    findings = ", ".join(str(run["findings"]) for run in runs)
    equal = ", ".join(f"{min(pair['share'] for pair in run['on_off']):.0%}".replace("%", " %") for run in runs)
    throughput = ", ".join(f"{run['throughput_ratio']:.2f}" for run in runs)
    row = next(line for line in README.read_text(encoding="utf-8").splitlines() if "[vllm.json]" in line)
    assert f"| {findings}; {equal}; {throughput} |" in row
