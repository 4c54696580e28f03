"""What was shown inside vLLM: ``python -m kvcanary_tools.bench.vllm.page`` writes the table of docs/vllm.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.pages.marks import put_between

PAGE = Path(__file__).parents[4] / "docs" / "vllm.md"
BEGIN, END = "<!-- inside vllm: begin -->", "<!-- inside vllm: end -->"
SETTINGS = {
    "vllm": "runner V2, full graphs, 1.1 B parameters",
    "vllm_7b": "the same, 7.2 B parameters",
    "vllm_fp8": "the same, fp8 cache, 1.1 B",
    "vllm_mla": "the same, DeepSeek-V2-Lite's latent cache without experts, 1.3 B",
    "vllm_windows": "the same, every other layer with a window of 128, 1.1 B",
    "vllm_piecewise": "runner V2, piecewise graphs",
    "vllm_eager": "runner V2, eager",
    "vllm_v1": "runner V1, full graphs",
    "vllm_eagle": "runner V2, full graphs, EAGLE draft of 3 tokens",
}
PARALLEL = "vllm_parallel"
FIRST_NAN = {"vllm_first_nan_dense": "a dense", "vllm_first_nan_mla": "a latent"}
HARMLESS = ("load", "none")  # attempts in which nothing must be found
Record = Mapping[str, Any]


def lines() -> Iterator[str]:
    """What was found and what it costs, as Markdown, of the records that there are."""
    records = {name: read(name) for name in SETTINGS if (RESULTS / f"{name}.json").exists()}
    yield "| setting | runs | entries judged in each | findings | tokens equal | faults found | record |"
    yield "|---|---|---|---|---|---|---|"
    for name, record in records.items():
        setting = f"{SETTINGS[name]}, on one {record['gpu'].split()[1]}"
        yield f"| {setting} | {' | '.join(found(record))} | `{name}.json` |"
    yield ""
    yield "What the canary changes of the throughput, and by how much runs without it differ from one another:"
    yield ""
    yield "| setting | all runs | equal steps | nine of ten resamplings of these | runs without |"
    yield "|---|---|---|---|---|"
    for name, record in records.items():
        yield f"| {SETTINGS[name]} | {' | '.join(cost(record['compared']))} |"
    yield ""
    yield from profiled(records["vllm"])
    yield ""
    yield from first_nan()
    if (RESULTS / f"{PARALLEL}.json").exists():
        yield ""
        yield from shared(read(PARALLEL))


def read(name: str) -> Record:
    """The record of this name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def profiled(record: Record) -> Iterator[str]:
    """Where the time of the first setting went."""
    profile, step = record["profile"], record["compared"]["by_step"]["ms"][0]
    hooks = {name: own["us"] * own["calls"] / profile["forwards"] for name, own in profile["hooks"].items()}
    most = [f"{us:.0f} of them `{name}`" for us, name in sorted(zip(hooks.values(), hooks, strict=True))[:-3:-1]]
    kernels = profile["kernels"]
    yield f"Of the first setting, a step takes {step:.1f} ms without; hooks take {sum(hooks.values()):.0f} us of one,"
    yield f"{' and '.join(most)}; the canary's kernels take"
    yield f"{kernels['ours_us'] / kernels['all_us']:.1%} of the device's work in a run of short answers.".replace(
        "%", " %"
    )


def first_nan() -> Iterator[str]:
    """How often the first place of NaN was named that a layer stored in a captured step."""
    yield "NaN that one layer stores of one token in a captured step (`python -m kvcanary_tools.bench.vllm.first_nan`):"
    yield "layer, request, position and step of the first were right in"
    told = [(words, read(name)) for name, words in FIRST_NAN.items()]
    yield " and ".join(f"{own['all_right']} of {len(own['tries'])} in {words} model" for words, own in told) + "."


def shared(record: Record) -> Iterator[str]:
    """What workers that share a model told."""
    clean = record["clean"]
    seen = " and ".join(f"{worker['slots_checked']:,}" for worker in clean["workers"])
    yield f"{record['ranks']} workers that share a model judged {seen} entries with {len(clean['findings'])} findings;"
    for name in ("one", "all"):
        struck = record[name]
        reported = " and ".join(
            f"{own['code']} of request {own['reader']} by {_ranks(own['ranks'])}" for own in struck["found"]
        )
        yield f"a bit flipped in {_ranks(struck['struck'])}: {reported or 'not found'};"
    struck = record["token"]
    reported = " and ".join(f"{own['code']}, {own['found']['resource']}" for own in struck["found"])
    yield f"another token drawn by {_ranks(struck['struck'])}: {reported or 'not found'}."
    compares, alone = (record["seconds"][name][1:] for name in ("compares", "alone"))
    yield f"Runs take {median(compares):.2f} s with ranks compared ({min(compares):.2f} to {max(compares):.2f}) and"
    yield f"{median(alone):.2f} s without that ({min(alone):.2f} to {max(alone):.2f});"
    if "off" in record["seconds"]:
        off = record["seconds"]["off"][1:]
        yield f"{median(off):.2f} s without a canary ({min(off):.2f} to {max(off):.2f});"
    yield f"in `{PARALLEL}.json`."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"


def found(record: Record) -> Iterator[str]:
    """What one record says of the canary's findings."""
    compared = record["compared"]
    yield str(sum(len(own) for own in compared["on_s"]))
    yield f"{compared['certificate']['slots_checked']:,}"
    yield str(compared["findings"])
    yield f"{min(pair['share'] for pair in compared['on_off']):.1%}".replace("%", " %")
    yield _faults(record.get("faults", {}))


def cost(compared: Record) -> Iterator[str]:
    """Of ratios of throughput what they are more or less than 1."""
    steps = compared["by_step"]
    yield _percent(compared["throughput_ratio"])
    yield _percent(steps["ratio"])
    yield _between(steps["range"])
    yield _between(compared["off_over_off"])


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _between(ratios: Sequence[float]) -> str:
    low, high = _percent(min(ratios)), _percent(max(ratios))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def _faults(faults: Record) -> str:
    harms = {name: found for name, found in faults.items() if name not in HARMLESS}
    right = [name for name, own in harms.items() if is_found(own)]
    false = [name for name in HARMLESS if faults.get(name, {}).get("found")]
    reported = f"{len(right)} of {len(harms)}" if harms else "not tried"
    return f"{reported}; {len(false)} where there was none" if false else reported


def is_found(fault: Record) -> bool:
    """Whether there is a finding that names a request: as reader or writer, or in the error that ended the engine."""
    if "raised" in fault:
        return fault["raised"] == "KVCorruptionError" and "reader    '" in fault["message"]
    named = [entry[1] if isinstance(entry, list) else entry["reader"] or entry["writer"] for entry in fault["found"]]
    return any(named)


if __name__ == "__main__":
    put_between(PAGE, BEGIN, END, lines())
