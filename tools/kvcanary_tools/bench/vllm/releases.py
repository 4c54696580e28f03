"""Releases of vLLM and what ran in them: ``python -m kvcanary_tools.bench.vllm.releases`` writes docs/adapters.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcanary_tools.bench.vllm.cpu import HARMS, KEPT
from kvcanary_tools.bench.vllm.page import PAGE, Record, is_found, read
from kvcanary_tools.pages.marks import put_between

BEGIN, END = "<!-- releases of vllm: begin -->", "<!-- releases of vllm: end -->"
NAMES, ON_GPU = "drift_vllm", "vllm"


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


if __name__ == "__main__":
    put_between(PAGE, BEGIN, END, lines())
