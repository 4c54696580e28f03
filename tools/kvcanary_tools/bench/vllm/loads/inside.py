"""LMCache inside a vLLM, as both are: ``python -m kvcanary_tools.bench.vllm.loads.inside --out FILE``.

One process serves prompts, and LMCache (`LMCacheConnectorV1`) puts their K and V into a server of its own. Another one,
with the same names (`KVCANARY_NAMES`), is served from there: first in mode log, to see what comes of it, then in mode
raise. Nothing is made wrong here: releases of LMCache took vLLM's packed K and V for something else (LMCache#4463).
With `--connector ExampleConnector` vLLM's own connector does the same, from files. Needs vLLM and `lmcache`.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch

from kvcanary_tools.bench.vllm.cpu import interpret, machine
from kvcanary_tools.bench.vllm.loads.lmcache import server
from kvcanary_tools.bench.vllm.loads.restart import BLOCK, asked, device_name, in_a_process, kept, started
from kvcanary_tools.bench.vllm.model import SHAPES, write_model

CONNECTORS = ("LMCacheConnectorV1", "ExampleConnector")
PHASES = {"store": "log", "load": "log", "stop": "raise"}  # and the mode of each
SERVER = "lmcache.v1.server"  # of whole chunks


def serve(folder: Path, connector: str) -> dict[str, Any]:
    """One process: tokens by prompt, up to one that was stopped, and what its canary says."""
    if not torch.cuda.is_available():
        interpret()
    from kvcanary import KVCorruptionError

    transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    if connector == "ExampleConnector":
        transfer["kv_connector_extra_config"] = {"shared_storage_path": str(folder / "store")}
    llm, params = started(folder, transfer)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    tokens: list[list[int]] = []
    with suppress(KVCorruptionError):
        tokens.extend(asked(llm, params))
    told = {"tokens": tokens, **kept(worker.kvcanary.report())}
    worker.kvcanary.detach()  # names that are on their way arrive
    return told


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="where to write the record")
@click.option("--connector", type=click.Choice(CONNECTORS), default=CONNECTORS[0], help="of vLLM")
@click.option("--phase", type=click.Choice(list(PHASES)), hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
def main(out: Path, connector: str, phase: str | None, folder: Path | None) -> None:
    """Three processes of vLLM, one after the other."""
    if phase is not None and folder is not None:
        out.write_text(json.dumps(serve(folder, connector)))
        os._exit(0)  # threads of LMCache never end
    with tempfile.TemporaryDirectory() as made:
        own = Path(made)
        write_model(own / "model", SHAPES["tiny"])
        with server(own, SERVER, lambda port: ["localhost", str(port)], _answers) as port:
            options = "--connector", connector
            told = {name: in_a_process("inside", own, name, *options, **_settings(name, port)) for name in PHASES}
    about = machine() | {"device": device_name(), "lmcache": version("lmcache")}
    record: dict[str, Any] = {"machine": about, "connector": connector} | told
    right, other = (told[name].pop("tokens") for name in ("store", "load"))
    record["prompts"], record["other_tokens"] = len(right), sum(a != b for a, b in zip(right, other, strict=True))
    record["left_in_mode_raise"] = sum(map(len, told["stop"].pop("tokens")))
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{told['load']['loads_checked']} entries compared, {record['other_tokens']} prompts with other tokens")
    for entry in told["load"]["found"]:
        print(f"{entry['code']} {entry['found'].get('verdict')}, by {entry['found'].get('came_back_by')}")


def _answers(said: str, port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("localhost", port)) == 0


def _settings(phase: str, port: int) -> dict[str, str]:
    return {
        "KVCANARY_MODE": PHASES[phase], "LMCACHE_CHUNK_SIZE": str(BLOCK), "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5", "LMCACHE_REMOTE_URL": f"lm://localhost:{port}",
        "LMCACHE_REMOTE_SERDE": "naive", "PYTHONHASHSEED": "0",
    }  # fmt: skip


if __name__ == "__main__":
    main()
