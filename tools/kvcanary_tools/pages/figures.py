"""Measured figures of the README and of docs/measured.md: ``python -m kvcanary_tools.pages.figures`` writes both.

Each line of a table is one case of one record. An overhead is the median of what the canary adds, in percent; in
brackets are the least and the most of all rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from kvcanary_tools.pages.marks import put_between

ROOT = Path(__file__).parents[3]
README, MEASURED = ROOT / "README.md", ROOT / "docs" / "measured.md"
RESULTS = ROOT / "tools" / "kvcanary_tools" / "bench" / "results"
MUTANTS = ROOT / "tools" / "kvcanary_tools" / "mutation" / "results" / "mutants.json"
COST = ("without", "overhead")
OFF_ON = ("canary off", "canary on")
Line = tuple[str, str, str, str]  # case, without, overhead or figure, record


def record(name: str) -> dict[str, Any]:
    """The record of this name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def percent(ratio: float) -> str:
    """1.004 is +0.4 %."""
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"


def spread(ratio: dict[str, float]) -> str:
    """The median, and the least and most of all rounds."""
    return f"{percent(ratio['median'])} ({percent(ratio['min'])} to {percent(ratio['max'])})"


def steps() -> Iterator[Line]:
    """Decode steps of an 8B model."""
    for row in record("gpu_step")["rows"]:
        case = f"decode, 8B shape, {requests(row['batch'])} of 4,096 tokens"
        yield case, f"{row['off_ms']:.1f} ms", spread(row["over_off"]["rolling"]), "gpu_step"


def drafted() -> Iterator[Line]:
    """Decode steps with drafts, in CUDA graphs."""
    for row in record("gpu_drafted_step")["rows"]:
        case = f"drafts in a {row['drafts']}, 8B shape, {requests(row['batch'])}"
        yield case, f"{row['off_ms']:.1f} ms", spread(row["over_off"]["rolling"]), "gpu_drafted_step"
    for row in record("gpu_drafted_step_hybrid")["rows"]:
        case = f"drafts in a {row['drafts']}, a hybrid's 9B shape, {requests(row['batch'])}"
        yield case, f"{row['off_ms']:.1f} ms", spread(row["over_off"]["rolling"]), "gpu_drafted_step_hybrid"


def draft_forwards() -> Iterator[Line]:
    """One draft forward of these steps."""
    for row in record("gpu_drafted_step")["rows"]:
        case = f"one draft forward, {row['drafts']}, {requests(row['batch'])}"
        added = f"{row['substep_added_us']['rolling']['median']:+.0f} us"
        yield case, f"{row['substep_us']['off']:.0f} us", added, "gpu_drafted_step"


def pools() -> Iterator[Line]:
    """A step of one request in pools of several sizes."""
    for row in record("gpu_scaling")["rows"]:
        if (row["requests"], row["tokens"]) == (1, 4096):
            case = f"decode, 1 request of 4,096 tokens, pool {row['pool_times']} x as large as needed"
            yield case, "", f"{row['added_us']['rolling']['median']:+.0f} us", "gpu_scaling"


def prefills() -> Iterator[Line]:
    """Prompts, the long one last."""
    for name in ("gpu_prefill", "gpu_prefill_long"):
        for row in record(name)["rows"]:
            case = f"prefill, 8B shape, {requests(row['requests'])} of {row['tokens']:,} tokens"
            yield case, f"{row['off_ms']:,.0f} ms", spread(row["over_off"]["rolling"]), name


def elsewhere(device: str) -> str:
    """The GPU of a record, where it is another than that of the table."""
    return "" if "H200" in device else f" ({device.split()[1]})"


def vllm() -> Iterator[Line]:
    """Throughput inside vLLM."""
    for name, size in (("vllm_7b", "7.2 B"), ("vllm", "1.1 B")):
        own = record(name)
        case = f"vLLM 0.26, {size} parameters, 256 requests{elsewhere(own['gpu'])}"
        yield case, "", f"{percent(own['compared']['throughput_ratio'])} tokens per second", name


