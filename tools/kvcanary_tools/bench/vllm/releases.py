"""Releases of vLLM, what ran in them, and the soak: ``python -m kvcanary_tools.bench.vllm.releases`` writes them.

The page is docs/vllm.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.vllm.cpu import HARMS, KEPT
from kvcanary_tools.bench.vllm.page import PAGE, Record, is_found, read
from kvcanary_tools.pages.marks import put_between

BEGIN, END = "<!-- releases of vllm: begin -->", "<!-- releases of vllm: end -->"
SOAK_BEGIN, SOAK_END = "<!-- soak of vllm: begin -->", "<!-- soak of vllm: end -->"
NAMES, SOAK, ON_GPU = "drift_vllm", "cpu_vllm_soak", "vllm"


def lines() -> Iterator[str]:
    """The table, as Markdown, of the records that there are."""
    cpu, gpu = {runner: by_minor(read(name)) for runner, name in KEPT.items()}, read(ON_GPU)
    on_gpu = ".".join(gpu["vllm"].split(".")[:2])
    yield "| vLLM | names | on a CPU: runner | forwards; entries judged | findings | tokens | faults found | on a GPU |"
    yield "|---|---|---|---|---|---|---|---|"
    for version, names in read(NAMES)["releases"].items():
        minor = ".".join(version.split(".")[:2])
        card = f"`{ON_GPU}.json`, runner V2" if minor == on_gpu else "not run"
        for runner in [own for own, records in cpu.items() if own == "v1" or minor in records]:
            ran = " | ".join(row(cpu[runner].get(minor)))
            yield f"| {version} | {said(names)} | {runner.upper()} | {ran} | {card} |"


def by_minor(records: Record) -> dict[str, Any]:
    return {".".join(version.split(".")[:2]): record for version, record in records.items()}


def said(names: Record) -> str:
    """What a release lacks."""
    gone = sum(map(len, names["gone"].values()))
    return f"{gone} gone" if gone else "all there"


def row(record: Record | None) -> list[str]:
    """What one record says; a release that did not run says why."""
    if record is None:
        return ["no build of it for CPUs", "", "", ""]
    if "error" in record:
        return [f"did not start: `{record['error']}`", "", "", ""]
    clean, faults = record["clean"], record["faults"]
    found = [name for name in HARMS if is_found(faults[name])]
    stopped = record["raise"]["code"] is not None and record["raise"]["left"] == 0
    return [
        f"{clean['forwards']}; {clean['slots_checked']:,}",
        str(clean["findings"]),
        "equal" if clean["equal_tokens"] else "other ones",
        f"{len(found)} of {len(HARMS)}; raise: {'no token left' if stopped else 'tokens left'}",
    ]


def soaked(record: Record) -> Iterator[str]:
    """What a soak gave, in sentences."""
    clean, steps = record["clean"], [flip["steps_until_found"] for flip in record["flips"] if flip["found"]]
    yield f"A soak of {clean['seconds'] / 60:.0f} minutes (`{SOAK}.json`), vLLM {record['machine']['vllm']} on a CPU"
    yield f"with {record['engine']['blocks']} blocks: {clean['requests']:,} requests with shared prefixes in bursts,"
    yield f"{clean['preemptions']:,} preemptions, {sum(clean['aborts'].values()):,} aborts;"
    yield f"{clean['forwards']:,} forwards, {clean['slots_checked']:,} entries judged: {clean['findings']} findings."
    yield f"Then a bit was flipped every {record['asked']['flip_seconds']:.0f} s: {record['flips_found']} of"
    yield f"{record['flips_struck']} found, by request, block, layer and bit, within {max(steps, default=0)} steps,"
    yield f"and {record['all']['findings']} other findings."
    if not record["success"]:
        yield f"It was no success; it was ended by {record['ended_by']}."


def soak_lines() -> list[str]:
    """The paragraph of the soak, where there is a record of one."""
    return list(soaked(read(SOAK))) if (RESULTS / f"{SOAK}.json").exists() else []


if __name__ == "__main__":
    put_between(PAGE, BEGIN, END, lines())
    put_between(PAGE, SOAK_BEGIN, SOAK_END, soak_lines())
