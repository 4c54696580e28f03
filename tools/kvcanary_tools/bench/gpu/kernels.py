"""What the canary's kernels reach on a GPU: ``python -m kvcanary_tools.bench.gpu.kernels``.

Fingerprints are measured in bytes of the pool that they read, as a share of what a device copy moves in the same run;
rows are read in slot order and by random pages of 64, 16 and 1. The check re-reads rows that are as they were stored,
which is what it does all day; that it finds a flipped bit is tried beside. The chain of one prompt is in microseconds.
Every timing is of fresh random bytes and poisoned outputs, and its result is compared with the torch reference before
it counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcanary_kernels.content.check import check_content
from kvcanary_kernels.content.fingerprint import fingerprint, fingerprint_torch
from kvcanary_kernels.record.chain import chain_scan, chain_scan_torch
from kvcanary_kernels.record.layout import Keys, make_keys
from kvcanary_kernels.record.rows import PoolRows, pool_rows
from kvcanary_tools.bench.common import machine, progress, save
from kvcanary_tools.bench.gpu.device import device

NUM_LAYERS, HEAD_DIM = 32, 128
NUM_SLOTS = 131_072
COPY_BYTES = 1 << 30
POISON = -77
ORDERS = {"in slot order": None, "random pages of 64": 64, "random pages of 16": 16, "random pages of 1": 1}
FEW = (4096, 512, 64)
CHAINS = (4096, 131_072)


@dataclass(frozen=True)
class Shape:
    """Rows of a pool: what a rank of an 8B model holds of a token in a layer."""

    name: str
    heads: int
    dtype: torch.dtype


SHAPES = (
    Shape("8 heads, bf16", 8, torch.bfloat16),
    Shape("8 heads, fp8", 8, torch.float8_e4m3fn),
    Shape("2 heads, bf16", 2, torch.bfloat16),
    Shape("2 heads, fp8", 2, torch.float8_e4m3fn),
)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.kernels measures a CUDA device, and there is none here")
    ceiling = _copy_ceiling()
    tables = [_one_shape(shape, ceiling) for shape in SHAPES]
    result = {
        "what": f"{NUM_LAYERS} layers, {NUM_SLOTS} slots; TB/s of pool bytes, and their share of a device copy",
        "machine": machine() | device(),
        "copy_tb_s": round(ceiling, 3),
        "shapes": tables,
        "chain_us": {str(n): round(_chain(n), 1) for n in CHAINS},
    }
    save("gpu_kernels", result)
    _show(result)


def _one_shape(shape: Shape, ceiling: float) -> dict:
    progress(shape.name)
    rows, keys = _random_pool(shape)
    bytes_read = rows.num_layers * NUM_SLOTS * rows.words_per_row * 4
    stored, _ = _outputs(rows, NUM_SLOTS)
    fingerprint(rows, _order(None), keys, fingerprint_a=stored)
    rates = {}
    for name, page in ORDERS.items():
        slots = _order(page)
        _expect_right(rows, keys, slots)
        _expect_found(rows, keys, slots, stored)
        fingerprint_a, fingerprint_b = _outputs(rows, NUM_SLOTS)
        mismatch = torch.full((NUM_SLOTS, 2), POISON, dtype=torch.int64, device="cuda")
        seconds = {
            "one lane": _seconds(lambda s=slots, a=fingerprint_a: fingerprint(rows, s, keys, fingerprint_a=a)),
            "both lanes": _seconds(
                lambda s=slots, a=fingerprint_a, b=fingerprint_b: fingerprint(
                    rows, s, keys, fingerprint_a=a, fingerprint_b=b
                )
            ),
            "check": _seconds(lambda s=slots, c=stored, m=mismatch: check_content(rows, s, keys, c, mismatch=m)),
        }
        if mismatch.any():
            raise RuntimeError("the check finds faults in rows that are as they were stored: no timing of it counts")
        rates[name] = {
            what: {"tb_s": round(bytes_read / time / 1e12, 3), "of_copy": round(bytes_read / time / 1e12 / ceiling, 3)}
            for what, time in seconds.items()
        }
    few = {str(n): _few(rows, keys, n) for n in FEW}
    return {"shape": shape.name, "row_bytes": 4 * rows.words_per_row, "rates": rates, "few_slots_us": few}


def _few(rows: PoolRows, keys: Keys, n: int) -> dict:
    """Microseconds for n random slots, all layers."""
    slots = _order(1)[:n]
    fingerprint_a, fingerprint_b = _outputs(rows, n)
    return {
        "one lane": round(1e6 * _seconds(lambda: fingerprint(rows, slots, keys, fingerprint_a=fingerprint_a)), 1),
        "both lanes": round(
            1e6
            * _seconds(
                lambda: fingerprint(rows, slots, keys, fingerprint_a=fingerprint_a, fingerprint_b=fingerprint_b)
            ),
            1,
        ),
    }


def _expect_right(rows: PoolRows, keys: Keys, slots: Tensor) -> None:
    """RuntimeError unless kernel and reference agree on a sample of these slots."""
    sample = slots[:: max(1, len(slots) // 512)].contiguous()
    found, wanted = _outputs(rows, len(sample)), _outputs(rows, len(sample))
    fingerprint(rows, sample, keys, fingerprint_a=found[0], fingerprint_b=found[1])
    fingerprint_torch(rows, sample, keys, fingerprint_a=wanted[0], fingerprint_b=wanted[1])
    if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
        raise RuntimeError("kernel and torch reference disagree: no timing of it counts")


def _expect_found(rows: PoolRows, keys: Keys, slots: Tensor, stored: Tensor) -> None:
    """RuntimeError unless the check names one flipped bit, and it alone."""
    slot, layer = int(slots[len(slots) // 3]), rows.num_layers - 2
    word = rows.parts[1][layer][slot, 0, 0, -1:]
    word ^= 1 << 17
    mismatch = torch.full((len(slots), 2), POISON, dtype=torch.int64, device="cuda")
    check_content(rows, slots, keys, stored, mismatch=mismatch)
    word ^= 1 << 17
    if mismatch.nonzero().tolist() != [[len(slots) // 3, 0]] or int(mismatch.sum()) != 1 << layer:
        raise RuntimeError("the check does not name the one bit that is flipped: no timing of it counts")


def _outputs(rows: PoolRows, n: int) -> tuple[Tensor, Tensor]:
    fingerprint_a = torch.full((rows.num_layers, n), POISON, dtype=torch.int64, device="cuda")
    return fingerprint_a, torch.full((n,), POISON, dtype=torch.int64, device="cuda")


def _random_pool(shape: Shape) -> tuple[PoolRows, Keys]:
    dim = HEAD_DIM * shape.dtype.itemsize
    data = torch.randint(0, 256, (NUM_LAYERS, NUM_SLOTS, 2, shape.heads, dim), dtype=torch.uint8, device="cuda")
    kv = data.view(shape.dtype)
    rows = pool_rows([layer[:, 0] for layer in kv], [layer[:, 1] for layer in kv])
    return rows, make_keys(1, NUM_LAYERS, rows.words_per_row, "cuda")


def _order(page: int | None) -> Tensor:
    """[NUM_SLOTS] int64: every slot once, in order or page by page at random."""
    if page is None:
        return torch.arange(NUM_SLOTS, device="cuda")
    firsts = torch.randperm(NUM_SLOTS // page, device="cuda") * page
    return (firsts[:, None] + torch.arange(page, device="cuda")).flatten()


def _chain(n: int) -> float:
    """Microseconds of the chain values of one prompt of n tokens."""
    keys = make_keys(1, 1, 4, "cuda")
    tokens = torch.randint(0, 100_000, (n,), device="cuda")
    positions, out = torch.arange(n, device="cuda"), torch.full((n,), POISON, dtype=torch.int64, device="cuda")
    bounds, seeds = torch.tensor([0, n], device="cuda"), torch.tensor([5], device="cuda")
    wanted = torch.empty_like(out)
    chain_scan(tokens, positions, bounds, seeds, keys=keys, out=out)
    chain_scan_torch(tokens, positions, bounds, seeds, keys=keys, out=wanted)
    if not torch.equal(out, wanted):
        raise RuntimeError("chain kernel and torch reference disagree: no timing of it counts")
    return 1e6 * _seconds(lambda: chain_scan(tokens, positions, bounds, seeds, keys=keys, out=out))


def _copy_ceiling() -> float:
    """TB/s of a device copy, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: destination.copy_(source)) / 1e12


def _seconds(launch: Callable[[], object]) -> float:
    """Median seconds of one launch, the second-level cache flushed before each."""
    from triton.testing import do_bench

    return do_bench(launch, warmup=10, rep=50, return_mode="median") / 1e3


def _show(result: dict) -> None:
    print(f"device copy: {result['copy_tb_s']:.2f} TB/s on {result['machine']['device']}")
    for table in result["shapes"]:
        print(f"\n{table['shape']}, rows of {table['row_bytes']} bytes")
        for order, rates in table["rates"].items():
            cells = [f"{what} {rate['tb_s']:.2f} ({rate['of_copy']:.0%})" for what, rate in rates.items()]
            print(f"  {order:<20}" + "   ".join(cells))
        for n, times in table["few_slots_us"].items():
            print(f"  {n:>5} slots         " + "   ".join(f"{what} {time} us" for what, time in times.items()))
    print("\nchain of one prompt: " + ", ".join(f"{n} tokens {us} us" for n, us in result["chain_us"].items()))


if __name__ == "__main__":
    main()
