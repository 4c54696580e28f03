"""Damaged loads that vLLM computes again: ``python -m kvcanary_tools.bench.vllm.loads.healing --out FILE``.

One process stores prompts in files. Another one, in mode heal and with the same names (`KVCANARY_NAMES`), loads them
with the files of one prompt after the other damaged in five ways: tokens must be those that were stored, each time. In
mode log the same harms say what they do; and the third damaged load of one server must end it. vLLM V2, eager, on the
device that there is.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.vllm.cpu import interpret, machine
from kvcanary_tools.bench.vllm.loads.restart import (
    COUNT,
    HARMS,
    KIND,
    asked,
    asked_first,
    by_files,
    device_name,
    files_as_stored,
    in_a_process,
    started,
    worker_of,
)
from kvcanary_tools.bench.vllm.model import SHAPES, make_prompts, write_model

Harm = Callable[[list[list[Path]]], None]
Ask = Callable[[Any, Any], Iterator[list[int]]]
WRONG_ONE_BY_ONE = 3  # loads of one server, of which it heals two


def of_prompt(harm: Harm, number: int, files: list[list[Path]]) -> None:
    """A harm of the first prompt and the second, to this one and the next."""
    harm([*files[number:], *files[:number]])


def loaded(llm: Any, params: Any) -> Iterator[list[int]]:
    """As `asked`, of prompts of which every block is loaded: nothing of another one lies in vLLM's prefix cache."""
    llm.reset_prefix_cache()
    for tokens in asked(llm, params):
        yield tokens
        llm.reset_prefix_cache()


def together(llm: Any, params: Any) -> Iterator[list[int]]:
    """The same prompts in one batch: rows whose loads were right go on beside the one that is computed again."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(COUNT, seed=5, kind=KIND)]
    for output in llm.generate(prompts, params, use_tqdm=False):
        yield list(output.outputs[0].token_ids)


def serve(folder: Path, phase: str) -> dict[str, Any]:
    """One process."""
    import torch

    if not torch.cuda.is_available():
        interpret()
    from kvcanary import CanaryConfig, KVCorruptionError
    from kvcanary.adapters.vllm.worker import attach

    store = folder / "store"
    transfer = by_files(store) | {"kv_load_failure_policy": "recompute"}
    llm, params = started(folder, transfer, async_scheduling=False, dtype="float32")  # rounding decides no token
    worker = worker_of(llm)
    told: dict[str, Any] = {"tokens": list(asked(llm, params))}
    if phase == "store":
        worker.kvcanary.detach()  # names that are on their way arrive
        return told
    right = store.with_name("right")
    shutil.copytree(store, right)
    order = asked_first(store)

    def run(mode: str, harms: Sequence[Harm], ask: Ask = loaded) -> dict[str, Any]:
        worker.kvcanary.detach()
        attach(worker, CanaryConfig.from_env(mode=mode))
        own: dict[str, Any] = {"wrong_tokens": 0, "stopped_by": None, "seconds": []}
        for harm in harms:
            harm(files_as_stored(store, right, order))
            started_at = time.perf_counter()
            try:
                for gave, due in zip(ask(llm, params), told["tokens"], strict=True):
                    own["wrong_tokens"] += sum(one != other for one, other in zip(gave, due, strict=True))
            except KVCorruptionError as error:
                own["stopped_by"] = error.findings[0].action
                break
            own["seconds"].append(round(time.perf_counter() - started_at, 3))
        report = worker.kvcanary.report()
        own |= {name: report[name] for name in ("fired", "healed", "loads_checked")}
        own["found"] = [
            [entry["code"], entry["found"].get("verdict"), entry["healed"]] for entry in report["findings"][:1]
        ]
        return own

    def of_all(mode: str, harm: Harm) -> list[dict[str, Any]]:
        return [run(mode, [partial(of_prompt, harm, number)]) for number in range(COUNT)]

    told["clean"] = run("heal", [lambda files: None])
    told["healed"] = {harm.__name__: of_all("heal", harm) for harm in HARMS}
    told["together"] = [run("heal", [harm], together) for harm in HARMS[1:]]  # behind what prompts share
    told["logged"] = {harm.__name__: of_all("log", harm) for harm in HARMS}
    told["one_after_the_other"] = run("heal", [partial(of_prompt, HARMS[0], n) for n in range(WRONG_ONE_BY_ONE)])
    told["async_scheduling"] = bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    return told | {"machine": machine() | {"device": device_name()}}


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="where to write the record")
@click.option("--phase", type=click.Choice(["store", "heal"]), hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
def main(out: Path, phase: str | None, folder: Path | None) -> None:
    """Two processes, one after the other."""
    if phase is not None and folder is not None:
        out.write_text(json.dumps(serve(folder, phase)))
        return
    with tempfile.TemporaryDirectory() as made:
        own = Path(made)
        write_model(own / "model", SHAPES["tiny"])
        stored = in_a_process("healing", own, "store", KVCANARY_MODE="raise")
        record = in_a_process("healing", own, "heal", KVCANARY_MODE="heal")
    record["equal_tokens"] = record.pop("tokens") == stored["tokens"]
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for harm, runs in record["healed"].items():
        wrong, logged = (sum(own["wrong_tokens"] for own in ran) for ran in (runs, record["logged"][harm]))
        healed = f"{sum(own['healed'] for own in runs)} healed of {len(runs)}"
        print(f"{harm}: {healed}, {wrong} wrong tokens ({logged} in mode log)")
    beside = record["together"]
    healed, wrong = (sum(own[name] for own in beside) for name in ("healed", "wrong_tokens"))
    print(f"in one batch: {healed} healed of {len(beside)}, {wrong} wrong tokens")
    print(f"one after the other: {record['one_after_the_other']['stopped_by']}")


if __name__ == "__main__":
    main()
