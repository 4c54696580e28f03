"""``python -m kvcanary_tools.bench.sglang.gpu.reader``: SGLang 0.5.17's attention is asked in graphs, on a GPU.

What is needed is as of `run`. A canary is attached again and again to one server that has captured its decodes: as it
is, and with faults that are there before replays alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvcanary_tools.bench.common import machine, save
from kvcanary_tools.bench.gpu.device import device
from kvcanary_tools.bench.sglang.gpu import older
from kvcanary_tools.bench.sglang.gpu.run import Case, attached, build, play
from kvcanary_tools.bench.sglang.misreading import OF_GRAPHS, misreading

NAME = "gpu_sglang_reader"
WHAT = "what SGLang's attention reads of known entries, in graphs that are captured as SGLang captures, and with faults"
CASE = Case(layers=4, requests=16)


def asked(scheduler: Any, name: str) -> dict[str, Any]:
    """The answer, and how long it took to attach; name: of OF_GRAPHS."""
    begun = time.perf_counter()
    with torch.no_grad(), misreading(SimpleNamespace(scheduler=scheduler), name):
        canary = attached(scheduler, CASE)
    seconds, report = time.perf_counter() - begun, canary.report()["target"]
    found = [finding.to_dict() for finding in canary.findings]
    canary.detach()
    told = (
        {name: found[0][name] for name in ("code", "site", "layer")} | {"causes": found[0]["causes"][0]}
        if found
        else None
    )
    return {"misreading": name, "reader_probes": report["reader_probes"], "finding": told, "seconds": round(seconds, 2)}


def main(arguments: Sequence[str] = ()) -> None:
    if arguments:
        sys.exit(f"nothing is taken, got {' '.join(arguments)!r}: leave it out")
    if not torch.cuda.is_available():
        sys.exit("kvcanary_tools.bench.sglang.gpu.reader asks attention on a CUDA device, and there is none here")
    older.install()
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        scheduler = build(CASE, Path(folder))
        before = play(scheduler, CASE)[1]
        answers = [asked(scheduler, name) for name in ("graphs", *OF_GRAPHS)]  # the first one compiles
        is_equal = play(scheduler, CASE)[1] == before  # SGLang's own graphs are as they were
    row = {"what": WHAT, "case": asdict(CASE), "machine": machine() | device(), "sglang": sglang.__version__}
    row |= {"backend": "triton", "equal_tokens_behind_it": is_equal, "answers": answers}
    print(*answers, is_equal, sep="\n")
    save(NAME, row)
    sys.stdout.flush()
    os._exit(0)  # the scheduler has threads that nobody ends


if __name__ == "__main__":
    main(sys.argv[1:])
