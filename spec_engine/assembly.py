"""What an engine is made of: models, pools, pages, rows, canary, scheduler and runner, built once from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from kvcanary import CanaryConfig, PoolView, StateView, probe_pages
from kvcanary.faults import arm_from_environment, disarmed
from kvcanary.invariants import check_page_sizes, check_pool_slots, check_row_width
from spec_engine.acceptance.acceptor import Acceptor
from spec_engine.attention.backends import BACKENDS
from spec_engine.config import EngineConfig
from spec_engine.drafting.adaptive import AdaptivePolicy
from spec_engine.drafting.drafter import Drafter
from spec_engine.errors import ConfigError
from spec_engine.graphs.settings import check_model, runner_class
from spec_engine.loading import dtype_of, load_models
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.cache.host_tier import HostTier
from spec_engine.memory.kv_memory import KVMemory
from spec_engine.memory.pools.fp8_pool import Fp8Pool
from spec_engine.memory.pools.pool import KVPool
from spec_engine.memory.pools.recurrence import recurrent_pool, settings_for
from spec_engine.memory.pools.recurrent_watch import StateWatch
from spec_engine.memory.pools.sliding import check_draft_window, pool_layers, window_pool
from spec_engine.memory.pools.slot_map import Mapped
from spec_engine.memory.pools.splitting import split_pool
from spec_engine.memory.pools.window_report import WindowReports
from spec_engine.memory.request_table import RequestTable
from spec_engine.memory.sizes import Sizes, plan_sizes
from spec_engine.models.config import ModelConfig
from spec_engine.models.decoder import Decoder
from spec_engine.models.loader import Draft
from spec_engine.models.tokenizer import Tokenizer
from spec_engine.scheduling.scheduler import Scheduler
from spec_engine.scheduling.turns import Turns
from spec_engine.step.hooks import Forwards
from spec_engine.step.layered import LayeredForwards, LayerGroup
from spec_engine.step.ranks import RankWatch, with_common_seed
from spec_engine.step.reader_probe import ProbedReader
from spec_engine.step.relay import Relay
from spec_engine.step.results import Results
from spec_engine.step.streams import Streams

if TYPE_CHECKING:
    from kvcanary import CanaryManager

POOLS: dict[str, type[KVPool]] = {"auto": KVPool, "fp8_e4m3": Fp8Pool}  # by kv_cache_dtype
HOST_LAG = {"sync": 0, "overlap": 1}  # verifies that the host is behind the device, by schedule


class Assembly:
    """The parts of an engine, wired; nothing here runs a step."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder | None,
        draft: Draft | None,
        tokenizer: Tokenizer | None,
        ranks: ProcessGroup | None,
    ) -> None:
        arm_from_environment()
        self.device = _device(config.device)
        self.model, self.head, self.tokenizer = load_models(config, self.device, model, draft, tokenizer, ranks)
        self.config = config = settings_for(self.model, config)
        self.group = ranks
        check_model(config, self.model, self.device)
        self.adaptive = _adaptive(config, self.head)
        self.lag = HOST_LAG[config.schedule]
        self._build()

    def _build(self) -> None:
        """Each part needs those above it."""
        config, head = self.config, self.head
        self.sizes = plan_sizes(
            config,
            max_positions=self.model.config.max_position_embeddings,
            ahead=None if head is None else head.ahead,
            lag=self.lag,
        )
        self._lay_out_pages()
        self._make_pools()
        nodes = 0 if head is None else config.most_nodes
        self.states = recurrent_pool(self.model, nodes, config, dtype_of(config), self.device)
        self._watch()
        self._schedule()
        self.ranks: RankWatch | None = None
        if self.group is not None and self.canary is not None and config.canary.share == 1:  # else some have no canary
            self.ranks = RankWatch(self.canary, self.group, self.model, self.memory, self.sizes)
        self.results = Results(
            self.streams,
            self.canary,
            lag=self.lag,
            max_bs=self.sizes.num_rows,
            max_accept=self.sizes.max_accept,
            max_nodes=nodes,
            num_sums=0 if self.ranks is None else self.ranks.num_sums,
        )
        self.relay = Relay(self.sizes.num_rows + 1, self.device)
        self.drafter = None if head is None else self._make_drafter(head)
        self.runner = runner_class(config)(
            self.model if self.ranks is None else self.ranks.watched(self.model),
            self._target_forwards(),
            self.drafter,
            self.request_table,
            self.relay,
            self._make_acceptor(),
            self.canary,
            self.states,
            self.lag,
        )
        self._check_sizes()
        self.sizes = self._weighed(self.sizes)
        with torch.inference_mode():
            self.runner.record(config.buckets)
        if self.canary is not None:
            self.probe_readers({name: list(range(1, self._num_pages(name) + 1)) for name in self.pools})
            self.canary.arm()

    def probe_readers(self, free: Mapping[str, Sequence[int]]) -> None:
        """Let attention over each of these pools read known entries in its free pages, where there are enough.

        KVCorruptionError where it reads otherwise and that stops the engine.
        """
        if self.canary is None:
            return
        size = self.config.page_size
        with disarmed(), torch.inference_mode():
            for name, own in free.items():
                pool, is_draft = self.pools[name], name not in self.layers
                if len(own) < probe_pages(size):
                    continue
                heads = self.head.config.num_heads if is_draft and self.head else self.model.config.num_heads
                behind = self._behind(name)
                window = None if behind is None else behind.window
                reader = ProbedReader(pool, heads, self.config.attention_backend, window)
                pages = own[: probe_pages(size, window or 0)]
                paths = ["chunk", "decode", *self._drafted_paths(is_draft)]
                self.canary.probe_reader(name, reader, pages, heads, paths, dtype=pool.dtype)
                captured = self.runner.captured_reader(pool, heads, reader)
                if captured is not None:
                    own_path = "draft" if is_draft else "decode" if self.head is None else "verify"
                    self.canary.probe_reader(name, captured, pages, heads, [own_path], dtype=pool.dtype)

    def _drafted_paths(self, is_draft: bool) -> list[str]:
        """What else a pool's attention reads where tokens are drafted; branches that own whole pages are not asked."""
        if self.head is None or not is_draft:
            return [] if self.head is None else ["verify"]
        backend = BACKENDS[self.config.attention_backend]
        return ["draft"] if self.config.page_size == 1 or not backend.reads_pages else []

    def _lay_out_pages(self) -> None:
        """Who gives out pages, and the rows that name them: of full layers, behind them those of windows."""
        config, sizes = self.config, self.sizes
        quarantine = config.canary.quarantine if config.canary.enabled else 0
        self.split = split_pool(config, self.model, sizes, quarantine, self.device)
        pages = PageAllocator(sizes.num_pages, quarantine) if self.split is None else self.split
        self.windows = window_pool(pages, config, self.model.config.sliding_window, sizes.reserve, self.device)
        self.window_reports = None if self.windows is None else WindowReports(self.windows)
        self.allocator = pages if self.windows is None else self.windows
        self.request_table = RequestTable(sizes.num_rows, sizes.row_width, config.page_size, self.device)

    def _make_pools(self) -> None:
        """By name: of the target's layers, and of the draft head."""
        self.layers = pool_layers(self.model)
        self.pools = {name: self._pool(name, self.model.config) for name in self.layers}
        if (head := self.head) is not None:
            check_draft_window(head.config.sliding_window)
            self.pools["draft"] = self._pool("draft", head.config, head.token_offset, head.ahead)

    def _watch(self) -> None:
        """The canary over all pools, and whoever tells it of pages and copies."""
        views: list[PoolView | StateView] = [self.view(pool) for pool in self.pools.values()]
        if self.states is not None:
            views.append(self.states.view())
        canary = self.config.canary if self.group is None else with_common_seed(self.config.canary, self.group)
        self.canary = _attach(canary, views, self.device) if canary.enabled else None
        if self.states is not None and self.canary is not None:
            self.states.watch = StateWatch(self.canary.states["recurrent"], self.states.entries_per_row)
        if self.windows is not None:
            self.windows.watch(self.canary)
        self.streams = Streams(self.device, None if self.canary is None else self.canary.async_tracker)
        if self.split is not None:
            self.split.serve(self.pools["target"], self.streams, self.canary)

    def _schedule(self) -> None:
        """The memory of requests, and who decides which of them run."""
        config, sizes = self.config, self.sizes
        self.memory = KVMemory(
            self.allocator,
            self.request_table,
            self.canary,
            is_drafting=self.head is not None,
            caches_prefixes=config.prefix_cache,
            tier=self._host_tier() if config.host_pages else None,
            has_states=self.states is not None,
        )
        self.scheduler = Scheduler(
            self.memory,
            reserve=sizes.reserve,
            ahead=sizes.ahead,
            max_running=config.max_running_requests,
            context_length=sizes.context_length,
            chunk_tokens=config.prefill_chunk_tokens,
            least_ratio=config.new_token_ratio,
            turns=None if self.split is None else Turns(self.split.num_own_pages, config.device_turn),
        )

    def _make_acceptor(self) -> Acceptor:
        return Acceptor(
            self.config.acceptance,
            self.config.thresholds,
            vocab_size=self.model.config.vocab_size,
            num_rows=self.sizes.num_rows + 1,
            device=self.device,
        )

    def _target_forwards(self) -> Forwards | LayeredForwards:
        heads = self.model.config.num_heads
        groups = [LayerGroup(layers, self._forwards(name, heads)) for name, layers in self.layers.items()]
        return groups[0].forwards if len(groups) == 1 else LayeredForwards(groups)

    def _forwards(self, pool: str, heads: int) -> Forwards:
        backend, before = self.config.attention_backend, self.memory.before_open
        return Forwards(self.pools[pool], heads, self.canary, backend, self._behind(pool), before)

    def _make_drafter(self, head: Draft) -> Drafter:
        return Drafter(
            head,
            self._forwards("draft", head.config.num_heads),
            self.request_table,
            topk=self.config.topk,
            num_steps=self.config.num_steps,
            num_draft_tokens=self.config.num_draft_tokens,
            step_choices=self.config.step_choices,
            attend=self.config.attend,
            draws=self.config.acceptance == "rejection",
        )

    def _weighed(self, sizes: Sizes) -> Sizes:
        return replace(
            sizes,
            pool_bytes={name: pool.nbytes for name, pool in self.pools.items()},
            host_bytes=0 if self.split is None else self.split.host_bytes,
            table_bytes=self.request_table.table.nbytes,
            canary_bytes=0 if self.canary is None else self.canary.num_bytes,
        )

    def _host_tier(self) -> HostTier:
        maps = {name: behind.slot_map for name in self.pools if (behind := self._behind(name)) is not None}
        return HostTier(list(self.pools.values()), self.config.host_pages, self.streams, self.canary, maps)

    def _behind(self, pool: str) -> Mapped | None:
        """Behind whose map a pool of the target's layers lies; None: its slots are the full ones."""
        layers = set(self.layers.get(pool, ()))
        return self.windows if layers.intersection(self.model.config.window_layers) else self.split if layers else None

    def _num_pages(self, pool: str) -> int:
        behind = self._behind(pool)
        return self.allocator.num_pages if behind is None else behind.num_own_pages

    def view(self, pool: KVPool) -> PoolView:
        behind = self._behind(pool.name)
        view = pool.view() if behind is None else behind.view(pool)
        role = "target" if pool.name in self.layers else pool.name
        return replace(view, vocab_size=self.model.config.vocab_size, role=role)

    def _check_sizes(self) -> None:
        """Allocator, scheduler, request table and pools count the same pages, and its rows hold what was planned."""
        check_row_width(self.request_table.width, self.sizes.row_width)
        sizes = {"scheduler": self.scheduler.page_size, "request table": self.request_table.page_size}
        check_page_sizes(sizes | {f"pool {name!r}": pool.page_size for name, pool in self.pools.items()})
        for name, pool in self.pools.items():
            for part in pool.parts:
                check_pool_slots(name, part.shape[1], self._num_pages(name), pool.page_size)

    def _pool(self, name: str, model: ModelConfig, token_offset: int = 0, ahead: int = 0) -> KVPool:
        return POOLS[self.config.kv_cache_dtype](
            name,
            num_layers=len(self.layers[name]) if name in self.layers else model.num_layers,
            num_pages=self._num_pages(name),
            page_size=self.config.page_size,
            kv_heads=model.num_kv_heads,
            first_head=model.first_kv_head,
            whole_heads=model.whole_kv_heads,
            head_dim=model.head_dim,
            token_offset=token_offset,
            ahead=ahead,
            dtype=dtype_of(self.config),
            device=self.device,
        )


def _attach(config: CanaryConfig, views: Sequence[PoolView | StateView], device: torch.device) -> CanaryManager | None:
    """A canary over these pools, if it has its turn; an engine without one never loads what it is made of."""
    from kvcanary import CanaryManager, hardware_of, has_turn

    if config.share < 1 and not has_turn(config.share, hardware_of(device)):
        return None
    return CanaryManager(config, views, holds_back=True)


def _device(name: str) -> torch.device:
    """The device of that name; ConfigError where there is none."""
    present = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if name in present or (name == "cuda" and len(present) > 1):
        return torch.device(name)
    raise ConfigError(f"device {name!r} is not present, there is: {', '.join(present)}", "use --device cpu")


def _adaptive(config: EngineConfig, head: Draft | None) -> AdaptivePolicy | None:
    """What chooses T for each step. ConfigError when nothing drafts."""
    if config.adaptive is None:
        return None
    if head is None:
        raise ConfigError(
            "adaptive_steps needs a draft, the model has none", "pass draft_model=FOLDER, or fix num_steps"
        )
    return AdaptivePolicy(config.adaptive, topk=config.topk, num_steps=config.num_steps)
