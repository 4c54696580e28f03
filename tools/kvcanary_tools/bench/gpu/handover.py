"""K and V of a prompt from one GPU into another one's pool, and what it costs to compare them there.

``python -m kvcanary_tools.bench.gpu.handover``: two GPUs of one host, a process each, pools of an 8B model (32 layers,
8 KV heads of 128, bf16), 4,096 tokens. By NIXL between the pools' own pages where that package is, else by NCCL. A
clean run has the bytes that left, and no finding; then four faults, each of which must be T1 with its verdict. Times
are medians of ROUNDS.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvcanary import CanaryConfig, CanaryManager
from kvcanary.report.finding import Finding
from kvcanary.transfers import PageSnapshot, Peer, Seal
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.record.layout import make_keys
from kvcanary_tools.bench.common import machine, save
from kvcanary_tools.bench.gpu.device import device
from spec_engine.disagg.link import Link, Piece, expect_all, until_over
from spec_engine.disagg.nixl_link import NixlLink
from spec_engine.memory.pools.pool import KVPool

NAME, ROUNDS, SEED, WAIT_SECONDS = "gpu_handover", 10, 7, 60.0
BAR = 0.01  # of the transfer
PREFILL = Peer("prefill", 0, "GPU 0")
#: Begins to bring all pages of the sender into those of the receiver; what it gives waits until the device has them.
Move = Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Shape:
    """Of a pool, and of the prompt in it."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    tokens: int = 4096
    dtype: torch.dtype = torch.bfloat16

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size

    @property
    def num_bytes(self) -> int:
        return self.layers * self.tokens * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class Side:
    """A pool with room for two prompts, and its canary; the prompt lies on ``pages``."""

    def __init__(self, shape: Shape, device: torch.device, first_page: int) -> None:
        self.shape, self.device = shape, device
        self.pages = list(range(first_page, first_page + shape.pages))
        self.pool = KVPool(
            "target",
            num_layers=shape.layers,
            num_pages=2 * shape.pages,
            page_size=shape.page_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            token_offset=0,
            dtype=shape.dtype,
            device=device,
        )
        self._step, self.canary = 0, self._new_canary()

    def watch(self) -> None:
        """By a new canary, which has told of nothing."""
        self.canary.detach()
        self._step, self.canary = 0, self._new_canary()

    def _new_canary(self) -> CanaryManager:
        config = CanaryConfig(mode="log", seed=SEED, poison="off", quarantine=0, dump_dir=None)
        canary = CanaryManager(config, [self.pool.view()])
        canary.arm()
        return canary

    @property
    def rows(self) -> Tensor:
        """[layers, tokens, 2, heads, dim] of the prompt, in place."""
        first = self.pages[0] * self.shape.page_size
        return self.pool.kv[:, first : first + self.shape.tokens]

    def fill(self) -> None:
        """The same numbers on every device of a kind."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        self.rows.copy_(torch.randn(self.rows.shape, generator=generator, device=self.device, dtype=self.shape.dtype))

    def admit(self) -> str:
        """A request that owns the pages, into which bytes come."""
        self._step += 1
        self.canary.begin_step(self._step)
        name = f"r{self._step}"
        self.canary.admit(name, list(range(self.shape.tokens)))
        self.canary.on_alloc(name, self.pages, True)
        self.canary.on_load_begin(name, self.pages)
        return name

    def seal(self) -> PageSnapshot:
        """Of the prompt as it lies there."""
        name = self.admit()
        self.canary.on_load_end(name, self.pages, self.shape.tokens)
        return self.canary.on_offload(self.pages)

    def prepare(self, name: str, seal: PageSnapshot) -> float:
        """They are on their way: seconds in which the host makes ready all but the comparison."""
        started = time.perf_counter()
        self.canary.prepare_load(name, self.pages, self.shape.tokens, seal)
        return time.perf_counter() - started

    def compare(self, name: str, seal: PageSnapshot) -> float:
        """They have come: seconds until that is judged, with the device idle before and after."""
        self.synchronize()
        started = time.perf_counter()
        self.canary.on_load_end(name, self.pages, self.shape.tokens, seal)
        self.synchronize()
        return time.perf_counter() - started

    def leave(self, name: str) -> None:
        self.canary.release(name)
        self.canary.on_free(name, self.pages)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def flip(side: Side) -> None:
    side.rows[3, 9, 1, 1, 5:6].view(torch.int16).bitwise_xor_(1 << 4)


def exchange_pages(side: Side) -> None:
    size, rows = side.shape.page_size, side.rows
    first, second = rows[:, :size].clone(), rows[:, 2 * size : 3 * size].clone()
    rows[:, :size], rows[:, 2 * size : 3 * size] = second, first


def cut_layer(side: Side) -> None:
    side.rows[2, side.shape.tokens // 2 :] = 0


def exchange_layers(side: Side) -> None:
    side.rows[[0, 1]] = side.rows[[1, 0]]


#: What is broken behind the transfer, the verdict that is due, and the layers (None: all).
FAULTS: dict[str, tuple[Callable[[Side], None], str, list[int] | None]] = {
    "one bit": (flip, "one word", [3]),
    "two pages exchanged": (exchange_pages, "misrouted", None),
    "a layer cut": (cut_layer, "short", [2]),
    "two layers exchanged": (exchange_layers, "other layout", [0, 1]),
}


def receive(side: Side, seal: PageSnapshot, move: Move, rounds: int = ROUNDS) -> dict[str, Any]:
    """All that is measured and tried of a receiver; `move` as often as it is needed."""
    seal = seal.arrived_from(PREFILL)
    result = {"clean": _clean(side, seal, move), "faults": [_fault(side, seal, move, name) for name in FAULTS]}
    side.watch()
    taken = [_timed(side, seal, move) for _ in range(rounds + 2)][2:]  # the first ones compile
    moves, watched, prepares, compares = (median(seconds) for seconds in zip(*taken, strict=True))
    kernel = _kernel(side)
    return result | {
        "transfer_ms": 1e3 * moves,
        "transfer_gb_s": side.shape.num_bytes / moves / 1e9,
        "prepare_ms": 1e3 * prepares,
        "transfer_beside_it_ms": 1e3 * watched,
        "compare_ms": 1e3 * compares,
        "compare_over_transfer": compares / moves,
        "fingerprints_ms": 1e3 * kernel,
        "fingerprints_over_transfer": kernel / moves,
        "bar": BAR,
    }


def _clean(side: Side, seal: PageSnapshot, move: Move) -> dict[str, Any]:
    side.fill()
    sent = side.rows.clone()
    side.rows.zero_()
    findings = _run(side, seal, move, lambda side: None)
    return {"equal": torch.equal(side.rows, sent), "findings": [finding.code for finding in findings]}


def _fault(side: Side, seal: PageSnapshot, move: Move, name: str) -> dict[str, Any]:
    spoil, verdict, layers = FAULTS[name]
    finding = next(iter(_run(side, seal, move, spoil)), None)
    if finding is None:
        return {"fault": name, "found": False}
    wrong = finding.found["layers_wrong"]
    found = (finding.code, finding.found["verdict"], wrong) == (
        "T1",
        verdict,
        list(range(side.shape.layers)) if layers is None else layers,
    )
    return {"fault": name, "found": found, "code": finding.code, "verdict": finding.found["verdict"], "layers": wrong}


def _run(side: Side, seal: PageSnapshot, move: Move, spoil: Callable[[Side], None]) -> list[Finding]:
    side.watch()
    name = side.admit()
    moved = move()
    side.prepare(name, seal)
    moved()
    spoil(side)
    side.compare(name, seal)
    side.canary.check()
    return side.canary.findings


def _timed(side: Side, seal: PageSnapshot, move: Move) -> tuple[float, float, float, float]:
    """Seconds of the transfer; of one beside which the comparison is prepared, of that, and of the comparison."""
    side.synchronize()
    started = time.perf_counter()
    move()()
    alone = time.perf_counter() - started
    name = side.admit()
    side.synchronize()
    started = time.perf_counter()
    moved = move()
    prepared = side.prepare(name, seal)
    moved()
    watched = time.perf_counter() - started
    compared = side.compare(name, seal)
    side.leave(name)
    return alone, watched, prepared, compared


def _kernel(side: Side) -> float:
    """Seconds of the fingerprints alone, which is all that reads the bytes."""
    size = side.shape.page_size
    slots = torch.arange(side.pages[0] * size, side.pages[0] * size + side.shape.tokens, device=side.device)
    rows = side.pool.view().rows
    keys = make_keys(SEED, side.shape.layers, rows.words_per_row, side.device)
    out = {"fingerprint_a": slots.new_empty(side.shape.layers, len(slots)), "fingerprint_b": torch.empty_like(slots)}
    fingerprint(rows, slots, keys, **out)  # compiles
    times = []
    for _ in range(ROUNDS):
        side.synchronize()
        started = time.perf_counter()
        fingerprint(rows, slots, keys, **out)
        side.synchronize()
        times.append(time.perf_counter() - started)
    return median(times)


# moving


def pieces(side: Side) -> list[Piece]:
    """The prompt's pages of every layer."""
    page = side.pool.kv[0, 0].nbytes * side.shape.page_size
    firsts = [layer * side.pool.kv[0].nbytes for layer in range(side.shape.layers)]
    return [Piece(0, first + number * page, page) for first in firsts for number in side.pages]


