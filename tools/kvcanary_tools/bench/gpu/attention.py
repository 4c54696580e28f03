"""Our attention kernel on a CUDA device: ``python -m kvcanary_tools.bench.gpu.attention``.

One layer of the 8B shape (32 heads over 8 KV heads of 128, bf16), pages in random order, each call on another pool so
that nothing is read from the L2 cache. Calls are captured and replayed, the contestants taking turns. Decode and tree
verify are GB/s of K and V read, beside what a plain sum reads in the same run and what a launch alone takes; prefill is
the time beside torch's flash attention on contiguous K and V. Every output is compared before it is timed: with the
float64 reference, that of a prefill with torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcanary_kernels.engine.attention import attention_workspace, paged_attention, paged_attention_torch
from kvcanary_tools.bench.common import machine, progress, save
from kvcanary_tools.bench.gpu.device import device, read_ceiling

HEADS, KV_HEADS, DIM = 32, 8, 128
POOL_BYTES = 2**32  # of all pools that a case goes through
ROUNDS = 15
TOLERANCE = 1e-2  # of bf16 outputs of standard-normal values


@dataclass(frozen=True)
class Case:
    """``rows`` rows of ``kv_len`` keys, the last ``q_len`` of them new; nodes of a tree or a chain."""

    name: str
    rows: int
    kv_len: int
    q_len: int = 1
    is_tree: bool = False
    page_size: int = 1

    @property
    def kv_bytes(self) -> int:
        return self.rows * self.kv_len * 2 * KV_HEADS * DIM * 2

    @property
    def flops(self) -> float:
        """Of both products of a causal prefill of whole rows."""
        return 2.0 * self.rows * self.q_len * self.q_len * HEADS * DIM


READS = [
    Case("decode", 64, 4096),
    Case("decode", 64, 4096, page_size=16),
    Case("decode", 8, 4096),
    Case("decode", 1, 4096),
    Case("decode", 1, 32768),
    Case("verify", 64, 4096, q_len=8, is_tree=True),
    Case("verify", 8, 4096, q_len=64, is_tree=True),
    Case("verify", 1, 4096, q_len=64, is_tree=True, page_size=16),
]
PREFILLS = [
    Case("prefill", 1, 4096, q_len=4096),
    Case("prefill", 8, 4096, q_len=4096, page_size=16),
    Case("prefill", 1, 16384, q_len=16384),
]


class World:
    """Random queries and several pools for one case; every pool has the same rows."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.rows + case.kv_len)
        pages = case.rows * case.kv_len // case.page_size
        count = max(2, min(32, POOL_BYTES // case.kv_bytes))
        shape = (count, (pages + 1) * case.page_size, 2, KV_HEADS, DIM)
        self.case = case
        self.pools = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.q = torch.randn(case.rows * case.q_len, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.full_like(self.q, torch.nan)
        self.indices = torch.randperm(pages, device="cuda") + 1
        rows = torch.arange(case.rows + 1, device="cuda")
        self.kv_indptr, self.q_indptr = rows * (case.kv_len // case.page_size), rows * case.q_len
        self.mask = _random_trees(case.rows, case.q_len) if case.is_tree else None
        sizes = {"rows": case.rows, "max_q_len": case.q_len, "max_kv_len": case.kv_len}
        self.workspace = attention_workspace(len(self.q), HEADS, KV_HEADS, DIM, device="cuda", **sizes)

    def ours(self, pool: int) -> None:
        self._call(paged_attention, pool, self.q, self.out)

    def check(self) -> None:
        """RuntimeError unless the output is right within bf16 error."""
        self.ours(0)
        expected = torch.full_like(self.q, torch.nan, dtype=torch.float64)
        if self.case.q_len <= 64:
            self._call(paged_attention_torch, 0, self.q.double(), expected)
            error = (self.out - expected).abs().max().item()
        else:
            error = (self.out - self.sdpa(0)).abs().max().item()
        if not error < TOLERANCE:
            raise RuntimeError(f"{self.case} is off by {error}, at most {TOLERANCE} is bf16 error")

    def sdpa(self, pool: int) -> Tensor:
        """Flash attention over K and V that lie in order, [rows, heads, len, dim] each."""
        k, v = self._ordered(pool)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q = self.q.view(self.case.rows, -1, HEADS, DIM).transpose(1, 2)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.q.shape)

    def contiguous(self) -> Callable[[int], object]:
        """`sdpa` over copies that were made before."""
        copies = [self._ordered(pool) for pool in range(len(self.pools))]
        self._ordered = copies.__getitem__  # type: ignore[method-assign]
        return self.sdpa

    def _ordered(self, pool: int) -> tuple[Tensor, Tensor]:
        pages = self.pools[pool].view(-1, self.case.page_size, 2, KV_HEADS, DIM)[self.indices]
        kv = pages.reshape(self.case.rows, self.case.kv_len, 2, KV_HEADS, DIM)
        k, v = (part.transpose(1, 2).contiguous() for part in kv.unbind(2))
        return k, v

    def _call(self, attention: Callable, pool: int, q: Tensor, out: Tensor) -> None:
        attention(
            q,
            self.pools[pool, :, 0],
            self.pools[pool, :, 1],
            kv_indptr=self.kv_indptr,
            kv_indices=self.indices,
            q_indptr=self.q_indptr,
            max_kv_len=self.case.kv_len,
            max_q_len=self.case.q_len,
            scale=DIM**-0.5,
            out=out,
            tree_mask=self.mask,
            page_size=self.case.page_size,
            workspace=self.workspace,
        )


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.gpu.attention measures a CUDA device, and there is none here")
    ceiling = read_ceiling() / 1e9
    result = {
        "what": "microseconds a call, medians, one layer of 32 heads over 8 KV heads of 128 in bf16",
        "machine": machine() | device(),
        "read_ceiling_gbps": round(ceiling),
        "launch_us": round(launch_time(), 2),
        "reads": [_read(case, ceiling) for case in READS],
        "prefills": [_prefill(case) for case in PREFILLS],
    }
    save("gpu_attention", result)
    print(f"read ceiling {ceiling:.0f} GB/s, a launch {result['launch_us']:.1f} us")
    print("case      rows  keys  new  page        us    GB/s   of the ceiling")
    for row in result["reads"]:
        print(f"{_label(row)} {row['us']:9.1f} {row['gbps']:7.0f}   {row['of_ceiling']:.2f}")
    print("case      rows  keys  new  page        us  TFLOP/s   SDPA us   ratio")
    for row in result["prefills"]:
        print(f"{_label(row)} {row['us']:9.1f} {row['tflops']:8.0f} {row['sdpa_us']:9.1f}   {row['ratio']:.2f}")


def launch_time() -> float:
    """Microseconds from one kernel of a graph to the next where there is nothing to do."""
    number = torch.zeros(1, device="cuda")
    return median(time_calls({"add": lambda _: number.add_(1)}, 32)["add"])


def time_calls(contestants: dict[str, Callable[[int], object]], num_pools: int) -> dict[str, list[float]]:
    """Microseconds of a call, by round: all pools in one captured graph, the contestants' graphs taking turns."""
    graphs = {}
    for name, call in contestants.items():
        for pool in range(num_pools):
            call(pool)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for pool in range(num_pools):
                call(pool)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / num_pools)
    return times


def _read(case: Case, ceiling: float) -> dict:
    world = World(case)
    world.check()
    times = time_calls({"ours": world.ours}, len(world.pools))["ours"]
    gbps = case.kv_bytes / median(times) / 1e3
    progress(f"{case}: {gbps:.0f} GB/s")
    return _row(case, times) | {"gbps": round(gbps), "of_ceiling": round(gbps / ceiling, 3)}


def _prefill(case: Case) -> dict:
    world = World(case)
    world.check()
    times = time_calls({"ours": world.ours, "sdpa": world.contiguous()}, len(world.pools))
    ours, sdpa = median(times["ours"]), median(times["sdpa"])
    progress(f"{case}: {ours / sdpa:.2f} of SDPA's time")
    rates = {"tflops": round(case.flops / ours / 1e6), "sdpa_us": round(sdpa, 1), "ratio": round(ours / sdpa, 3)}
    return _row(case, times["ours"]) | rates


def _row(case: Case, times: list[float]) -> dict:
    sizes = {"rows": case.rows, "keys": case.kv_len, "new": case.q_len, "page_size": case.page_size}
    return {"case": case.name, **sizes, "us": round(median(times), 2), "us_min": round(min(times), 2)}


def _label(row: dict) -> str:
    return f"{row['case']:8s} {row['rows']:5d} {row['keys']:5d} {row['new']:4d} {row['page_size']:5d}"


def _random_trees(rows: int, nodes: int) -> Tensor:
    """[rows, nodes, nodes] bool: each node sees itself and the ancestors that a random parent has."""
    mask = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    for node in range(1, nodes):
        parents = torch.randint(0, node, (rows,))
        mask[:, node] |= mask[torch.arange(rows), parents]
    return mask.cuda()


if __name__ == "__main__":
    main()
