"""A scheduler of a few lines over the stand-in for vLLM: what the tests of the plug-in drive."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcanary.adapters import vllm as plugin

BLOCK = 8


@dataclass
class Request:
    name: str
    tokens: list[int]
    length: int
    drafts: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    is_known: bool = False
    hashed: int = 0  # blocks that others can find
    lora: Any = None
    keyed_by: str = ""  # what a block's key has beside its tokens
    images: Sequence[tuple[int, int, str]] = ()
    has_keys_of_images: bool = True

    def key(self, end: int) -> tuple[Any, ...]:
        """Of the block that ends there."""
        images = [image for image in self.images if image[0] < end and self.has_keys_of_images]
        return (*filter(None, [self.keyed_by]), *images, *self.tokens[:end])


class Users:
    """How many have each block."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def __getitem__(self, block: int) -> int:
        return self.pool.blocks[block].ref_cnt

    def __setitem__(self, block: int, count: int) -> None:
        self.pool.blocks[block].ref_cnt = count


@dataclass
class Served:
    """A scheduler of a few lines: prefix cache, chunked prefill, preemption of the youngest, finished blocks reused."""

    settings: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 24
    layers: tuple[str, ...] = ("l0", "l1")
    groups: tuple[tuple[str, ...], ...] = ()
    window: int | None = None
    budget: int = 20
    zeroes: bool = False
    is_heard: bool = True  # the scheduler is vLLM's; False: one that nobody follows
    is_pickled: bool = False  # the worker is in another process
    forgets_images: bool = False  # and these
    forgets_salts: bool = False  # blocks are found by tokens alone
    frees_windows: bool = False  # blocks that no window reaches any more are given back
    goes_back: bool = False  # rows whose loads failed are computed again

    def __post_init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        names = self.groups or (self.layers,)
        specs = [AttentionSpec(BLOCK, 2, 8, torch.float32)] * len(names)
        if self.window:
            specs[-1] = AttentionSpec(BLOCK, 2, 8, torch.float32, self.window)
        self.config = KVCacheConfig(
            self.num_blocks, [], [KVCacheGroupSpec(list(n), s) for n, s in zip(names, specs, strict=True)]
        )
        self.wrapper = WorkerWrapperBase()
        self.wrapper.init_worker([self.settings])
        self.wrapper.init_device()
        self.wrapper.initialize_from_config([self.config])
        self.wrapper.compile_or_warm_up_model()
        self.scheduler = Scheduler(self.num_blocks, self.plan)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.users = Users(self.pool)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.preemptions = self.violations = self.copies = 0
        self.extra: dict[str, Any] = {}

    @property
    def runner(self) -> Any:
        return self.wrapper.worker.model_runner

    @property
    def caches(self) -> dict[str, Any]:
        return {n: layer.kv_cache for n, layer in self.runner.compilation_config.static_forward_context.items()}

    @property
    def free(self) -> list[int]:
        return self.pool.free

    @free.setter
    def free(self, blocks: list[int]) -> None:
        self.pool.free = blocks

    @property
    def cached(self) -> dict[tuple[int, ...], int]:
        return self.pool.cached

    def blocks_of(self, request: Request) -> list[Any]:
        return [self.pool.blocks[block] for block in request.blocks]

    def ask(
        self,
        name: str,
        tokens: list[int],
        length: int,
        drafts: int = 0,
        lora: Any = None,
        salt: str | None = None,
        images: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        from vllm.v1.request import Request as Scheduled

        keyed_by = "" if self.forgets_salts else salt or ""
        own = {"lora": lora, "keyed_by": keyed_by, "images": images, "has_keys_of_images": not self.forgets_images}
        self.waiting.append(Request(name, list(tokens), len(tokens) + length, drafts, **own))
        self.scheduler.requests[name] = Scheduled(name, salt)
        self.outputs[name] = []

    def release(self, request: Request) -> None:
        self.pool.free_blocks(iter(self.blocks_of(request)))
        request.blocks, request.computed, request.is_known, request.hashed = [], 0, False, 0

    def take(self) -> int | None:
        if not self.free:
            return None
        [block] = self.pool.get_new_blocks(1)
        self.fresh.append(block.block_id)
        return block.block_id

    def find_prefix(self, request: Request) -> None:
        """Blocks that somebody has computed, or computes in this very step."""
        for number in range((len(request.tokens) - 1) // BLOCK):
            block = self.cached.get(request.key((number + 1) * BLOCK))
            if block is None:
                return
            self.pool.touch([self.pool.blocks[block]])
            request.blocks.append(block)
            request.computed += BLOCK
            request.hashed += 1
            self.violations += 1

    def share(self, request: Request, length: int) -> None:
        full = min(length, len(request.tokens)) // BLOCK
        if full > request.hashed:
            self.pool.cache_full_blocks(request, self.blocks_of(request), request.hashed, full, BLOCK)
            request.hashed = full

    def leave_window(self, request: Request) -> None:
        """Blocks that no token from here on reads are given back, while the worker's table still names them."""
        for number in range(max(request.computed + 1 - (self.window or 0), 0) // BLOCK if self.frees_windows else 0):
            if request.blocks[number]:
                self.pool.free_blocks([self.pool.blocks[request.blocks[number]]])
                request.blocks[number] = 0

    def plan(self) -> Any:
        """What the scheduler wants of the step that is next."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec as Feature
        from vllm.multimodal.inputs import PlaceholderRange as Range
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        self.fresh: list[int] = []
        budget, counts, new, cached, spec, preempted = self.budget, {}, [], CachedRequestData(), {}, set()
        while self.waiting and len(self.running) < 4:
            self.running.append(self.waiting.pop(0))
        for request in list(self.running):
            if not request.blocks and budget > 0:
                self.find_prefix(request)
            drafts = request.drafts if request.is_known and request.computed == len(request.tokens) - 1 else 0
            count = min(len(request.tokens) + drafts - request.computed, budget)
            if count <= 0 or request not in self.running:
                continue
            added: list[int] = []
            self.leave_window(request)
            while len(request.blocks) * BLOCK < request.computed + count:
                block = self.take()
                if block is None:
                    victim = self.running[-1]
                    self.running.remove(victim)
                    if victim.is_known:
                        preempted.add(victim.name)
                    counts.pop(victim.name, None)
                    new = [data for data in new if data.req_id != victim.name]
                    for lines in (cached.req_ids,):
                        if victim.name in lines:
                            place = lines.index(victim.name)
                            for values in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
                                del values[place]
                    for never in self.blocks_of(victim)[victim.computed // BLOCK :]:
                        self.pool._forget(never)
                    self.release(victim)
                    self.waiting.insert(0, victim)
                    self.preemptions += 1
                    if victim is request:
                        break
                    continue
                request.blocks.append(block)
                added.append(block)
            if request not in self.running:
                continue
            budget -= count
            counts[request.name] = count
            self.share(request, request.computed + count)
            if drafts and count > 1:
                spec[request.name] = [(7 * n + len(request.tokens)) % 97 for n in range(count - 1)]
            groups = len(self.config.kv_cache_groups)
            if request.is_known:
                cached.req_ids.append(request.name)
                cached.num_computed_tokens.append(request.computed)
                cached.new_block_ids.append((added,) * groups if added else None)
            else:
                request.is_known = True
                data = NewRequestData(
                    request.name,
                    request.tokens,
                    [Feature(key, Range(start, end - start)) for start, end, key in request.images],
                    None,
                    None,
                    (list(request.blocks),) * groups,
                    request.computed,
                    request.lora,
                )
                data.prefill_token_ids = list(request.tokens)
                new.append(data)
        output = SchedulerOutput(new, cached, counts, sum(counts.values()), spec, self.finished, preempted)
        if self.zeroes:
            output.new_block_ids_to_zero = [block for block in self.fresh if self.users[block]]
        for name, value in self.extra.items():
            setattr(output, name, value)
        self.extra = {}
        self.finished = set()
        return output

    def step(self) -> dict[str, list[int]]:
        output = self.scheduler.schedule() if self.is_heard else self.plan()
        counts = output.num_scheduled_tokens
        self.wrapper.execute_model(pickle.loads(pickle.dumps(output)) if self.is_pickled else output)
        if not counts:
            return {}
        given = self.wrapper.sample_tokens(None).get_output()
        failed = self.runner.kv_connector.failed if self.goes_back else ()
        for request in [request for request in self.running if request.name in counts]:
            if wrong := [number for number, block in enumerate(request.blocks) if block in failed]:
                request.computed, request.hashed = wrong[0] * BLOCK, min(request.hashed, wrong[0])
                self.pool.evict_blocks(set(request.blocks[wrong[0] :]))
                continue
            tokens = given[request.name]
            request.computed = min(
                request.computed + counts[request.name], len(request.tokens) + max(len(tokens) - 1, 0)
            )
            request.tokens += tokens
            self.outputs[request.name] += tokens
            self.share(request, request.computed)
            if len(request.tokens) >= request.length:
                self.finished.add(request.name)
                self.running.remove(request)
                self.release(request)
        return given

    def run(self, steps: int = 400) -> dict[str, list[int]]:
        for _ in range(steps):
            if not (self.waiting or self.running or self.finished):
                break
            self.step()
        return self.outputs

    def place(self, request: str, position: int, group: int = 0) -> tuple[int, int]:
        """(kernel block, offset) of a position, along the worker's own table."""
        number, tables = self.runner.req_states.req_id_to_index[request], self.runner.block_tables
        size, kernel = tables.sizes[group], self.runner.kernel_block_sizes[group]
        slot = int(tables.block_tables[group].gpu[number, position // size]) * size + position % size
        return slot // kernel, slot % kernel


def load(served: Served, drafts: int = 0) -> None:
    shared = [(3 * n) % 97 for n in range(19)]
    for number in range(7):
        tail = [(5 * number + n) % 97 for n in range(4 + 7 * number)]
        served.ask(f"r{number}", shared + tail, 12 + number, drafts)


def without(**settings: Any) -> Served:
    plugin.unregister()
    return Served(**settings)


def go_on(served: Served, steps: int) -> None:
    for _ in range(steps):
        served.step()
