"""A whole `sglang.Engine` on a CPU, whose scheduler is a process of its own, with the canary by plug-in and metrics on.

python -m kvcanary_tools.bench.sglang.engine FOLDER RANKS; a line of JSON says what came out of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvcanary_tools.bench.sglang import host as sglang_host
from kvcanary_tools.bench.sglang.scene import PROMPTS

#: What each process of Python imports first: the engine starts its own ones anew.
FIRST = """
import asyncio, sys, types
sys.modules["uvloop"] = types.SimpleNamespace(EventLoopPolicy=asyncio.DefaultEventLoopPolicy, run=asyncio.run)
from kvcanary_tools.bench.sglang import host
host.ABSENT += ("xgrammar",)
host.install()
"""


def run() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    first = folder / "first"
    first.mkdir(exist_ok=True)
    (first / "sitecustomize.py").write_text(FIRST)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(first), os.environ["PYTHONPATH"]))
    exec(FIRST)  # this process has begun
    if not (folder / "target").exists():
        sglang_host.make_models(folder)
    import sglang

    engine = sglang.Engine(
        model_path=str(folder / "target"), context_length=128, max_total_tokens=1024, max_running_requests=4,
        page_size=4, chunked_prefill_size=32, mem_fraction_static=0.3, attention_backend="torch_native",
        enable_metrics=True, tp_size=ranks, **sglang_host.QUIET, **sglang_host.ON_CPU,
    )  # fmt: skip
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    outputs = engine.generate(input_ids=list(PROMPTS.values()), sampling_params=params)
    told = {name: own["output_ids"] for name, own in zip(PROMPTS, outputs, strict=True)}
    print(json.dumps({"outputs": told, "metrics": metrics()}))
    sys.stdout.flush()
    engine.shutdown()


def metrics() -> list[str]:
    """What its page of metrics says of the canary, gathered as SGLang's server does."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry: Any = CollectorRegistry()
    MultiProcessCollector(registry)
    return [line for line in generate_latest(registry).decode().splitlines() if line.startswith("kvcanary")]


if __name__ == "__main__":
    run()
