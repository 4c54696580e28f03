"""What vLLM's own recovery from a failed load does: ``python -m kvcanary_tools.bench.vllm.loads.recovery --out FILE``.

A connector reports one block of every load as failed, and vLLM is set to compute such blocks again
(`kv_load_failure_policy=recompute`). Tokens must be those of loads that do not fail. Runner V2, eager, on the device
that there is; without a canary, in modes log and raise, and with a runner that is mended, which must be silent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.vllm.cpu import ENVIRONMENT, INTERPRETED, interpret, machine
from kvcanary_tools.bench.vllm.loads import failing
from kvcanary_tools.bench.vllm.loads.restart import COUNT, KIND, started
from kvcanary_tools.bench.vllm.model import SHAPES, make_prompts, write_model

MENDED = "mended"
#: By name, the mode of the canary.
RUNS = {"off": "off", "log": "log", "raise": "raise", MENDED: "raise"}


def mend(runner: Any) -> None:
    """Let the counts on the device go back with the scheduler's: of entries, and of tokens, which has one too many."""
    states, update = runner.req_states, runner.update_requests

    def update_requests(output: Any) -> None:
        cached = output.scheduled_cached_reqs
        for name, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            number = states.req_id_to_index[name]
            if count < states.num_computed_tokens_np[number]:
                states.num_computed_tokens.stage_write_elem(number, count)
                states.num_computed_tokens.apply_write()
                states.total_len.gpu[number] = int(states.prefill_len.np[number])  # nothing was given yet
        update(output)

    runner.update_requests = update_requests


def serve(folder: Path, is_mended: bool) -> dict[str, Any]:
    """One process: prompts are stored, loaded, and loaded while loads fail."""
    import torch

    if not torch.cuda.is_available():
        interpret()
    from kvcanary import KVCorruptionError

    transfer = {
        "kv_connector": failing.NAME, "kv_connector_module_path": failing.__name__,
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "store")},
    }  # fmt: skip
    llm, params = started(folder, transfer)
    prompts, engine = make_prompts(COUNT, seed=5, kind=KIND), llm.llm_engine

    def run(phase: str) -> list[list[int]]:
        llm.reset_prefix_cache()
        given: list[list[int]] = []
        for number, prompt in enumerate(prompts):  # one by one: a step loads for one request
            engine.add_request(f"{phase}-{number}", {"prompt_token_ids": prompt}, params)
            given.append([])
            while engine.has_unfinished_requests():
                for output in engine.step():
                    given[-1] = list(output.outputs[0].token_ids)
        return given

    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    if is_mended:
        mend(worker.model_runner)
    told: dict[str, Any] = {"stored": run("stored"), "loaded": run("loaded"), "failed": [], "stopped_by": None}
    failing.FailingConnector.fails = True
    try:
        told["failed"] = run("failed")
    except KVCorruptionError as error:
        told["stopped_by"] = error.findings[0].code
    canary = getattr(worker, "kvcanary", None)
    if canary is not None:
        with suppress(KVCorruptionError):  # what is on its way when mode raise ends a run
            canary.report()
        report = canary.report()
        names = ("code", "reader", "position", "site", "expected", "found", "causes")
        told |= {name: report[name] for name in ("fired", "loads_checked")}
        told["findings"] = [{name: entry[name] for name in names} for entry in report["findings"][:3]]
    told["async_scheduling"] = bool(engine.vllm_config.scheduler_config.async_scheduling)
    return told | {"machine": machine()}


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="where to write the record")
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
@click.option("--mended", is_flag=True, hidden=True)
def main(out: Path, folder: Path | None, mended: bool) -> None:
    """A process for each run."""
    if folder is not None:
        out.write_text(json.dumps(serve(folder, mended)))
        return
    told = {name: _process(name) for name in RUNS}
    record: dict[str, Any] = {"machine": told["off"]["machine"], "equal_when_loaded": True, "wrong_tokens": {}}
    for name, own in told.items():
        record["equal_when_loaded"] &= own["stored"] == own["loaded"]
        pairs = zip(own["failed"], own["stored"], strict=False)
        wrong = sum(one != other for gave, right in pairs for one, other in zip(gave, right, strict=False))
        record["wrong_tokens"][name] = wrong
        kept = "stopped_by", "async_scheduling", "fired", "loads_checked", "findings"
        record[name] = {key: own[key] for key in kept if key in own}
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrong tokens: {record['wrong_tokens']}; found: {record['log']['fired']}")


def _process(name: str) -> dict[str, Any]:
    import torch

    device = {} if torch.cuda.is_available() else INTERPRETED
    own = {"VLLM_USE_V2_MODEL_RUNNER": "1", "KVCANARY_MODE": RUNS[name]}
    with tempfile.TemporaryDirectory() as made:
        folder, out = Path(made), Path(made) / "told.json"
        write_model(folder / "model", SHAPES["tiny"])
        command = [sys.executable, "-m", "kvcanary_tools.bench.vllm.loads.recovery", "--out", str(out)]
        environment = {**ENVIRONMENT, **device, **os.environ, **own}
        command += ["--folder", str(folder), *(["--mended"] if name == MENDED else [])]
        subprocess.run(command, env=environment, check=True, timeout=550)
        told: dict[str, Any] = json.loads(out.read_text())
    return told


if __name__ == "__main__":
    main()
