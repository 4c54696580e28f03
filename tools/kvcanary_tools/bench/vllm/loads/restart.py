"""A restart between store and load, in a real vLLM: ``python -m kvcanary_tools.bench.vllm.loads --out FILE``.

One process serves prompts, and vLLM's ExampleConnector puts their K and V into files. Another one, with the same names
(`KVCANARY_NAMES`), serves the same prompts from these files: as they are, and with one file after the other damaged.
vLLM V2, eager, on the device that there is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.vllm.cpu import ENVIRONMENT, INTERPRETED, interpret, machine
from kvcanary_tools.bench.vllm.model import SHAPES, Prompts, make_prompts, write_model

COUNT, TOKENS, BLOCK = 4, 8, 32
#: All of one length, so that the files of one fit another.
KIND = Prompts(prefixes=2, prefix_tokens=40, shortest=90, longest=91, vocabulary=512)
SEED = "20261127"


def one_bit(files: list[list[Path]]) -> None:
    """In the second layer of the first prompt."""
    _change(files[0][1], lambda kept, tokens: kept.view(_torch().int16).view(-1)[333].bitwise_xor_(1 << 5))


def zeros_at_the_end(files: list[list[Path]]) -> None:
    """The last block of the first prompt was never written, in no layer."""
    for path in files[0]:
        _change(path, lambda kept, tokens: kept.narrow(tokens, kept.shape[tokens] - BLOCK, BLOCK).zero_())


def blocks_exchanged(files: list[list[Path]]) -> None:
    """The second and the third block of the first prompt."""
    for path in files[0]:
        _change(path, _exchange)


def other_prompt(files: list[list[Path]]) -> None:
    """The first prompt is given the second one's files."""
    for own, other in zip(files[0], files[1], strict=True):
        shutil.copyfile(other, own)


def layers_exchanged(files: list[list[Path]]) -> None:
    """The first two layers of the first prompt."""
    first, second = (path.read_bytes() for path in files[0][:2])
    files[0][0].write_bytes(second)
    files[0][1].write_bytes(first)


HARMS: tuple[Callable[[list[list[Path]]], None], ...] = (
    one_bit, zeros_at_the_end, blocks_exchanged, other_prompt, layers_exchanged,
)  # fmt: skip


def _torch() -> Any:
    import torch

    return torch


def _exchange(kept: Any, tokens: int) -> None:
    second, third = (kept.narrow(tokens, number * BLOCK, BLOCK) for number in (1, 2))
    held = second.clone()
    second.copy_(third)
    third.copy_(held)


def _change(path: Path, change: Callable[[Any, int], Any]) -> None:
    """tokens: the dimension of a file's tensor that counts them, which releases differ in"""
    from safetensors.torch import load_file, save_file

    kept = load_file(path)["kv_cache"]
    length = (KIND.prefix_tokens + KIND.shortest - 1) // BLOCK * BLOCK
    change(kept, list(kept.shape).index(length))
    save_file({"kv_cache": kept}, path)


def by_files(store: Path) -> dict[str, Any]:
    """vLLM's ExampleConnector."""
    options = {"shared_storage_path": str(store)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}


def worker_of(llm: Any) -> Any:
    """Its only worker, in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def started(folder: Path, transfer: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """A small vLLM with this connector and these options, and how it is asked."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder / "model"), skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_num_seqs=8,
        dtype=options.pop("dtype", "bfloat16"), seed=0, block_size=BLOCK, num_gpu_blocks_override=64,
        enable_prefix_caching=True, gpu_memory_utilization=0.3, kv_transfer_config=transfer, **options,
    )  # fmt: skip
    return llm, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


def asked(llm: Any, params: Any) -> Iterator[list[int]]:
    """The tokens of each prompt, one by one: a step loads for one request, and each is stored before the next."""
    for prompt in make_prompts(COUNT, seed=5, kind=KIND):
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        yield list(output.outputs[0].token_ids)


