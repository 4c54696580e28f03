"""A real LMCache behind a real vLLM: ``python -m kvcanary_tools.bench.vllm.loads.lmcache --out FILE``.

A server of LMCache keeps what one process of vLLM has computed; another one, with the same names (`KVCANARY_NAMES`),
serves the same prompts from there. It does so as LMCache is, and with LMCache's copy into vLLM's blocks made wrong in
one way after the other. Runner V2, eager, on a CPU; needs `lmcache` beside vLLM.
"""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch

from kvcanary_tools.bench.vllm.cpu import interpret, machine
from kvcanary_tools.bench.vllm.loads.restart import BLOCK, asked, in_a_process, kept, started
from kvcanary_tools.bench.vllm.model import SHAPES, write_model

SERVER = "lmcache.v1.multiprocess.server"
COPY = "lmcache.v1.multiprocess.transfer_context.worker_transfer"  # has `scatter_cpu_to_paged_kv`, which copies
STARTS_WITHIN = 60.0  # seconds
Copy = Callable[..., None]


def k_and_v_exchanged(
    copy: Copy, rows: Any, caches: Any, blocks: list[int], chunks: Any, *more: Any, **named: Any
) -> None:
    """As a copy does that takes one packed row of K and V for another (LMCache#4463)."""
    copy(caches, blocks, chunks, *more, **named)
    slots = torch.tensor(blocks)[:, None] * BLOCK + torch.arange(BLOCK)
    for layer in range(rows.num_layers):
        words = rows.gather_layer(layer, slots.flatten())
        rows.scatter_layer(layer, slots.flatten(), words.roll(words.shape[1] // 2, 1))


def last_chunk_missing(
    copy: Copy, rows: Any, caches: Any, blocks: list[int], chunks: Any, *more: Any, **named: Any
) -> None:
    """Success is reported before all is there."""
    for cache in caches.values():
        cache[blocks[len(chunks) - 1]] = 0
    copy(caches, blocks, chunks[:-1], *more, **named)


def blocks_exchanged(
    copy: Copy, rows: Any, caches: Any, blocks: list[int], chunks: Any, *more: Any, **named: Any
) -> None:
    """The second and the third one."""
    copy(caches, [blocks[0], blocks[2], blocks[1], *blocks[3:]], chunks, *more, **named)


def one_bit(copy: Copy, rows: Any, caches: Any, blocks: list[int], chunks: Any, *more: Any, **named: Any) -> None:
    """In the second layer of the first block."""
    copy(caches, blocks, chunks, *more, **named)
    list(caches.values())[1][blocks[0]].view(torch.int16).view(-1)[333].bitwise_xor_(1 << 5)


HARMS = (k_and_v_exchanged, last_chunk_missing, blocks_exchanged, one_bit)


@contextmanager
def server(
    folder: Path, module: str, options_of: Callable[[int], list[str]], is_running: Callable[[str, int], bool]
) -> Iterator[int]:
    """A server of LMCache in a process of its own; gives its port.

    options_of: that port;  is_running: from what it has written, and its port
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = int(free.getsockname()[1])
    with (folder / "server.log").open("w") as log:
        child = subprocess.Popen([sys.executable, "-m", module, *options_of(port)], stdout=log, stderr=log)
    try:
        end = time.monotonic() + STARTS_WITHIN
        while not is_running(said := (folder / "server.log").read_text(), port):
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"LMCache's server did not start: {said[-1500:]}")
            time.sleep(0.2)
        yield port
    finally:
        child.terminate()
        child.wait(30)


def _options_of(port: int) -> list[str]:
    options = ["--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--chunk-size", str(BLOCK), "--port", str(port)]
    options += ["--disable-observability", "--supported-transfer-mode", "engine_driven"]
    return [*options, "--shm-name", f"kvc{port}"]


def _is_running(said: str, port: int) -> bool:
    return "cache server is running" in said


def serve(folder: Path, phase: str, port: int) -> dict[str, Any]:
    """One process."""
    interpret()
    transfer = {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
    }  # fmt: skip
    llm, params = started(folder, transfer)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    def run() -> dict[str, Any]:
        return {"tokens": list(asked(llm, params)), "report": kept(worker.kvcanary.report())}

    told = run()
    if phase == "load":
        for harm in HARMS:
            told[harm.__name__] = _harmed(llm, worker, run, harm)
    worker.kvcanary.detach()  # names that are on their way arrive
    return told


def _empty(llm: Any) -> None:
    """vLLM's own prefix cache, once no block waits for a store any more."""
    end = time.monotonic() + STARTS_WITHIN
    while not llm.reset_prefix_cache():
        if time.monotonic() > end:
            raise RuntimeError("vLLM's prefix cache cannot be emptied: blocks are still in use")
        llm.llm_engine.step()
        time.sleep(0.05)


def _harmed(llm: Any, worker: Any, run: Callable[[], dict[str, Any]], harm: Callable[..., None]) -> dict[str, Any]:
    from importlib import import_module

    from kvcanary import CanaryConfig
    from kvcanary.adapters.vllm.worker import attach

    module = import_module(COPY)
    copy = module.scatter_cpu_to_paged_kv
    worker.kvcanary.detach()
    _empty(llm)
    attach(worker, CanaryConfig.from_env(mode="log"))
    rows = worker.kvcanary.canary.groups[0].layers[0].rows
    module.scatter_cpu_to_paged_kv = functools.partial(harm, copy, rows)
    try:
        told = run()
    finally:
        module.scatter_cpu_to_paged_kv = copy
    return {"tokens": told["tokens"], **told["report"]}


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="where to write the record")
@click.option("--phase", type=click.Choice(["store", "load"]), hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
@click.option("--port", type=int, hidden=True)
def main(out: Path, phase: str | None, folder: Path | None, port: int | None) -> None:
    """Two processes of vLLM, one after the other."""
    if phase is not None and folder is not None and port is not None:
        out.write_text(json.dumps(serve(folder, phase, port)))
        return
    with tempfile.TemporaryDirectory() as made:
        own = Path(made)
        write_model(own / "model", SHAPES["tiny"])
        with server(own, SERVER, _options_of, _is_running) as port:
            options = "--port", str(port)
            told = {
                name: in_a_process("lmcache", own, name, *options, KVCANARY_MODE="log") for name in ("store", "load")
            }
    right = told["store"]["tokens"]
    record = {"machine": machine() | {"lmcache": version("lmcache")}, "equal_tokens": told["load"]["tokens"] == right}
    for harm in HARMS:
        own_tokens = told["load"][harm.__name__].pop("tokens")
        told["load"][harm.__name__]["other_tokens"] = own_tokens != right
    record |= {name: value for name, value in told["load"].items() if name != "tokens"}
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{record['report']['loads_checked']} entries compared, equal tokens: {record['equal_tokens']}")
    for harm in HARMS:
        found = record[harm.__name__]["found"]
        print(f"{harm.__name__}: {[(entry['code'], entry['found'].get('verdict')) for entry in found]}")


if __name__ == "__main__":
    main()