def sglang() -> Iterator[Line]:
    """Throughput inside SGLang."""
    for kind, what in (("dense", "no drafts"), ("eagle", "EAGLE"), ("tree", "EAGLE, trees of 4 branches")):
        own = record("gpu_sglang")[kind]
        ratio, bare = (median(run[key] for run in own["runs"]) for key in ("ratio", "bare"))
        case = f"SGLang {own['sglang']}, 8B shape, {own['case']['requests']} requests, {what}"
        case += elsewhere(own["machine"]["device"])
        yield case, f"{bare:,.0f} tokens/s", f"{percent(ratio)} tokens per second", "gpu_sglang"


def embedded() -> Iterator[Line]:
    """The embedded model, whose steps are too short to hide anything."""
    where = elsewhere(record("gpu_engine")["machine"]["device"])
    for row in record("gpu_engine")["rows"]:
        if row.get("schedule", "sync") != "sync":
            continue
        for draft, what in (("none", "no drafts"), ("drafting", "drafts")):
            case = f"the embedded toy model, batch {row['batch']}, {what}{where}"
            speed = f"{row['tokens_per_second'][draft]:,.0f} tokens/s"
            yield case, speed, f"{spread(row['canary'][draft])} time", "gpu_engine"


def on_cpu() -> Iterator[Line]:
    """Two threads of a CPU."""
    for row in record("cpu_overhead")["rows"]:
        for part, what in (("prefill", "prefill"), ("steps", "decode")):
            yield f"{what}, the embedded toy model, batch {row['batch']}", "", spread(row[part]), "cpu_overhead"
    for content, ratio in record("cpu_transformers")["ratios"].items():
        case = f"transformers' `generate`, 100 M parameters, batch 4, content `{content}`"
        yield case, "", percent(ratio), "cpu_transformers"
    for row in record("host_checks")["rows"]:
        case = f"checks that run without the canary too, batch {row['batch']}, share of a step"
        yield case, "", f"{row['percent_of_step']:.2f} %", "host_checks"


def recorders() -> Iterator[Line]:
    """What the flight recorder takes, on each machine."""
    for name in ("gpu_recorder", "cpu_recorder"):
        for row in record(name)["rows"]:
            size = f"{row['bytes'] / 1e6:.0f} MB"
            case = f"flight recorder, batch {row['batch']}, share of a step; its ring at most"
            yield case, "", f"{row['percent_of_median_step']:.2f} %; {size}", name


def drafting() -> Iterator[Line]:
    """What drafting gains."""
    for row in record("gpu_engine")["rows"]:
        if row.get("schedule", "sync") == "sync":
            off, on = (f"{row['speedup'][canary]['median']:.2f} x" for canary in ("off", "on"))
            yield f"drafting against no drafting, embedded toy model, GPU, batch {row['batch']}", off, on, "gpu_engine"
    own = record("cpu_drafting")
    yield "the same on a CPU, batch 1", f"{own['speedup_whole']['median']:.2f} x", "", "cpu_drafting"
    yield "tokens accepted per target forward there", f"{own['accepted_length']:.2f}", "", "cpu_drafting"


def trees() -> Iterator[Line]:
    """Trees that attend exactly, and preemptions under memory pressure."""
    for row in record("ancestors")["rows"]:
        case = f"accepted length, topk {row['topk']}: exact ancestors against one column a branch"
        yield case, f"{row['ancestors']:.2f} against {row['columns']:.2f}", "", "ancestors"
    for row in record("retractions")["rows"]:
        case = f"preemptions under memory pressure, {row['schedule']}, {row['estimate']} reserve"
        yield case, f"{row['retractions']}", "", "retractions"


def beside_vllm() -> Iterator[Line]:
    """Our engine's time relative to vLLM's."""
    rows = record("gpu_beside_vllm")["rows"]
    ratios = {(row["of"], row["requests"], row["canary"]): percent(row["ratio"]["median"]) for row in rows}
    for of in ("prefill", "decode"):
        for size in (1, 64):
            case = f"time of this engine against vLLM 0.26, {of}, {requests(size)}"
            yield case, ratios[of, size, "off"], ratios[of, size, "rolling"], "gpu_beside_vllm"


