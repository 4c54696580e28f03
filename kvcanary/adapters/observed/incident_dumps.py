"""Incident dumps: when something fired in a watched pool, one file of it, in the folder that the settings name."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvcanary.adapters.observed.incident import WatchedCanary, blocks_of, place_of, pool_name, seen_rows, seen_slots
from kvcanary.calls.violation import Violation
from kvcanary.config import CanaryConfig
from kvcanary.dumps.manifest import shape_of_pool
from kvcanary.dumps.watched_events import story_of_block
from kvcanary.dumps.watched_writing import WatchedSource, write_watched
from kvcanary.manager.dump_trigger import MOST_DUMPS, SUFFIX, write_into
from kvcanary.report.finding import Finding

Collect = Callable[[Sequence[Finding], Mapping[str, Any]], WatchedSource]


class WithCertificate(Protocol):
    """A canary of caches without slots."""

    config: CanaryConfig

    def certificate(self) -> dict[str, Any]: ...


class IncidentDumps:
    """Writes at most MOST_DUMPS files; what goes wrong meanwhile is told, and stops nobody.

    environment: what the manifest says of the engine besides what is known here: its name and version, the rank
    """

    def __init__(self, config: CanaryConfig, collect: Collect) -> None:
        self._config, self._collect, self._num_dumps = config, collect, 0
        self.environment: dict[str, Any] = {}

    def on_finding(self, findings: Sequence[Finding]) -> str | None:
        """The path of a dump of these; None where none is wanted, or there are too many."""
        folder = self._config.dump_dir
        if folder is None or not findings or self._num_dumps >= MOST_DUMPS:
            return None
        self._num_dumps += 1
        rank = f"-rank{self.environment['rank']}" if "rank" in self.environment else ""
        rank += f"-{self.environment['role']}" if "role" in self.environment else ""  # canaries of one process
        first = findings[0]
        name = f"step{first.step}-{first.code}{rank}-{os.getpid()}-{self._num_dumps}{SUFFIX}"
        return write_into(folder, name, "finding", lambda path: self._write(path, findings))

    def _write(self, path: Path, findings: Sequence[Finding]) -> None:
        write_watched(self._collect(findings, self.environment), path)


OWNERS_ALONE = "the engine tells who has a slot now, not what happened to it before"


def block_history(canary: WatchedCanary, violation: Violation) -> tuple[str, ...]:
    """What happened to the block of a violation, for its report: grants, writes, loads and copies of the last steps."""
    own = [place for place, group in enumerate(canary.groups) if group.number == violation.pool.pool_id]
    if not own or not canary.kept or violation.slot < 0:
        return ()
    group, request = canary.groups[own[0]], violation.request_id
    number = None if request is None else canary.recent.number_of(request)
    rows = {} if request is None or number is None else {request: blocks_of(canary, number, group)}
    block = violation.slot // group.block_size
    lines = story_of_block(canary.recent.told(), group.number, block, group.block_size, rows)
    told = tuple(f"step {line.step}: block {block} {line.text}" for line in lines)
    return told or (() if group.owners is None else (OWNERS_ALONE,))


def machine(device: torch.device) -> dict[str, Any]:
    """What a dump says of where it was written: versions and the device's name, never the host's."""
    is_cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
    }


def source_of(canary: WatchedCanary, findings: Sequence[Finding], environment: Mapping[str, Any]) -> WatchedSource:
    """What a dump of these findings holds; it waits for the device."""
    with torch.inference_mode():
        return WatchedSource(
            config=canary.config,
            findings=findings,
            certificate=canary.certificate(),
            environment=machine(canary.memory.device) | dict(environment),
            step=canary.step,
            device=canary.memory.device.type,
            groups=[_shape(canary, number) for number in range(len(canary.groups))],
            steps=list(canary.recent.told()),
            slots=list(seen_slots(canary, findings)),
            rows=list(seen_rows(canary, findings)),
            keys=canary.memory.identity,
            content=_content(canary, findings) if canary.config.dump_content else None,
        )


def source_without_slots(
    canary: WithCertificate, findings: Sequence[Finding], environment: Mapping[str, Any]
) -> WatchedSource:
    """The same of caches that have no slots and no steps: the findings, the certificate and where this ran."""
    return WatchedSource(
        config=canary.config,
        findings=findings,
        certificate=canary.certificate(),
        environment=machine(torch.device("cpu")) | dict(environment),
        step=findings[0].step,
        device="cpu",
        groups=(),
        steps=(),
        slots=(),
        rows=(),
    )


def _shape(canary: WatchedCanary, number: int) -> dict[str, Any]:
    group = canary.groups[number]
    return {
        "number": group.number,
        "block_size": group.block_size,
        "window": group.window,
        "num_slots": len(group.records),
        "pools": [
            shape_of_pool(layers.view) | {"name": pool_name(canary, group, layers), "layer_names": list(layers.names)}
            for layers in group.layers
        ],
    }


def _content(canary: WatchedCanary, findings: Sequence[Finding]) -> dict[str, NDArray[Any]]:
    """By pool and slot of the findings `POOL.SLOT`, [layers, words a row] int32."""
    content: dict[str, NDArray[Any]] = {}
    for finding in findings:
        place = place_of(canary, finding)
        if place is not None and 0 <= finding.slot < len(place.group.records):
            where = torch.tensor([finding.slot], device=canary.memory.device)
            rows = [place.layers.rows.gather_layer(n, where)[0] for n in range(len(place.layers.names))]
            content[f"{finding.pool}.{finding.slot}"] = np.ascontiguousarray(torch.stack(rows).cpu().numpy())
    return content