def by_link(side: Side, link: Link, peer: str, there: Sequence[Piece]) -> Move:
    def move() -> Callable[[], None]:
        transfer = link.fetch(peer, there, pieces(side))

        def wait() -> None:
            until_over(transfer, WAIT_SECONDS)
            expect_all(transfer)

        return wait

    return move


def _by_nccl(side: Side, ask: Callable[[], None]) -> Move:
    import torch.distributed as dist

    def move() -> Callable[[], None]:
        ask()
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, layer, 0) for layer in side.rows])

        def wait() -> None:
            for work in works:
                work.wait()
            side.synchronize()

        return wait

    return move


# processes


def prefill_process(pipe: Connection, transport: str, port: int, shape: Shape) -> None:
    """GPU 0: the prompt lies there, is sealed, and is read or sent as often as it is asked for."""
    side = Side(shape, torch.device("cuda:0"), 1)
    torch.cuda.set_device(0)
    side.fill()
    if transport == "nixl":
        link = NixlLink("prefill")
        pipe.send((side.seal().to_bytes(), link.expose([side.pool.kv]), pieces(side)))
        pipe.recv()
        return
    dist = _group(port, 0)
    pipe.send((side.seal().to_bytes(), b"", []))
    while pipe.recv():
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, layer, 1) for layer in side.rows]):
            work.wait()
        side.synchronize()


