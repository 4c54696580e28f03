"""What `kvcanary doctor` finds out. Every check is caught by itself: a broken part must not hide the others."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUIRED = ("kvcanary", "torch", "click", "numpy", "safetensors", "structlog", "tokenizers")
#: By host, the module that says what its adapter leans on (NEEDED) and what speaks against it (check).
ADAPTERS = {
    "transformers": "kvcanary.adapters.transformers",
    "vllm": "kvcanary.adapters.vllm.compatibility",
    "sglang": "kvcanary.adapters.sglang.compatibility",
}
REFUSED = "refused: "
OPTIONAL = ("triton", "transformers", "flashinfer-python", "fastapi")


def examine() -> dict[str, Any]:
    """Sections of plain values, None for what is not present; `broken` names what should work and does not."""
    broken: list[str] = []
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": versions,
        "devices": devices,
        "kernels": kernels,
        "embedded model": embedded_model,
        "adapters": adapters,
    }
    health: dict[str, Any] = {}
    for name, check in sections.items():
        try:
            health[name] = check()
        except Exception as error:
            health[name] = {"error": f"{type(error).__name__}: {error}"}
            broken.append(name)
    for host, found in health["adapters"].items():
        if str(found).startswith(REFUSED):
            broken.append(f"adapter of {host}")
    return {**health, "broken": broken}


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in (*REQUIRED, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    missing = [name for name in REQUIRED if found[name] is None]
    if missing:
        raise RuntimeError(f"not installed: {', '.join(missing)}")
    return found


def devices() -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kind = platform.processor() or platform.machine()
    return {"cpu": f"{kind}, {os.cpu_count()} cores, {torch.get_num_threads()} threads", "cuda": names or None}


def kernels() -> dict[str, Any]:
    """One torch reference and its Triton kernel against plain integers, bit for bit."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # Read when kernels are defined, which is at their first import.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from kvcanary_kernels.record import chain

    has_triton = importlib.util.find_spec("triton") is not None
    results = {"device": device, "torch": None, "triton": None}
    for name, operation in {"torch": chain.chain_scan_torch, "triton": chain.chain_scan}.items():
        if name == "torch" or has_triton:
            _compare_with_integers(name, operation, device)
            results[name] = "equal to plain integers, bit for bit"
    return results


def _compare_with_integers(name: str, chain_scan: Callable[..., None], device: str) -> None:
    import torch

    from kvcanary_kernels.record import layout as record

    keys = record.make_keys(seed=1, num_layers=1, words_per_row=4, device=device)
    root = record.chain_root(keys, "target")
    tokens = [1_000_003 * i % 2**31 for i in range(17)]
    positions, indptr = torch.arange(17, device=device), torch.tensor([0, 17], device=device)
    seeds, out = torch.tensor([record.signed(root)], device=device), torch.full((17,), -1, device=device)
    chain_scan(torch.tensor(tokens, device=device), positions, indptr, seeds, keys=keys, out=out)
    if [record.unsigned(value) for value in out.tolist()] != record.chain_host(tokens, 0, root, keys):
        raise RuntimeError(f"the {name} kernel of chain values differs from plain integers")


def embedded_model() -> dict[str, Any]:
    """Loads the model that ships with kvcanary and runs one forward of it."""
    from spec_engine import Engine, EngineConfig, SamplingParams
    from spec_engine.models.embedded import EMBEDDED_MODEL

    shards = sorted(Path(EMBEDDED_MODEL).rglob("*.safetensors"))
    started = time.perf_counter()
    engine = Engine(EngineConfig(max_total_tokens=1024))
    loaded = time.perf_counter()
    [output] = engine.generate(["def add(a, b):\n"], SamplingParams(max_new_tokens=16))
    if not output.token_ids:
        raise RuntimeError("the model answers no token")
    return {
        "folder": str(EMBEDDED_MODEL),
        "shards": {str(shard.relative_to(EMBEDDED_MODEL)): _digest(shard) for shard in shards},
        "parameters": engine.model.num_parameters,
        "load_seconds": round(loaded - started, 2),
        "completion": output.text,
    }


def adapters() -> dict[str, Any]:
    """By host, what speaks against attaching to the release that is installed, or which checks nothing would feed.

    None where there is none.
    """
    return {host: _adapter(host, module) for host, module in ADAPTERS.items()}


def _adapter(host: str, name: str) -> str | None:
    if importlib.util.find_spec(host) is None:
        return None
    from kvcanary import CanaryConfig
    from kvcanary.report.certificate import inactive_classes

    module = importlib.import_module(name)
    faults = module.check()
    if faults:
        return f"{REFUSED}{'; '.join(faults)}"
    inactive = ", ".join(inactive_classes(CanaryConfig(), module.FED))
    closed = getattr(module, "closed_paths", dict)()
    left_out = "".join(f"; {path} is not watched: {gone}" for path, gone in closed.items())
    known = "names and signatures are there" if not closed else "names and signatures are needed"
    return f"{len(module.NEEDED)} {known}; inactive: {inactive}{left_out}"


def _digest(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
