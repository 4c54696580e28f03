"""What it costs to hash K and V while decode attention reads them: ``python -m kvcanary_tools.bench.fused``.

One layer of the 8B shape, 64 requests of 4,096 tokens, pages of one slot in random order, one query token each. Every
way's time is divided by that of the package's attention in the same run, launches taking turns; beside them stands the
check that re-reads what attention has read. Outputs are compared with the package's attention, and lanes with its
fingerprints bit for bit, before a time counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvcanary_kernels.attention import attention_workspace, paged_attention
from kvcanary_kernels.content import check_content
from kvcanary_kernels.fingerprint import fingerprint
from kvcanary_kernels.record import Keys, make_keys
from kvcanary_kernels.rows import PoolRows, pool_rows
from kvcanary_tools.bench.common import machine, progress, save
from kvcanary_tools.bench.gpu import device

ROWS, LENGTH, HEADS, FOLD, DIM = 64, 4096, 8, 4, 128
NUM_KEYS = ROWS * LENGTH
SCALE = DIM**-0.5 * 1.4426950408889634  # exponents are of two
ROUNDS = 30
POISON = -77
TOLERANCE = 1e-2
WAYS = {  # way, keys a program takes at a time, its warps, blocks of keys on their way
    "attention alone, Triton": ("nothing", 64, 4, 2),
    "words, one multiplication each": ("words", 128, 4, 3),
    "bytes read a second time, int8 tensor cores": ("bytes", 32, 1, 4),
    "attention alone, Gluon": ("nothing in place", 32, 2, 3),
    "bytes where attention reads them, int8 tensor cores": ("bytes in place", 32, 2, 3),
}


@dataclass(frozen=True)
class Operands:
    """A pool of one layer, the slots of its rows in random order, queries, and what should come out."""

    q: Tensor
    kv: Tensor
    slots: Tensor
    rows: PoolRows
    keys: Keys
    stored: Tensor  # [slots] lane a without the layer's constant

    @property
    def k(self) -> Tensor:
        return self.kv[:, 0]

    @property
    def v(self) -> Tensor:
        return self.kv[:, 1]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.fused measures a CUDA device, and there is none here")
    operands = _operands()
    launches = _unfused(operands)
    for name, way in WAYS.items():
        progress(name)
        launches[name] = _launch_of(operands, *way)
    times = _medians(launches)
    alone = times["the package's attention"]
    result = {
        "what": f"microseconds of one layer, {ROWS} requests of {LENGTH} tokens, and over the attention alone",
        "machine": machine() | device(),
        "ways": [{"way": name, "us": round(us, 1), "ratio": round(us / alone, 3)} for name, us in times.items()],
    }
    save("gpu_fused", result)
    for row in result["ways"]:
        print(f"{row['way']:<52}{row['us']:>8} us   x{row['ratio']:.2f}")


def _operands() -> Operands:
    kv = torch.randn(NUM_KEYS, 2, HEADS, DIM, device="cuda").to(torch.bfloat16)
    rows = pool_rows([kv[:, 0]], [kv[:, 1]])
    keys = make_keys(1, 1, rows.words_per_row, "cuda")
    lanes = torch.full((1, NUM_KEYS), POISON, dtype=torch.int64, device="cuda")
    fingerprint(rows, torch.arange(NUM_KEYS, device="cuda"), keys, lane_a=lanes)
    return Operands(
        q=torch.randn(ROWS, HEADS * FOLD, DIM, device="cuda").to(torch.bfloat16),
        kv=kv,
        slots=torch.randperm(NUM_KEYS, device="cuda"),
        rows=rows,
        keys=keys,
        stored=lanes[0] - keys.start_a[0],
    )


def _attention(operands: Operands, out: Tensor) -> Callable[[], None]:
    bounds = torch.arange(ROWS + 1, device="cuda")
    sizes = {"rows": ROWS, "max_q_len": 1, "max_kv_len": LENGTH}
    workspace = attention_workspace(ROWS, HEADS * FOLD, HEADS, DIM, **sizes, device="cuda")
    return lambda: paged_attention(
        operands.q,
        operands.k,
        operands.v,
        kv_indptr=bounds * LENGTH,
        kv_indices=operands.slots,
        q_indptr=bounds,
        max_kv_len=LENGTH,
        max_q_len=1,
        scale=DIM**-0.5,
        out=out,
        workspace=workspace,
    )


def _unfused(operands: Operands) -> dict[str, Callable[[], None]]:
    """Attention as it is, and with the check that reads the same bytes once more."""
    attend = _attention(operands, torch.empty_like(operands.q))
    mismatch = torch.full((NUM_KEYS, 2), POISON, dtype=torch.int64, device="cuda")
    lanes = (operands.stored + operands.keys.start_a[0])[None]

    def check() -> None:
        check_content(operands.rows, operands.slots, operands.keys, lanes, mismatch=mismatch)

    check()
    if mismatch.any():
        raise RuntimeError("the check finds faults in rows that are as they were stored: no timing of it counts")
    return {"the package's attention": attend, "and a check that reads again": lambda: (attend(), check())}


def _launch_of(operands: Operands, way: str, block: int, warps: int, stages: int) -> Callable[[], None]:
    """One way's launch, its results compared."""
    from kvcanary_tools.bench import fused_kernels as kernels

    factors, missing = kernels.byte_keys(operands.keys, HEADS)
    out = torch.full_like(operands.q, float("nan"))
    sums = torch.zeros(HEADS, NUM_KEYS, dtype=torch.int64, device="cuda")
    k, v = (part.view(torch.int32) if way == "words" else part for part in (operands.k, operands.v))
    sizes = LENGTH, NUM_KEYS, operands.kv.stride(0), SCALE
    shape = {"HEADS": HEADS, "FOLD": FOLD, "D": DIM, "N": block, "num_warps": warps}
    if way.endswith("in place"):
        hashes = way == "bytes in place"

        def launch() -> None:
            kernels._attend_and_hash_in_place_kernel[HEADS, ROWS](
                operands.q, k, v, operands.slots, factors, out, sums, *sizes, STAGES=stages, HASHES=hashes, **shape
            )
    else:
        number = ("nothing", "words", "bytes").index(way)

        def launch() -> None:
            kernels._attend_and_hash_kernel[HEADS, ROWS](
                operands.q,
                k,
                v,
                operands.slots,
                operands.keys.lane_a,
                factors,
                out,
                sums,
                *sizes,
                WAY=number,
                num_stages=stages,
                **shape,
            )

    launch()
    _expect_right(operands, out, way)
    if not way.startswith("nothing"):
        sums += missing[:, None] if way.startswith("bytes") else 0
        if not torch.equal(sums.sum(0), operands.stored[operands.slots]):
            raise RuntimeError(f"{way}: the lanes are not those of the fingerprints: no timing of it counts")
    return launch


def _expect_right(operands: Operands, out: Tensor, way: str) -> None:
    wanted = torch.empty_like(out)
    _attention(operands, wanted)()
    error = (out.float() - wanted.float()).abs().max().item()
    if not error < TOLERANCE:
        raise RuntimeError(f"{way}: the output is off by {error}: no timing of it counts")


def _medians(launches: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds of each, taking turns; the pool is many times the second-level cache."""
    times: dict[str, list[float]] = {name: [] for name in launches}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS):
        for name, launch in launches.items():
            launch()  # or the time of a launch would be in it
            start.record()
            launch()
            end.record()
            end.synchronize()
            times[name].append(1e3 * start.elapsed_time(end))
    return {name: median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
