"""Every goal for speed with the figure that its record holds: ``python -m kvcanary_tools.bench.bars`` writes the page.

The table of docs/performance.md, and below it why a goal is missed, as far as profiles have told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.pages.marks import put_between

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"
BEGIN, END = "<!-- bars: begin -->", "<!-- bars: end -->"
Record = Any
Reason = str | Callable[[Record], str]


@dataclass(frozen=True)
class Bar:
    """One goal: a figure of a record that must be at most, or at least, so much."""

    what: str
    record: str
    figure: Callable[[Record], float]
    most: float | None = None
    least: float | None = None
    unit: str = ""
    digits: int = 3
    reason: Reason = ""  # why it is missed, from profiles, and from the record
    is_always_shown: bool = False  # the reason, also where the goal is met
    is_overhead: bool = False  # times with over times without, which the page says in percent

    def reached(self) -> float | None:
        """As the record has it; None while there is none, or it lacks the row."""
        record = read(self.record)
        try:
            return None if record is None else round(self.figure(record), self.digits)
        except NoRowError:
            return None

    @property
    def why(self) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason(read(self.record))

    def is_met(self, reached: float) -> bool:
        return (self.most is None or reached <= self.most) and (self.least is None or reached >= self.least)

    @property
    def goal(self) -> str:
        return f"at most {self.said(self.most)}" if self.least is None else f"at least {self.said(self.least)}"

    def said(self, figure: float | None) -> str:
        """As the page has it: 1.004 of what is overhead is +0.4 %."""
        if figure is None:
            return "no record yet"
        return f"{round(100 * (figure - 1), 2):+g} %" if self.is_overhead else f"{figure:g}{self.unit}"


def read(name: str) -> Record | None:
    """The record of this name; None while there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class NoRowError(LookupError):
    """A record in which a row is not measured yet."""


def row_of(record: Record, **names: object) -> Record:
    """The row that has these; NoRowError where there is none."""
    rows = [row for row in record["rows"] if names.items() <= row.items()]
    if not rows:
        raise NoRowError(f"a record must have a row of {names}, got none: measure it")
    (row,) = rows
    return row


def by_requests(
    what: str,
    record: str,
    figure: Callable[[int], Callable[[Record], float]],
    reasons: Mapping[int, Reason],
    **goal: Any,
) -> Iterator[Bar]:
    """One goal for several numbers of requests, each with why it is missed; ``goal``: the fields that are left."""
    for size, reason in reasons.items():
        requests = f"{size} request{'s' if size > 1 else ''}"
        name = what if size == min(reasons) else "the same"
        yield Bar(f"{name}, {requests}", record, figure(size), reason=reason, **goal)


def over_off(content: str, **names: object) -> Callable[[Record], float]:
    return lambda record: row_of(record, **names)["over_off"][content]["median"]


def over_vllm(of: str, requests: int) -> Callable[[Record], float]:
    return lambda record: row_of(record, of=of, requests=requests, canary="off")["ratio"]["median"]


def host_share(**names: object) -> Callable[[Record], float]:
    """What a canary adds to the host's work in a step, waits for the device left out, over a step without one."""
    return lambda record: row_of(record, **names)["percent_of_step"]


MOST_HOST_WORK = 3.0  # percent


def host_reason(record: Record) -> str:
    """What the same figures were on a slower host."""
    one, slow = row_of(record, drafts="none", batch=1), read("gpu_host_work_busy")
    shares = [f"{row['percent_of_step']:.2f}" for row in slow["rows"]]
    num_missed = sum(row["percent_of_step"] > MOST_HOST_WORK for row in slow["rows"])
    return (
        "steps are launched ahead, so that the host works while the device computes, and these times are hidden. They "
        f"are as long as the host is slow: with 1 request it works {one['work_us']['off']:.0f} us in a step without a "
        f"canary here and {one['added_us']:.0f} more with one, {one['canary_us']:.0f} of them within "
        f"{one['calls']:.0f} calls of it, and a turn of an empty Python loop takes {one['turn_ns']:.0f} ns. On a "
        "slower host (`gpu_host_work_busy`, before a drafted step was one launch) the engine without a canary worked "
        f"{row_of(slow, drafts='none', batch=1)['work_us']['off']:.0f} us, and the canary's part was "
        f"{', '.join(shares[:-1])} and {shares[-1]} %: {num_missed} of {len(shares)} rows beyond the goal."
    )