def floors() -> Iterator[Line]:
    """How far steps and attention are from what memory allows."""
    for row in record("gpu_step")["rows"]:
        case = f"decode step against reading its bytes once, 8B shape, {requests(row['batch'])}"
        yield case, f"{row['over_floor']:.2f} x", "", "gpu_step"
    for row in record("gpu_attention")["reads"]:
        if (row["case"], row["rows"]) == ("decode", 64):
            case = f"paged attention against a plain read of its bytes, pages of {row['page_size']}"
            yield case, f"{row['of_ceiling']:.2f} x the bandwidth", "", "gpu_attention"


def kernels() -> Iterator[Line]:
    """Bandwidth of the canary's kernels relative to a copy on the device."""
    own = record("gpu_kernels")
    for what, said in (("one lane", "one fingerprint"), ("both lanes", "both fingerprints"), ("check", "re-read")):
        rates = [shape["rates"]["random pages of 1"][what]["of_copy"] for shape in own["shapes"]]
        case = f"{said}: bandwidth relative to a device copy, least and most of {len(rates)} shapes"
        yield case, "", f"{min(rates):.2f} x, {max(rates):.2f} x", "gpu_kernels"


def found() -> Iterator[Line]:
    """Corruptions found, and findings where there was none."""
    kinds = {"words": "single words", "rows": "whole rows", "pool": "in a live pool, at the right slot"}
    for part, what in kinds.items():
        rows = [row for kind, row in record("misses")[part].items() if kind != "all"]
        share = f"{sum(row['found'] for row in rows):,} of {sum(row['tried'] for row in rows):,}"
        yield f"corruptions found: {what}", "", share, "misses"
    own = record("false_alarms")
    share = f"{own['findings']} in {own['slots_checked']:,} slot checks"
    yield "false positives on fault-free traffic", "", share, "false_alarms"
    meta = json.loads(MUTANTS.read_text(encoding="utf-8"))["meta"]
    share = f"{meta['killed']} of {meta['sample']}"
    yield "mutants of the canary's own code that its unit tests detect", "", share, MUTANTS.stem


def requests(count: int) -> str:
    """In words."""
    return "1 request" if count == 1 else f"{count} requests"


def table(lines: Iterable[Line], columns: tuple[str, str], up: str | None = None) -> Iterator[str]:
    """As Markdown; ``up``: where the README is, for links to the records."""
    yield f"| case | {' | '.join(columns)} | record |"
    yield "|---|---|---|---|"
    for case, bare, figure, name in lines:
        path = (RESULTS / f"{name}.json").relative_to(ROOT).as_posix()
        shown = f"`{name}.json`" if up is None else f"[{name}.json]({up}{path})"
        yield f"| {case} | {bare} | {figure} | {shown} |"


def readme() -> list[str]:
    """What a reader asks before installing: one case of each kind, and the worst."""
    chosen = (*steps(), *list(drafted())[1::3], list(prefills())[2], *vllm(), *sglang(), list(embedded())[1])
    return list(table(chosen, COST, ""))


PARTS: tuple[tuple[str, tuple[str, str], tuple[Callable[[], Iterator[Line]], ...]], ...] = (
    (
        "What does the canary cost on a GPU?",
        COST,
        (steps, drafted, draft_forwards, pools, prefills, vllm, sglang, embedded),
    ),
    ("What does it cost on a CPU, and what does the flight recorder?", COST, (on_cpu, recorders)),
    ("How fast is the engine?", OFF_ON, (beside_vllm, floors, drafting, trees)),
    ("How fast are the canary's own kernels?", ("", "figure"), (kernels,)),
    ("What does it find?", ("", "figure"), (found,)),
)


def measured() -> list[str]:
    """All of them, part by part."""
    text: list[str] = []
    for title, columns, parts in PARTS:
        text += [f"## {title}", "", *table((line for part in parts for line in part()), columns), ""]
    return text


BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

if __name__ == "__main__":
    put_between(README, BEGIN, END, readme())
    put_between(MEASURED, BEGIN, END, measured())
