"""What was shown in SGLang on a CPU: ``python -m kvcanary_tools.bench.sglang.page`` writes docs/sglang.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcanary_tools.bench.sglang.cpu import BESIDE, RESULTS
from kvcanary_tools.pages.marks import put_between

PAGE = Path(__file__).parents[4] / "docs" / "sglang.md"
BEGIN, END = "<!-- inside sglang: begin -->", "<!-- inside sglang: end -->"
BEGIN_BESIDE, END_BESIDE = "<!-- beside sglang's own: begin -->", "<!-- beside sglang's own: end -->"
Record = dict[str, Any]


def lines() -> Iterator[str]:
    """The tables, as Markdown: sound acts, then faults with the first finding of each."""
    record = read()
    machine = record["machine"]
    ours = f"torch {machine['torch']}, Triton {machine['triton']}, transformers {machine['transformers']}"
    yield f"SGLang {machine['sglang']} on a {machine['device'].upper()} with {ours}."
    yield "Rows `without` a number undo a fix of SGLang by its own switch; their controls are `topk 1, page 4`"
    yield "and, of 26972, `at the context's end`. Rows `kept` have the strategy `extra_buffer`."
    yield "Of two ranks, faults strike in rank 1:"
    yield ""
    yield "| scene | forwards; entries judged, by pool | findings | tokens |"
    yield "|---|---|---|---|"
    every = [(name, act) for name, scene in record["scenes"].items() for act in scene["acts"]]
    acts = [(name, act) for name, act in every if name not in BESIDE]
    for name, act in acts:
        if "equal_tokens" in act:
            fired = sum(sum(pool["fired"].values()) for pool in act["pools"].values())
            tokens = "equal" if act["equal_tokens"] else "other ones"
            yield f"| {name}{rank_of(act)} | {judged(act)} | {fired} | {tokens} |"
    yield ""
    yield "| scene | fault | first finding | its first cause |"
    yield "|---|---|---|---|"
    for name, act in acts:
        if "equal_tokens" not in act:
            raised = f", raised: {act['left']} tokens left" if "raised" in act else ""
            yield f"| {name}{rank_of(act)} | {fault_of(act, record['scenes'][name])}{raised} | {found_in(act)} |"


def beside() -> Iterator[str]:
    """The table of both canaries in one run."""
    yield "| scene | fault | kvcanary | SGLang's `kv_canary` |"
    yield "|---|---|---|---|"
    for name, scene in read()["scenes"].items():
        for act in scene["acts"] if name in BESIDE else ():
            theirs = ", ".join(dict.fromkeys(re.findall(r"fail_reason=(\S+)", " ".join(act.get("peer", ())))))
            fault = f"`{act['fault']}`" if act.get("fault") else "none"
            ours = found_in(act).split(" | ")[0]
            yield f"| {name} | {fault} | {ours} | {theirs or 'none'} |"


def read() -> Record:
    """The record that is kept."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def rank_of(act: Record) -> str:
    """Which of several it is."""
    return f", rank {act['rank']}" if "rank" in act else ""


def judged(act: Record) -> str:
    """Of each pool, its forwards, entries and states."""
    told = []
    for role, own in act["pools"].items():
        states = f"; {own['states_checked']} states" if "states_checked" in own else ""
        told.append(f"{role} {own['forwards']}; {own['slots_checked']:,}{states}")
    return ", ".join(told)


def fault_of(act: Record, scene: Record) -> str:
    """The name of a fault; a mend of SGLang that was taken back; where nothing was struck, that."""
    reverted = scene["environ"].get("SGLANG_DEBUG_REVERT_PR")
    fault = act.get("fault") or act.get("misreading")
    name = f"`{fault}`" if fault else f"`SGLANG_DEBUG_REVERT_PR={reverted}`"
    struck = act.get("touched")
    return f"{name} (nothing to strike)" if struck is not None and not any(struck.values()) else name


def found_in(act: Record) -> str:
    """Code, pool, request and place of the first finding, and its first cause."""
    if not act["findings"]:
        return "none | "
    own = act["findings"][0]
    who = own["reader"] or own["writer"]
    where = f"position {own['position']}" if own["position"] is not None else f"slot {own['slot']}"
    if own["code"] == "X1":
        where = own["found"]["resource"]
    layer = "" if own["layer"] is None else f", layer {own['layer']}"
    request = "" if who is None else f", request {who}"
    cause, _, _ = own["cause"].partition(";")
    return f"{own['code']} in {own['pool']}, {own['site'][0]}{request}, {where}{layer} | {cause}"


if __name__ == "__main__":
    put_between(PAGE, BEGIN, END, lines())
    put_between(PAGE, BEGIN_BESIDE, END_BESIDE, beside())