def substep_share(row: Record) -> float:
    """What is added over what may be: 1 % of a substep, and 4 us of a short one."""
    added: float = row["substep_added_us"]["rolling"]["median"]
    return added / max(4.0, row["substep_us"]["off"] / 100)


def slowest_rate(what: str) -> Callable[[Record], float]:
    """Of all shapes and orders, over a device copy's."""
    return lambda record: min(rate[what]["of_copy"] for shape in record["shapes"] for rate in shape["rates"].values())


def drafted(drafts: str, requests: int) -> Iterator[Bar]:
    """The goals of a step with drafts, and of a substep of it."""
    of = {"tree": "trees of 16 nodes", "chain": "chains of 3"}[drafts]
    of += f", {requests} {'request' if requests == 1 else 'requests'}"
    names: dict[str, Any] = {"drafts": drafts, "batch": requests}
    yield Bar(
        f"overhead of the default canary in a drafted step, {of}",
        "gpu_drafted_step",
        over_off("rolling", **names),
        most=1.01,
        is_overhead=True,
        digits=4,
        reason=DRAFTED,
    )
    yield Bar(
        "what it adds to a draft substep there, over 4 us or 1 %",
        "gpu_drafted_step",
        lambda record: substep_share(row_of(record, **names)),
        most=1.0,
        digits=2,
    )


MANY = (
    "of a step with 64 requests a profile showed 0.25 ms in which 262,144 records are read beside the model, 0.07 ms "
    "in which the rolling share of bytes is and 0.11 ms in which findings are counted; attention, which reads as fast "
    "as the memory gives, took 0.04 to 0.07 ms longer meanwhile."
)
ONE = (
    "of a step with one request a profile showed 0.11 ms for the canary, whether bytes are compared or not: stores, "
    "also into a copy, and the plan (0.03 ms), and beside the model fingerprints, seals, counts and reading of records."
)
DRAFTED = (
    "stamps within the graphs of trees of 16 requests showed attention of a layer to last as long beside four "
    "kernels of the canary as without them, and 14 us longer beside eight: a postponed draft forward is judged in "
    "three parts since, beside as many layers. What is left are 0.02 ms in which bytes are read again at the rate "
    "of the memory, 0.01 ms in which what the last layer stores is fingerprinted, and 0.02 ms beside the only "
    "attention of the draft's extend."
)
PREFILL = (
    "the beginning of a step comes before its first kernel, and fingerprints add to the stores of every layer; no "
    "profile has told yet how much either is."
)
VLLM = "no profile of both has told why."
CPU = (
    "of a step with one request on one thread, samples showed 6.7 % within the canary: 1.6 % stores that the engine "
    "does not make then, 1.1 % taking plans, 0.5 % judging all forwards of the step at once, the rest in many small "
    "functions. Lineages of drafts and announced forwards have come since: on the host of the record the code before "
    "them measured +8.0 to +8.9 %, in turns with this one."
)
FACTORS = "a program that has 128 keys of a KV head, 64 KB, reads 16 KB of factors of that head's keys too."
PRODUCTS = (
    "of a step with 64 requests a trace showed 1.55 ms more in attention, which takes 8.3 without, and 0.17 ms "
    "in which sums are judged. Blocks of 128 keys instead of 64 brought one layer from x1.29 of attention alone "
    "to x1.19; more warps, more blocks on their way and blocks of 32 keys did not."
)


def inside_vllm(record: Record) -> str:
    """How long the hooks are, of that record."""
    compared = record["compared"]
    told = [own["hooks"]["quiet"] for own in read("gpu_vllm_hooks") or () if "H200" in own["device"]]
    quiet, bare = (sorted(own[of] for own in told) for of in ("median_us", "step_without_us"))
    return (
        f"steps of so small a model, {compared['by_step']['ms'][0]:.1f} ms with 256 requests, are bounded by vLLM's "
        "work on the host, here in one process with its scheduler. In nearly every one blocks are given out, in many "
        f"requests come, go or are preempted: hooks take {min(compared['hooks_us']):.0f} us in the mean there, clocks "
        f"among them. Those of a step that repeats the last took {quiet[0]:.0f} to {quiet[-1]:.0f} us over a "
        f"runner without a model, whose own step took {bare[0]:.0f} to {bare[-1]:.0f} (`gpu_vllm_hooks`). "
        + least_of_hooks(read("vllm_floor"))
    )


