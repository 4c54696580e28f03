"""What it costs that decode attention fingerprints what it reads: ``python -m kvcanary_tools.bench.gpu.fused``.

Layers of the 8B shape, 1 and 64 requests of 4,096 tokens, pages of one slot in random order, one query token each, as
captured graphs that take turns: attention alone; attention that fingerprints the rows that it reads, with the judging
of their sums; attention, and the check that reads all rows again. A pass's time is over all layers, many times what the
second-level cache holds. Before a time counts outputs are compared, nothing is found in rows as they were stored, and
one flipped bit is found where it lies.

Then the captured decode step of the whole model (``bench step``) under ``content=full``, fused and not, over off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from unittest import mock

import torch

from kvcanary import CanaryConfig
from kvcanary_kernels.content.check import check_content
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.content.reads import ReadKeys, ReadSums, judge_reads
from kvcanary_kernels.engine.attention import attention_workspace, paged_attention
from kvcanary_kernels.judge.forward import ForwardPlan, Planned, new_planned
from kvcanary_kernels.record.layout import Keys, make_keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows
from kvcanary_tools.bench.common import machine, progress, reported, save, settled, spread
from kvcanary_tools.bench.gpu import step
from kvcanary_tools.bench.gpu.device import device, give_back
from kvcanary_tools.bench.gpu.fitting import fit
from spec_engine import Engine
from spec_engine.models.decoder import Decoder

CASES = {1: 32, 64: 4}  # requests, and layers of which a pass reads each once
LENGTH, HEADS, FOLD, DIM = 4096, 8, 4, 128
ROUNDS, STEP_ROUNDS = 30, 3
TOLERANCE = 1e-2
ALONE, FUSED, AGAIN = "attention alone", "attention that fingerprints", "and a check that reads again"
CANARIES = {
    "off": CanaryConfig(mode="off"),
    "full": CanaryConfig(content="full"),
    "full, read again": CanaryConfig(content="full"),
}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.fused measures a CUDA device, and there is none here")
    kernels = [measure(requests, layers) for requests, layers in CASES.items()]
    model = step.random_decoder(step.LLAMA_8B)
    result = {
        "what": f"microseconds of one layer's decode attention, {LENGTH} tokens a request; steps under content=full",
        "machine": machine() | device(),
        "rows": kernels,
        "steps": [measure_steps(requests, model) for requests in CASES],
    }
    save("gpu_fused", result)
    for row in kernels:
        ways = ", ".join(f"{name} {us:.1f} us" for name, us in row["us"].items())
        print(f"{row['batch']} requests: {ways}   x{row['fused']:.3f}, x{row['again']:.3f}")
    for row in result["steps"]:
        print(f"batch {row['batch']}: off {row['off_ms']:.3f} ms{reported(row['over_off'])}")


def measure(requests: int, layers: int) -> dict:
    """Microseconds of a layer by way, and their ratios."""
    progress(f"attention of {requests} requests, {layers} layers")
    work = Work(requests, layers)
    work.expect_right()
    times = _medians({name: _captured(way) for name, way in work.ways().items()})
    us = {name: round(1e6 * seconds / layers, 2) for name, seconds in times.items()}
    alone = times[ALONE]
    ratios = {"fused": round(times[FUSED] / alone, 3), "again": round(times[AGAIN] / alone, 3)}
    return {"batch": requests, "layers": layers, "us": us} | ratios


class Work:
    """Pools of some layers, slots of rows in random order, queries, and what is known of the bytes."""

    def __init__(self, requests: int, layers: int) -> None:
        n, where = requests * LENGTH, {"dtype": torch.int64, "device": "cuda"}
        self.requests, self.kv = (
            requests,
            torch.randn(layers, n + 1, 2, HEADS, DIM, device="cuda", dtype=torch.bfloat16),
        )
        self.rows: PoolRows = pool_rows(list(self.kv[:, :, 0]), list(self.kv[:, :, 1]))
        self.keys: Keys = make_keys(1, layers, self.rows.words_per_row, "cuda")
        self.slots = torch.randperm(n, device="cuda") + 1
        self.content = torch.zeros(layers, n + 1, **where)
        fingerprint(self.rows, torch.arange(n + 1, device="cuda"), self.keys, fingerprint_a=self.content)
        self.codes, self.sums = torch.zeros(n, **where), torch.zeros(n, **where)
        self.mismatch = torch.zeros(n, 2, **where)
        keys = ReadKeys(self.rows, self.keys, HEADS)
        self.reads = [keys.of(layer, self.sums) for layer in range(layers)]
        self.q = torch.randn(requests, HEADS * FOLD, DIM, device="cuda", dtype=torch.bfloat16)
        self.bounds = torch.arange(requests + 1, device="cuda")
        self.starts = self.bounds * LENGTH
        self.out = torch.zeros(layers, *self.q.shape, device="cuda", dtype=torch.bfloat16)
        sizes = {"rows": requests, "max_q_len": 1, "max_kv_len": LENGTH}
        self.workspace = attention_workspace(requests, HEADS * FOLD, HEADS, DIM, **sizes, device="cuda")
        some = torch.zeros(requests, **where)
        live = torch.full((1,), requests, **where)
        self.forward = ForwardPlan(
            self.slots,
            self.starts[:-1],
            self.starts[1:],
            self.bounds,
            some,
            some,
            some,
            None,
            some,
            None,
            some,
            live,
        )
        self.planned: Planned = new_planned(self.forward)
        self.planned.starts.copy_(self.starts[:-1])
        self.planned.row_lengths.fill_(LENGTH)

    def ways(self) -> dict[str, Callable[[], None]]:
        return {ALONE: self.attend, FUSED: self.fused, AGAIN: self.again}

    def attend(self, reads: list[ReadSums] | None = None) -> None:
        for layer, kv in enumerate(self.kv):
            paged_attention(
                self.q,
                kv[:, 0],
                kv[:, 1],
                kv_indptr=self.starts,
                kv_indices=self.slots,
                q_indptr=self.bounds,
                max_kv_len=LENGTH,
                max_q_len=1,
                scale=DIM**-0.5,
                out=self.out[layer],
                workspace=self.workspace,
                reads=None if reads is None else reads[layer],
            )

    def fused(self) -> None:
        self.attend(self.reads)
        judge_reads(
            self.forward,
            self.planned,
            sums=self.sums,
            content_a=self.content,
            start_a=self.keys.start_a,
            codes=self.codes,
            null_slots=1,
        )

    def again(self) -> None:
        self.attend()
        check_content(self.rows, self.slots, self.keys, self.content, mismatch=self.mismatch)

    def expect_right(self) -> None:
        """RuntimeError unless outputs agree, and a flipped bit is all that is found."""
        self.attend()
        wanted = self.out.clone()
        self.out.fill_(torch.nan)
        self.fused()
        error = (self.out.float() - wanted.float()).abs().max().item()
        if not error < TOLERANCE:
            raise RuntimeError(f"the output is off by {error}: no timing of it counts")
        if self.codes.any():
            raise RuntimeError("faults are found in rows that are as they were stored: no timing of it counts")
        place = self.slots.numel() // 3
        word = self.kv.view(torch.int32)[-1, self.slots[place], 1, HEADS - 1, DIM // 4]
        word ^= 1 << 30
        self.fused()
        found = self.codes.nonzero().flatten().tolist()
        word ^= 1 << 30
        self.codes.zero_()
        if found != [place]:
            raise RuntimeError(f"a flipped bit of entry {place} is found in {found[:8]}: no timing of it counts")


def _captured(way: Callable[[], None]) -> torch.cuda.CUDAGraph:
    way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph


def _medians(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Seconds of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()  # or the time of a launch would be in it
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return {name: median(values) for name, values in times.items()}


def measure_steps(requests: int, model: Decoder, rounds: int = STEP_ROUNDS) -> dict:
    """Milliseconds of a step without a canary, and what the others take over that, rounds taking turns."""
    engines: dict[str, Engine] = {}
    fits = fit(requests, len(CANARIES), step.slots_of(rounds), model)
    requests = fits.requests
    for name, config in CANARIES.items():
        progress(f"batch {requests}: prompts, canary {name}")
        with _reading_again() if name.endswith("again") else nullcontext():
            engines[name] = step.make_engine(requests, model, config, rounds)
        step.fill(engines[name], requests, rounds)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    with settled():
        for number in range(rounds):
            order = list(engines.items())
            for name, engine in order if number % 2 else reversed(order):
                seconds[name].append(step.timed(engine))
    over_off = {name: spread(seconds[name], seconds["off"]) for name in seconds if name != "off"}
    engines.clear()
    give_back()
    return {"batch": requests, **fits.as_dict(), "off_ms": round(1e3 * median(seconds["off"]), 4), "over_off": over_off}


@contextmanager
def _reading_again() -> Iterator[None]:
    """Engines made within have attention that fingerprints nothing."""
    with mock.patch("kvcanary.captured.registry.reads_fit", return_value=False):
        yield


if __name__ == "__main__":
    main()
