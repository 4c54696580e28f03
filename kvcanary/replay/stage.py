"""Stage: pools of stand-in bytes and a manager over them, in the state in which a recording begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcanary.captured.buffers import StaticBuffers
from kvcanary.captured.registry import SubstepRegistry
from kvcanary.captured.substep import CapturedSubstep
from kvcanary.config import CanaryConfig
from kvcanary.dumps.manifest import SETTINGS, VIEW_SETTINGS
from kvcanary.dumps.reading import Dump
from kvcanary.dumps.writing import salt_of
from kvcanary.errors import DumpError
from kvcanary.ledger.ledger import Judged
from kvcanary.ledger.request_state import UncollectedStep
from kvcanary.manager.manager import CanaryManager
from kvcanary.pools.slot_maps import slots_of_pages
from kvcanary.pools.views import PoolView
from kvcanary.recorder.checkpoint import PAGE_ARRAYS, REQUEST_FACTS
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.record_store import no_records
from kvcanary.records.state import PoolState
from kvcanary.report.stats import Stats
from kvcanary.scrub.poison import BUDGETS
from kvcanary_kernels.record.layout import CONTENT_B, LAYERS_HIGH, LAYERS_LOW, SEAL, STEP_SITE, bitmap_columns

MOST_POOL_BYTES = 256 << 20  # of pools with rows as long as the engine's; else stand-ins have short ones
MOST_STATE_BYTES = 4 << 30
SHORT_ROW = 8  # elements of a short row's K and V
RECORD_BYTES = 200  # of a slot, beside 8 a layer
NEVER = 1 << 62


@dataclass(frozen=True, eq=False)
class StandInView(PoolView):
    """A pool of made-up bytes; budgets go by the `true_bytes` of a slot of the pool that it stands for."""

    true_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        return self.true_bytes


class Stage:
    """A manager over stand-ins. `is_exact`: rows are as long as the engine's, so that a word has its true place.

    captured, moves: forwards and moves over static buffers, as the engine numbered them
    acceptance: what captured steps accept for all requests of a batch; None: nobody launches before it has collected
    damaged: (pool, slot, layer) of bytes that are not what was stored, `fingerprint_of` it where only that is wrong
    """

    def __init__(self, dump: Dump) -> None:
        """DumpError where the recording's state is missing, too large, or contradicts itself."""
        if not dump.manifest["has_records"]:
            raise DumpError(
                f"{dump.path} has no records of its beginning, they were too many: it can be read, not replayed"
            )
        self.random = torch.Generator().manual_seed(0)
        pool_bytes = sum(pool["num_slots"] * pool["slot_bytes"] for pool in dump.manifest["pools"])
        self.is_exact = pool_bytes <= MOST_POOL_BYTES
        self.damaged: set[tuple[str, int, int]] = set()
        _check_size(dump, self.is_exact)
        maps = _maps(dump)
        views = [self._view(pool, dump.manifest["page_size"], maps) for pool in dump.manifest["pools"]]
        self.manager = CanaryManager(_config(dump), views, holds_back=dump.manifest["quarantine"] > 0)
        self.manager.reporting._stats = Stats(NEVER)
        self.manager.reporting.response.announce = lambda report: None  # who replays says what came of it
        self.manager_state = self.manager.recorder.manager_state
        if len(self.manager_state.ledger.generations) != dump.manifest["num_pages"]:
            raise DumpError(
                f"{dump.path} is damaged: its pools do not have the {dump.manifest['num_pages']} pages it says"
            )
        registry = self.manager.registry if dump.manifest["captured"] else None
        self.captured = [] if registry is None else [_captured(registry, one) for one in dump.manifest["captured"]]
        self.moves = [] if registry is None else [registry.add_move(**one) for one in dump.manifest["captured_moves"]]
        seats = dump.manifest["seats"]
        self.acceptance = (
            None
            if registry is None or seats is None
            else registry.add_accepted_tokens(*seats).add_acceptance(seats[0], registry.step)
        )
        self.manager.arm()
        self._set_the_scene(dump)
        if registry is not None:
            registry.begin_step(dump.manifest["first_step"])

    def pool(self, name: str) -> PoolState:
        return self.manager_state.state.by_name[name]

    def store(self, tell: Callable[..., None], pool: PoolState, layer: int, slots: Tensor, lies: Tensor) -> None:
        """A forward stores made-up numbers in slots [n], of which some lie in the pool, and `tell` is told them."""
        values = [self._random(len(slots), part.shape, part.dtype) for part in pool.view.parts]
        self.put(pool, layer, slots[lies], [value[lies] for value in values])
        k, *others = values
        v = others.pop(0) if pool.view.v else None
        tell(layer, k, v, *others)

    def put(self, pool: PoolState, layer: int, slots: Tensor, values: Sequence[Tensor]) -> None:
        """Write values to slots of the pool, [n] int64."""
        for part, value in zip(pool.view.parts, values, strict=True):
            _bits(part.tensors[layer])[slots] = _bits(value)
        if self.damaged:
            layers = layer, fingerprint_of(layer)
            self.damaged -= {(pool.name, slot, one) for slot in slots.tolist() for one in layers}

    def take(self, pool: PoolState, slots: Tensor) -> list[list[Tensor]]:
        """By layer and part, the values of slots."""
        return [
            [_bits(part.tensors[layer])[slots].view(part.dtype) for part in pool.view.parts]
            for layer in range(pool.view.num_layers)
        ]

    # helpers

    def _view(self, pool: dict[str, Any], page_size: int, maps: dict[str, Tensor]) -> StandInView:
        tensors = {}
        for part in pool["parts"]:
            if self.is_exact or part["name"] in ("K", "V"):
                shape = tuple(part["shape"]) if self.is_exact else (1, SHORT_ROW)
                values = (pool["num_slots"], shape, getattr(torch, part["dtype"]))
                tensors[part["name"]] = [self._random(*values) for _ in range(pool["layers"])]
        return StandInView(
            pool["name"],
            tensors.pop("K"),
            tensors.pop("V", None),
            page_size,
            **{name: pool[name] for name in VIEW_SETTINGS},
            layer_numbers=pool["layer_numbers"],
            extras=tensors,
            slot_map=maps.get(pool["group"]),
            role=pool["root_name"],
            true_bytes=pool["slot_bytes"],
        )

    def _random(self, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        low = 0 if dtype is torch.uint8 else -100
        return torch.randint(low, 101, (n, *shape), generator=self.random, dtype=torch.int16).to(dtype)

    def _set_the_scene(self, dump: Dump) -> None:
        ledger, checks = self.manager_state.ledger, self.manager.session.checks
        start, step = dump.manifest["start"], dump.manifest["first_step"]
        for name in PAGE_ARRAYS:
            getattr(ledger.pages, name)[:] = dump.arrays[f"start.{name}"]
        ledger.pages.changed_everywhere()
        self._write_records(dump)
        for line in dump.start:
            self._admit(line, step)
        for uid, name in dump.manifest["names"].items():
            ledger.book.uids.remember(int(uid), name)
        for poisoned in start["poisoners"]:
            self._set_poison(poisoned, BUDGETS.get(dump.manifest["device"], BUDGETS["cuda"]))
        self.manager_state.async_tracker.buffers.update((name, generation) for name, generation in start["buffers"])
        for page, since in start["quarantine"]:
            ledger.quarantined.add(np.array([page]), since)
        checks.scrubber.credit = {(uid, pool): credit for uid, pool, credit in start["budgets"]}
        checks.scrubber.hurried.update(start["hurried"])
        checks.cached.read_at[:] = dump.arrays["start.read_at"]
        checks.publish_pages()
        self.manager.session.step = self.manager.async_tracker.step = checks.step = step

    def _admit(self, line: dict[str, Any], step: int) -> None:
        """A request as it was."""
        ledger = self.manager_state.ledger
        request = ledger.admit(line["request_id"], line["tokens"].tolist(), step, salt_of(line["root"]))
        request.pages = line["pages"].tolist()
        request.row = slots_of_pages(line["pages"], ledger.page_size).tobytes()
        request.row_lens = list(line["row_lens"])
        for name in (*REQUEST_FACTS, "growth"):
            setattr(request, name, line[name])
        first = len(request.tokens) - sum(count for count, *_ in line["unheard"])
        uncollected = list[UncollectedStep]()
        for count, *lens in line["unheard"]:
            uncollected.append(UncollectedStep(request.tokens[first : first + count].tolist(), *lens))
            first += count
        request.uncollected = uncollected
        epoch = self.manager_state.checks.record_store.epoch
        for queue, ranges in zip(request.reads, line["reads"], strict=True):
            queue.put([(first, end, at) for first, end, at in ranges])
        request.judged = [Judged(length, at, epoch if is_new else -1) for length, at, is_new in line["judged"]]

    def _set_poison(self, poisoned: dict[str, Any], budget: int) -> None:
        group, pages = poisoned["group"], poisoned["poisoned"]
        poisoner = self.manager_state.poisoners()[group]
        poisoner.budget, poisoner.waiting = budget, dict.fromkeys(pages)
        if pages:
            poisoner.fill(pages)
        poisoner.waiting, poisoner.credit = dict.fromkeys(poisoned["waiting"]), poisoned["credit"]
        if group is not None:
            self.manager_state.undeclared[group] = poisoned["is_untold"]

    def _write_records(self, dump: Dump) -> None:
        """What was known of every slot, over the stand-in bytes that lie there."""
        record_store, table = self.manager_state.checks.record_store, dump.arrays["start.records"].view(np.uint64)
        partial = dump.arrays["start.partial"]
        for pool in self.manager_state.state.pools:
            own = table[pool.base : pool.base + pool.view.num_slots]
            slots = np.flatnonzero(own[:, STEP_SITE] >> np.uint64(32))
            records = no_records(len(slots))
            records[:, :4] = own[slots]
            records[:, CONTENT_B], records[:, SEAL] = 0, pool.seal_term
            records[:, [LAYERS_LOW, LAYERS_HIGH]] = np.array(bitmap_columns(pool.full_layers), np.uint64)
            _, rows, which = np.intersect1d(slots + pool.base, partial[:, 0], return_indices=True)
            records[rows[:, None], [LAYERS_LOW, LAYERS_HIGH]] = partial[which, 1:].view(np.uint64)
            record_store.write(slots + pool.base, records)
            where = torch.from_numpy(slots)
            if len(slots):
                pool.write_fingerprints(where, *fingerprints_of_slots(pool, where))
        record_store.judged[:] = dump.arrays["start.judged"]


def fingerprint_of(layer: int) -> int:
    """What stands for a layer's fingerprint among the layers that are damaged."""
    return -1 - layer


def _check_size(dump: Dump, is_exact: bool) -> None:
    sizes = 0
    for pool in dump.manifest["pools"]:
        elements = [math.prod(part["shape"]) if is_exact else SHORT_ROW for part in pool["parts"]]
        sizes += pool["num_slots"] * (pool["layers"] * (8 + 8 * sum(elements)) + RECORD_BYTES)
    sizes += sum(16 * one["indices"] + 400 * (one["rows"] + one["entries"]) for one in dump.manifest["captured"])
    sizes += sum(64 * move["size"] for move in dump.manifest["captured_moves"])
    if sizes > MOST_STATE_BYTES:
        raise DumpError(
            f"{dump.path} would take {sizes >> 30} GiB to replay, at most {MOST_STATE_BYTES >> 30} are used"
        )


def _captured(registry: SubstepRegistry, one: dict[str, Any]) -> CapturedSubstep:
    """A forward over buffers as large as those that it ran over."""
    sizes, nodes = (one["rows"], one["entries"], one["indices"]), one["nodes"]
    feeds = {name: one[name] for name in ("ancestors", "has_truths", "has_roots", "has_lineage")}
    buffers = StaticBuffers.allocate(*sizes, is_tree=one["has_parents"], **feeds)
    mask = None if nodes is None else torch.zeros(one["rows"] // one["width"], nodes, nodes, dtype=torch.bool)
    settings = {"width": one["width"], "max_depth": one["depth"], "tree_mask": mask, "attends": one["judges_bytes"]}
    return registry.add(one["pool"], one["kind"], one["index"], buffers, **settings)


def _config(dump: Dump) -> CanaryConfig:
    settings = dump.manifest["config"]
    own = {name: settings[name] for name in SETTINGS} | {name: dump.manifest[name] for name in ("quarantine", "seed")}
    return CanaryConfig(**own, disable=frozenset(settings["disable"]), ring=0)


def _maps(dump: Dump) -> dict[str, Tensor]:
    """By group its slot map, which events fill."""
    mapped = {pool["group"]: pool["map_slots"] for pool in dump.manifest["pools"] if pool["map_slots"] is not None}
    return {group: torch.full((slots,), -1, dtype=torch.int64) for group, slots in mapped.items()}


def _bits(values: Tensor) -> Tensor:
    """The same memory as integers: NaNs and small floats are copied as they are."""
    return values.view(_INTEGERS[values.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
