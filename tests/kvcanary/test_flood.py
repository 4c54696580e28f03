"""A flood through the real checks: what very many findings of one step cost the host, beyond looking for them."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import field as field_of

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

import kvcanary.checks.content
import kvcanary.manager.rules
from kvcanary import CanaryConfig, CanaryManager, PoolView, ReadPlan, WritePlan
from kvcanary.checks.rows import Reader

MILLION = 1_000_000
PAGE_SIZE, LAYERS = 16, 2


@dataclass
class Flooded:
    """One pool and rows of equal lengths, written by one prefill that the canary has checked."""

    entries: int
    rows: int = 100
    content: str = "rolling"
    step: int = 1
    k: list[Tensor] = field_of(init=False)

    def __post_init__(self) -> None:
        self.length = self.entries // self.rows // PAGE_SIZE * PAGE_SIZE
        self.n = self.length * self.rows
        self.k = [torch.zeros(self.n + PAGE_SIZE, 1, 4) for _ in range(LAYERS)]
        self.canary = CanaryManager(
            CanaryConfig(mode="log", content=self.content, seed=7), [PoolView("target", self.k, None, PAGE_SIZE)]
        )
        self.canary.arm()
        self.slots = torch.arange(PAGE_SIZE, PAGE_SIZE + self.n)
        self.names = tuple(f"request-{row}" for row in range(self.rows))
        self.tokens = torch.arange(self.n) % 997
        self.canary.begin_step(self.step)
        pages = self.length // PAGE_SIZE
        for row, name in enumerate(self.names):
            self.canary.admit(name, self.tokens[row * self.length : (row + 1) * self.length].tolist())
            self.canary.on_alloc(name, range(1 + row * pages, 1 + (row + 1) * pages))
        positions = torch.arange(self.length).repeat(self.rows)
        self._forward("prefill", self.slots, 0, WritePlan(self.slots, self.tokens, positions))
        self.canary.collect(self.canary.end_step())
        for name in self.names:
            self.canary.commit(name, self.length)

    def read(self, slots: Tensor) -> None:
        """A forward of the next step reads these rows and writes nothing."""
        self.step += 1
        self.canary.begin_step(self.step)
        nothing = self.slots[:0]
        self._forward("extend", slots, self.length, WritePlan(nothing, nothing, nothing))

    def _forward(self, kind: str, slots: Tensor, prefix: int, write: WritePlan) -> None:
        bounds = torch.arange(self.rows + 1) * self.length
        prefixes = torch.full((self.rows,), prefix)
        read = ReadPlan(bounds, slots, self.names, 1, prefixes, self.length - prefixes)
        substep = self.canary.forward(kind, 0, "target")
        substep.open(read, write)
        for layer in range(LAYERS):
            substep.store(layer, self.k[layer][write.slots])
        substep.close()

    @property
    def fired(self) -> dict[str, int]:
        return self.canary.certificate()["fired"]


def damage_records(flooded: Flooded) -> Tensor:
    """R3: a stray write over all records."""
    flooded.canary.session.state.records[PAGE_SIZE:, 1] ^= 1 << 40
    return flooded.slots


def damage_bytes(flooded: Flooded) -> Tensor:
    """R9: every byte that was written is another one now."""
    for k in flooded.k:
        k += 1
    return flooded.slots


def read_garbage(flooded: Flooded) -> Tensor:
    """R1: no index is in the pool."""
    return flooded.slots + len(flooded.k[0])


def read_other_rows(flooded: Flooded) -> Tensor:
    """R8 for all entries, and R5 for the first of each row."""
    return flooded.slots.roll(flooded.length)


def read_shifted(flooded: Flooded) -> Tensor:
    """R4: every entry one too early in its row."""
    return flooded.slots.view(flooded.rows, -1).roll(1, 1).flatten()


FLOODS = [
    pytest.param(damage_records, "R3", "rolling", id="R3"),
    pytest.param(damage_bytes, "R9", "full", id="R9"),
    pytest.param(read_garbage, "R1", "rolling", id="R1"),
    pytest.param(read_other_rows, "R8", "rolling", id="R8"),
    pytest.param(read_shifted, "R4", "rolling", id="R4"),
]
COUNTS = [pytest.param(200_000, id="200k"), pytest.param(MILLION, id="million", marks=pytest.mark.slow)]


class Detection:
    """Seconds of this thread in what compares records and bytes: work of the device, which here is the CPU."""

    LOOKERS = (
        (Reader, "_codes"),
        (Reader, "_records_are_intact"),
        (kvcanary.checks.content, "_differences"),
        (kvcanary.manager.rules, "slots_are_right"),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        for owner, name in self.LOOKERS:
            monkeypatch.setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable) -> Callable:
        def timed(*arguments: object, **settings: object) -> object:
            start = time.thread_time()
            result = call(*arguments, **settings)
            self.seconds += time.thread_time() - start
            return result

        return timed


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode(), capture_logs():
        yield


def spent(flooded: Flooded, slots: Tensor, detection: Detection) -> tuple[float, float]:
    """Seconds of this thread from open to the end of the check: in looking for damage, and in all else."""
    detection.seconds, start = 0.0, time.thread_time()
    flooded.read(slots)
    flooded.canary.collect(flooded.canary.end_step())
    return detection.seconds, time.thread_time() - start - detection.seconds


@pytest.mark.parametrize("entries", COUNTS)
@pytest.mark.parametrize(("damage", "code", "content"), FLOODS)
def test_a_flood_costs_little_beyond_looking_for_it(damage, code, content, entries, monkeypatch):
    """Host time of a step in which every entry fires, over that of a clean one. The bar is 50 ms a million."""
    flooded, detection = Flooded(entries, content=content), Detection(monkeypatch)
    spent(flooded, flooded.slots, detection)
    clean = [spent(flooded, flooded.slots, detection) for _ in range(3)]
    assert flooded.fired == {}
    looking, host = spent(flooded, damage(flooded), detection)
    fired = flooded.fired[code]
    more = host - min(other for _, other in clean)
    print(
        f"{code} at {fired} entries: looking {1000 * looking:.0f} ms, in a clean step {1000 * min(clean)[0]:.0f}; "
        f"what fired costs the host {1000 * more:.1f} ms"
    )
    assert fired >= flooded.n - flooded.rows
    assert more < 0.25


@pytest.mark.parametrize(("damage", "code", "content"), FLOODS)
def test_a_flood_leaves_nothing_behind(damage, code, content):
    """Of what a flood needs on the way, a few words an entry, only the flight recorder's ring keeps some."""
    flooded = Flooded(200_000, content=content)
    flooded.read(flooded.slots)
    flooded.canary.collect(flooded.canary.end_step())  # the rows' truth chains are there
    flooded.read(damage(flooded))
    recorded = flooded.canary.recorder.num_bytes
    tracemalloc.start()
    flooded.canary.collect(flooded.canary.end_step())
    gc.collect()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held -= flooded.canary.recorder.num_bytes - recorded
    print(f"{code}: {held} bytes held, {peak / flooded.n:.0f} bytes an entry at the peak")
    assert held < 500_000
    assert peak < 100 * flooded.n