def _group(port: int, rank: int) -> Any:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    return dist


def run(transport: str, shape: Shape) -> dict[str, Any]:
    """GPU 1 here, GPU 0 in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=prefill_process, args=(there, transport, port, shape), daemon=True)
    child.start()
    side = Side(shape, torch.device("cuda:1"), 1 + shape.pages)
    torch.cuda.set_device(1)
    if transport == "nccl":
        _group(port, 1)
    if not here.poll(WAIT_SECONDS):
        raise TimeoutError(f"the prefill process said nothing for {WAIT_SECONDS} s")
    wire, address, sent = here.recv()
    seal = Seal.from_bytes(wire)
    if not isinstance(seal, PageSnapshot):
        raise TypeError(f"a seal of pages was due, got {type(seal).__name__}")
    if transport == "nixl":
        link = NixlLink("decode")
        link.expose([side.pool.kv])
        move = by_link(side, link, link.connect(address), sent)
    else:
        move = _by_nccl(side, lambda: here.send(True))
    result = receive(side, seal, move) | {"seal_bytes": len(wire)}
    here.send(False)
    child.join(10)
    child.kill()
    return result


def main() -> None:
    if torch.cuda.device_count() < 2:
        sys.exit("kvcanary_tools.bench.gpu.handover measures two CUDA devices, and there are fewer here")
    shape, transport = Shape(), "nixl" if find_spec("nixl") else "nccl"
    result = run(transport, shape)
    about = {
        "what": "K and V of one prompt of an 8B model from GPU to GPU, and their comparison behind the transfer",
        "machine": machine() | device(),
        "transport": transport,
        "tokens": shape.tokens,
        "bytes": shape.num_bytes,
        "rounds": ROUNDS,
    }
    save(NAME if transport == "nccl" else f"{NAME}_{transport}", about | result)
    print(f"{transport}: {result['transfer_ms']:.2f} ms, {result['transfer_gb_s']:.0f} GB/s; clean {result['clean']}")
    for fault in result["faults"]:
        print(f"{fault['fault']}: {'found' if fault['found'] else 'MISSED'} {fault}")
    share = f"{100 * result['compare_over_transfer']:.1f} % of it, fingerprints {result['fingerprints_ms']:.2f} ms"
    print(f"prepared in {result['prepare_ms']:.2f} ms, transfer beside it {result['transfer_beside_it_ms']:.2f} ms")
    print(f"compared in {result['compare_ms']:.2f} ms, {share}; bar {100 * BAR:.0f} %")


if __name__ == "__main__":
    main()
