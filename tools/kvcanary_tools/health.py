"""What `kvcanary doctor` finds out of this installation: a broken part does not hide the others."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvcanary import CanaryConfig
from kvcanary.environment import settings_from, variable
from kvcanary_tools.installed_engines import ADAPTERS, verdict

REQUIRED = ("kvcanary", "torch", "click", "numpy", "safetensors", "structlog", "tokenizers")
OPTIONAL = ("triton", "transformers", "flashinfer-python", "fastapi")


@dataclass(frozen=True)
class Examined:
    """One section: its values, None for what is not installed; and what should work there and does not."""

    values: dict[str, Any] | None
    problem: str = ""


def sections() -> dict[str, Callable[[], Examined]]:
    """What there is to examine, in order; none of it raises."""
    own = (settings, versions, devices, kernels, embedded_model)
    found = {check.__name__.replace("_", " "): partial(_caught, check) for check in own}
    return found | {f"engine {host}": partial(engine, host) for host in ADAPTERS}


def _caught(check: Callable[[], dict[str, Any] | None]) -> Examined:
    try:
        return Examined(check())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return Examined({"error": said}, f"{check.__name__.replace('_', ' ')}: {said}")


def settings() -> dict[str, Any]:
    """The canary's settings in the environment, as they are read; CanaryConfigError for a wrong one."""
    CanaryConfig.from_env()
    return {variable(name): os.environ[variable(name)] for name in settings_from(os.environ)}


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


def embedded_model() -> dict[str, Any] | None:
    """Loads the model that comes with kvcanary and runs one forward of it; None where it is not installed."""
    from spec_engine import Engine, EngineConfig, SamplingParams
    from spec_engine.models.embedded import EMBEDDED_MODEL

    if not EMBEDDED_MODEL.is_dir():
        return None
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


def engine(host: str) -> Examined:
    """Whether the canary would watch the release of this host that is installed."""
    found = verdict(host)
    if found is None:
        return Examined(None)
    problem = f"{host} {found.version or 'of unknown version'} is refused: {found.refused[0]}" if found.refused else ""
    return Examined(asdict(found), problem)


def _digest(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