def in_a_process(module: str, folder: Path, phase: str, *options: str, **settings: str) -> dict[str, Any]:
    """What a phase of a module of this folder writes, in a process of its own; all of them find each other's names.

    settings: of the environment
    """
    out = folder / f"{phase}.json"
    names = {"KVCANARY_NAMES": f"file:{folder / 'names.sqlite'}", "KVCANARY_SEED": SEED}
    device = {} if _torch().cuda.is_available() else INTERPRETED
    environment = {**ENVIRONMENT, **device, "VLLM_USE_V2_MODEL_RUNNER": "1", **os.environ, **names, **settings}
    command = [sys.executable, "-m", f"kvcanary_tools.bench.vllm.loads.{module}", "--out", str(out), "--phase", phase]
    subprocess.run([*command, "--folder", str(folder), *options], env=environment, check=True, timeout=550)
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def serve(folder: Path, phase: str) -> dict[str, Any]:
    """One process."""
    if not _torch().cuda.is_available():
        interpret()
    store = folder / "store"
    llm, params = started(folder, by_files(store))
    worker = worker_of(llm)

    def run() -> list[list[int]]:
        return list(asked(llm, params))

    tokens = run()
    told: dict[str, Any] = {"tokens": tokens, "report": kept(worker.kvcanary.report())}
    if phase == "store":
        worker.kvcanary.detach()  # names that are on their way arrive
        return told
    right = store.with_name("right")
    shutil.copytree(store, right)
    order = asked_first(store)
    for harm in HARMS:
        worker.kvcanary.detach()
        told[harm.__name__] = _harmed(llm, worker, run, harm, store, right, order)
    return told | {"machine": machine() | {"device": device_name()}}


def _harmed(
    llm: Any, worker: Any, run: Any, harm: Callable[..., None], store: Path, right: Path, order: list[str]
) -> dict[str, Any]:
    from kvcanary import CanaryConfig
    from kvcanary.adapters.vllm.worker import attach

    harm(files_as_stored(store, right, order))
    llm.reset_prefix_cache()
    attach(worker, CanaryConfig.from_env(mode="log"))
    tokens = run()
    return {"tokens": tokens, **kept(worker.kvcanary.report())}


def asked_first(store: Path) -> list[str]:
    """Folders of prompts, in the order in which these were stored."""
    return [own.name for own in sorted(store.iterdir(), key=lambda own: own.stat().st_mtime_ns)]


def files_as_stored(store: Path, right: Path, order: list[str]) -> list[list[Path]]:
    """By prompt its files, by layer, as they were once stored; `right`: a copy of that."""
    shutil.rmtree(store)
    shutil.copytree(right, store)
    return [sorted(folder.glob("*.safetensors"), key=_layer) for folder in (store / name for name in order)]


def _layer(path: Path) -> int:
    return next(int(part) for part in path.name.split(".") if part.isdigit())


def kept(report: dict[str, Any]) -> dict[str, Any]:
    names = ("connector", "loads_checked", "fired", "unchecked")
    found = [
        {name: entry[name] for name in ("code", "reader", "position", "layers", "found")}
        | {"evidence": [re.sub(r"file \S*/", "file ", line) for line in entry["evidence"]]}
        for entry in report["findings"][:2]
    ]
    return {**{name: report[name] for name in names}, "found": found}


def device_name() -> str:
    """That all this ran on."""
    torch = _torch()
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="where to write the record")
@click.option("--phase", type=click.Choice(["store", "load"]), hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
def main(out: Path, phase: str | None, folder: Path | None) -> None:
    """Two processes, one after the other."""
    if phase is not None and folder is not None:
        out.write_text(json.dumps(serve(folder, phase)))
        return
    with tempfile.TemporaryDirectory() as made:
        own = Path(made)
        write_model(own / "model", SHAPES["tiny"])
        told = {name: in_a_process("restart", own, name) for name in ("store", "load")}
    clean = told["load"]["tokens"] == told["store"]["tokens"]
    record = {**told["load"], "stored": told["store"]["report"], "equal_tokens": clean}
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{record['report']['loads_checked']} entries compared, equal tokens: {clean}")
    for harm in HARMS:
        found = record[harm.__name__]["found"]
        print(f"{harm.__name__}: {[(entry['code'], entry['found'].get('verdict')) for entry in found]}")


if __name__ == "__main__":
    main()