def least_of_hooks(record: Record | None) -> str:
    """What hooks cost that judge nothing."""
    if record is None:
        return ""
    took, left = min(record["compared"]["hooks_us"]), record["compared"]["throughput_ratio"]
    return (
        f"Hooks that judge nothing, but stand guard, launch two graphs and look at a counter, take {took:.0f} us in "
        f"the mean, and leave {left:.3f} of the throughput (`vllm_floor`)."
    )


def beside_a_model(record: Record) -> str:
    """What a step that the GPU bounds takes longer."""
    compared = record["compared"]
    steps = compared["by_step"]
    off, on = steps["ms"]
    return (
        f"equal steps, of {off:.1f} ms, took {1000 * (on - off):.0f} us longer, a ratio of {steps['ratio']:.3f}. Hooks "
        f"take {min(compared['hooks_us']):.0f} us in the mean, of which the GPU's work hides most."
    )


def small_steps(record: Record) -> str:
    """Where the time of the smallest steps goes, by a profile."""
    plain, chain = (
        [row_of(record, schedule="sync", batch=1)["device_work"][f"{draft} {canary}"] for canary in ("off", "on")]
        for draft in ("none", "drafting")
    )
    kernels = [with_it["kernels"] - without["kernels"] for without, with_it in (plain, chain)]
    device = [with_it["microseconds"] - without["microseconds"] for without, with_it in (plain, chain)]
    return (
        f"by a profile, the canary adds {kernels[0]:.0f} kernels to the {plain[0]['kernels']:.0f} of a step with 1 "
        f"request and {kernels[1]:.0f} to the {chain[0]['kernels']:.0f} of one with a chain of 8 drafts, of 3 us each: "
        f"{device[0]:.0f} and {device[1]:.0f} us, part of which runs beside the model. The rest is Python of the host, "
        "100 to 250 us a step. Steps so short cannot hide that; longer ones do (rows 4 to 17)."
    )


#: Of goals about states.
BARS = (
    Bar("bytes fingerprinted a second over a device copy's", "gpu_kernels", slowest_rate("one lane"), least=0.9),
    Bar("bytes re-read and compared a second over a device copy's", "gpu_kernels", slowest_rate("check"), least=0.9),
    Bar(
        "captured decode step of an 8B model over the bytes that it must read, 1 request",
        "gpu_step",
        lambda record: row_of(record, batch=1)["over_floor"],
        most=1.3,
    ),
    *by_requests(
        "overhead of the default canary in that step",
        "gpu_step",
        lambda size: over_off("rolling", batch=size),
        {1: ONE, 64: MANY},
        most=1.01,
        is_overhead=True,
    ),
    *by_requests(
        "overhead of `content=write` in that step",
        "gpu_step",
        lambda size: over_off("write", batch=size),
        {1: ONE, 64: MANY},
        most=1.005,
        is_overhead=True,
    ),
    *(
        bar
        for drafts, requests in (("tree", 1), ("tree", 16), ("chain", 1), ("chain", 16), ("chain", 64))
        for bar in drafted(drafts, requests)
    ),
    *(
        Bar(
            f"{of} of {requests} {'request' if requests == 1 else 'requests'} over vLLM 0.26's in one process",
            "gpu_beside_vllm",
            over_vllm(of, requests),
            most=1.0,
            reason=VLLM,
        )
        for of in ("prefill", "decode")
        for requests in (1, 64)
    ),
    *(
        Bar(
            f"throughput of vLLM 0.26 with the plug-in over without, {parameters} parameters, 256 requests",
            record,
            lambda record: record["compared"]["throughput_ratio"],
            least=least,
            reason=reason,
        )
        for parameters, record, least, reason in (
            ("1.1 B", "vllm", 0.98, inside_vllm),
            ("7.2 B", "vllm_7b", 0.995, beside_a_model),
        )
    ),
    Bar(
        "steps until every byte of a running request has been read again, 64 requests",
        "gpu_step",
        lambda record: row_of(record, batch=64)["certificates"]["rolling"]["max_unread_steps"],
        most=128,
        digits=0,
    ),
    Bar(
        "overhead of the default canary in a prefill of 8,192 tokens",
        "gpu_prefill",
        over_off("rolling", requests=1, tokens=8192),
        most=1.003,
        is_overhead=True,
        digits=4,
        reason=PREFILL,
    ),
    Bar(
        "the same in one of 131,072 tokens",
        "gpu_prefill_long",
        over_off("rolling", requests=1, tokens=131072),
        most=1.001,
        is_overhead=True,
        digits=4,
        reason=PREFILL,
    ),
    *by_requests(
        "decode attention that fingerprints what it reads (`content=full`) over attention alone",
        "gpu_fused",
        lambda size: lambda record: row_of(record, batch=size)["fused"],
        {1: FACTORS, 64: PRODUCTS},
        most=1.15,
    ),
    *by_requests(
        "drafting over no drafting on a GPU, embedded model",
        "gpu_engine",
        lambda size: lambda record: row_of(record, batch=size, schedule="sync")["speedup"]["off"]["median"],
        {1: "", 8: ""},
        least=1.0,
        digits=2,
    ),
    Bar(
        "flight recorder, share of a step with 64 requests",
        "gpu_recorder",
        lambda record: row_of(record, batch=64)["percent_of_median_step"],
        most=1.0,
        unit=" %",
        digits=2,
    ),
    Bar(
        "overhead of the default canary in steps on a CPU, embedded model",
        "cpu_overhead",
        lambda record: max(row["steps"]["median"] for row in record["rows"]),
        most=1.1,
        is_overhead=True,
        reason=CPU,
    ),
    *by_requests(
        "host work for the canary over the time of a captured step",
        "gpu_host_work",
        lambda size: host_share(drafts="none", batch=size),
        {1: host_reason, 64: host_reason},
        is_always_shown=True,
        most=MOST_HOST_WORK,
        unit=" %",
        digits=2,
    ),
    *by_requests(
        "host work for the canary over the time of a drafted step, chains of 3",
        "gpu_host_work",
        lambda size: host_share(drafts="chain", batch=size),
        {1: host_reason, 16: host_reason},
        is_always_shown=True,
        most=MOST_HOST_WORK,
        unit=" %",
        digits=2,
    ),
    Bar(
        "always-on host checks, share of a step on a CPU",
        "host_checks",
        lambda record: max(row["percent_of_step"] for row in record["rows"]),
        most=1.0,
        unit=" %",
        digits=2,
    ),
    Bar(
        "drafting over no drafting on a CPU, embedded model",
        "cpu_drafting",
        lambda record: record["speedup_whole"]["median"],
        least=1.0,
        digits=2,
    ),
    Bar(
        "overhead of the default canary in transformers' `generate` on a CPU, 100 M parameters",
        "cpu_transformers",
        lambda record: record["ratios"]["rolling"],
        most=1.05,
        is_overhead=True,
    ),
    *by_requests(
        "host work for the canary over the time of a drafted step, trees of 16 nodes",
        "gpu_host_work",
        lambda size: host_share(drafts="tree", batch=size),
        {1: host_reason, 16: host_reason},
        is_always_shown=True,
        most=MOST_HOST_WORK,
        unit=" %",
        digits=2,
    ),
    *(
        bar
        for what, draft in (("without drafts", "none"), ("with chains of drafts", "drafting"))
        for bar in by_requests(
            f"overhead of the default canary on a GPU, embedded model, {what}",
            "gpu_engine",
            lambda size, draft=draft: (
                lambda record: row_of(record, batch=size, schedule="sync")["canary"][draft]["median"]
            ),
            {1: small_steps, 8: small_steps},
            most=1.3,
            is_overhead=True,
        )
    ),
    *(
        Bar(
            f"overhead of {what} in a captured decode step of a hybrid of 9 B, 64 requests",
            "gpu_step_hybrid",
            over_off(name, batch=64),
            most=1.01,
            is_overhead=True,
        )
        for what, name in (("`content=write`", "write"), ("the default canary", "rolling"))
    ),
)


def lines() -> Iterator[str]:
    """The table and the reasons, as Markdown."""
    yield "| what | goal | reached | | record |"
    yield "|---|---|---|---|---|"
    reported: dict[str, list[str]] = {}
    for number, bar in enumerate(BARS, 1):
        reached = bar.reached()
        is_missed = reached is not None and not bar.is_met(reached)
        verdict = "" if reached is None else "missed" if is_missed else "met"
        yield f"| {number}. {bar.what} | {bar.goal} | {bar.said(reached)} | {verdict} | `{bar.record}` |"
        if is_missed or (bar.is_always_shown and reached is not None):
            reported.setdefault(bar.why, []).append(str(number))
    yield ""
    for reason, numbers in reported.items():
        yield f"- {', '.join(numbers)}: {reason}"


if __name__ == "__main__":
    put_between(PAGE, BEGIN, END, lines())
