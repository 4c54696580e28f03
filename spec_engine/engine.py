"""The engine: submit prompts, step, and tokens come out. A drafting step: prepare, draft, verify, commit, extend."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcanary import CanaryConfig, PoolView
from kvcanary.faults import arm_from_environment, seam
from kvcanary.invariants import (
    check_commit,
    check_known_tokens,
    check_page_sizes,
    check_pool_slots,
    check_reserve,
)
from spec_engine.config import ConfigError, EngineConfig
from spec_engine.drafting.drafter import Drafter
from spec_engine.hooks import Forwards
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.host_tier import HostTier, LoadFailedError
from spec_engine.memory.kv_memory import KVMemory
from spec_engine.memory.pool import KVPool
from spec_engine.memory.request_table import RequestTable
from spec_engine.memory.sizing import draft_alloc_len, reserve_len, row_width
from spec_engine.memory.window_pool import WindowRow
from spec_engine.memory.window_report import RowDivergence, WindowReports
from spec_engine.models.config import ModelConfig
from spec_engine.models.embedded import EMBEDDED_MODEL
from spec_engine.models.loader import Draft, load_draft, load_target
from spec_engine.models.tokenizer import TextStream, Tokenizer
from spec_engine.recurrence import num_kv_layers, recurrent_pool, settings_for
from spec_engine.relay import Relay
from spec_engine.request import Output, Request, TokenEvent
from spec_engine.runner import Part, Runner, StepResult
from spec_engine.sampling import SamplingParams
from spec_engine.scheduler import Chunk, Scheduler
from spec_engine.sliding import check_draft_window, window_pool
from spec_engine.streams import Event, Streams

if TYPE_CHECKING:
    from kvcanary import CanaryManager

KV_CORRUPTION = "kv_corruption"  # finish reason of a request that a finding touches
HOST_LAG = {"sync": 0, "overlap": 1}  # verifies that the host is behind the device, by schedule


@dataclass
class Metrics:
    """Counters since this object was made; seconds are wall time of whole steps, canary included."""

    num_steps: int = 0
    verify_forwards: int = 0  # target forwards past the prefill, counted once a request
    tokens_emitted: int = 0  # by those forwards
    prefill_tokens: int = 0
    num_retractions: int = 0  # times that a running request gave up its pages and resumed later
    restored_tokens: int = 0  # that came back from the host instead of being prefilled again
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens emitted a target verify forward, bonus included, prefill excluded."""
        return self.tokens_emitted / self.verify_forwards if self.verify_forwards else 0.0

    def add_seconds(self, seconds: float, is_prefill: bool) -> None:
        if is_prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_emitted / self.decode_seconds if self.decode_seconds else 0.0


class Engine:
    """A continuous-batching engine over paged KV pools, with tree drafting and, if asked for, a canary."""

    def __init__(self, config: EngineConfig) -> None:
        arm_from_environment()
        self.device = _device(config.device)
        folder = EMBEDDED_MODEL if config.model == "embedded" else Path(config.model)
        dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        self.model = load_target(folder, dtype, self.device)
        self.config = config = settings_for(self.model, config)
        self.tokenizer = Tokenizer.from_folder(folder)
        draft_folder = _draft_folder(config, folder)
        self.head = None if draft_folder is None else load_draft(draft_folder, self.model, dtype, self.device)
        self.metrics = Metrics()
        self._texts: dict[str, TextStream] = {}
        self._num_requests = 0
        self._step_number = 0
        self._lag = HOST_LAG[config.schedule]
        self._pending: deque[tuple[StepResult, Event | None]] = deque()  # steps of which the host has not heard yet
        self._build(dtype)

    def _build(self, dtype: torch.dtype) -> None:
        config, head = self.config, self.head
        alloc_len, max_accept = 1, 1
        if head is not None:
            alloc_len = draft_alloc_len(config.page_size, config.topk, config.num_steps, config.num_draft_tokens)
            max_accept = config.num_steps + 1
        reserve = reserve_len(alloc_len, max_accept, self._lag)
        longest = self.model.config.max_position_embeddings
        context_length = min(config.context_length or longest, longest)
        num_pages = config.max_total_tokens // config.page_size
        pages = PageAllocator(num_pages, config.canary.quarantine if config.canary.enabled else 0)
        self.windows = window_pool(pages, config, self.model.config.sliding_window, reserve, self.device)
        self.allocator = pages if self.windows is None else self.windows
        width = row_width(context_length, reserve, config.page_size)
        if head is not None:
            nodes = config.num_draft_tokens
            width = seam("bounds.row_width", width, context_length=context_length, num_draft_tokens=nodes)
        self.request_table = RequestTable(config.max_running_requests, width, config.page_size, self.device)
        self._window_reports = None if self.windows is None else WindowReports(self.windows)
        self.pools = {"target": self._pool("target", self.model.config, 0, dtype)}
        states = recurrent_pool(self.model, config, dtype, self.device)
        if head is not None:
            check_draft_window(head.config.sliding_window)
            self.pools["draft"] = self._pool("draft", head.config, 1, dtype)
        views = [self._view(pool) for pool in self.pools.values()]
        self.canary = _attach(config.canary, views) if config.canary.enabled else None
        self.streams = Streams(self.device, None if self.canary is None else self.canary.tickets)
        self.memory = KVMemory(
            self.allocator,
            self.request_table,
            self.canary,
            is_drafting=head is not None,
            caches_prefixes=config.prefix_cache,
            tier=self._host_tier() if config.host_pages else None,
        )
        self.scheduler = Scheduler(
            self.memory,
            reserve=reserve,
            max_running=config.max_running_requests,
            context_length=context_length,
            chunk_tokens=config.prefill_chunk_tokens,
            least_ratio=config.new_token_ratio,
        )
        self.relay = Relay(config.max_running_requests + 1, self.device)
        self.drafter = None if head is None else self._make_drafter(head)
        target = Forwards(
            self.pools["target"], self.model.config.num_heads, self.canary, config.attention_backend, self.windows
        )
        self.runner = Runner(self.model, target, self.drafter, self.request_table, self.relay, self.canary, states)
        self._max_accept = max_accept
        check_reserve(self.scheduler.reserve, self._lag, max_accept, alloc_len)
        self._check_sizes()
        if self.canary is not None:
            self.canary.arm()

    def _make_drafter(self, head: Draft) -> Drafter:
        return Drafter(
            head,
            Forwards(self.pools["draft"], head.config.num_heads, self.canary, self.config.attention_backend),
            self.request_table,
            topk=self.config.topk,
            num_steps=self.config.num_steps,
            num_draft_tokens=self.config.num_draft_tokens,
        )

    def _host_tier(self) -> HostTier:
        maps = {} if self.windows is None else {"target": self.windows.slot_map}
        return HostTier(list(self.pools.values()), self.config.host_pages, self.streams, self.canary, maps)

    def _num_pages(self, pool: str) -> int:
        """Pages of a pool: the target's are those of its window, where it has one."""
        is_window = self.windows is not None and pool == "target"
        return self.windows.num_window_pages if is_window else self.allocator.num_pages

    def _view(self, pool: KVPool) -> PoolView:
        is_window = self.windows is not None and pool.name == "target"
        return self.windows.view(pool) if is_window else pool.view()

    def _check_sizes(self) -> None:
        """Allocator, scheduler, request table and pools count the same pages."""
        sizes = {"scheduler": self.scheduler.page_size, "request table": self.request_table.page_size}
        check_page_sizes(sizes | {f"pool {name!r}": pool.page_size for name, pool in self.pools.items()})
        for name, pool in self.pools.items():
            check_pool_slots(name, pool.kv.shape[1], self._num_pages(name), pool.page_size)

    def _pool(self, name: str, model: ModelConfig, token_offset: int, dtype: torch.dtype) -> KVPool:
        return KVPool(
            name,
            num_layers=num_kv_layers(self.model) if name == "target" else model.num_layers,
            num_pages=self._num_pages(name),
            page_size=self.config.page_size,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            token_offset=token_offset,
            dtype=dtype,
            device=self.device,
        )

    # -- what callers use

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending)

    def submit(self, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0, salt: str = "") -> str:
        """Queue one prompt (text or token ids); returns its request id. ConfigError when it could never run.

        Requests of higher ``priority`` are admitted first and retracted last. Cached prefixes are shared among
        requests of one ``salt`` only.
        """
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab_size = self.model.config.vocab_size
        stray = [token for token in prompt_ids if not 0 <= token < vocab_size]
        if stray:
            raise ConfigError(f"prompt token {stray[0]} is out of the vocabulary of {vocab_size} tokens")
        request = Request(f"req-{self._num_requests}", prompt_ids, params, priority, salt)
        self.scheduler.submit(request)
        self._num_requests += 1
        self._texts[request.request_id] = self.tokenizer.stream()
        return request.request_id

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End a request now and free all that it holds; its last event, or None when it is not there any more."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.request_id == request_id:
                return self._end(request, "cancelled")
        return None

    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[Output]:
        """Complete every prompt; outputs come in the order of the prompts."""
        outputs: dict[str, list[TokenEvent]] = {}
        requests = self._submit_all(prompts, params)
        for event in self._events():
            outputs.setdefault(event.request_id, []).append(event)
        return [_output(request, outputs.get(request.request_id, [])) for request in requests]

    def stream(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> Iterator[TokenEvent]:
        """Complete every prompt, tokens as they come."""
        self._submit_all(prompts, params)
        return self._events()

    def _submit_all(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[Request]:
        names = {self.submit(prompt, params) for prompt in prompts}
        return [request for request in self.scheduler.waiting if request.request_id in names]

    def _events(self) -> Iterator[TokenEvent]:
        while self.has_work:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """One prefill forward if prompts wait, else one decode step for everyone; returns the tokens that leave."""
        self._step_number += 1
        self.metrics.num_steps += 1
        self.allocator.begin_step(self._step_number)
        if self.canary is not None:
            self.canary.begin_step(self._step_number)
        started = time.perf_counter()
        for request in self.scheduler.admit():
            self.memory.admit(request, self.running)
            self.runner.begin(request.row, request.committed_len)
        self.memory.slide(self.running)
        events = self._make_room()
        chunks = self.scheduler.next_chunks(self.running)
        if self.memory.make_room(self.scheduler.pages_needed(self.running)):
            self._launch(chunks)
        events += self._deliver(self._lag if self.running else 0)
        self.metrics.add_seconds(time.perf_counter() - started, is_prefill=bool(chunks))
        self.memory.check_accounting(self.running)
        if not self.has_work:
            self._idle()
        return events

    def window_report(self) -> list[RowDivergence]:
        """The windows of running requests through the map, compared with the books; ConfigError without a window."""
        if self.windows is None:
            raise ConfigError("window_report needs a model with a sliding window, this one sees everything")
        return self._window_reports.compare([WindowRow(r.request_id, r.pages, r.committed_len) for r in self.running])

    # -- launching

    def _make_room(self) -> list[TokenEvent]:
        """Retract requests until the next forward's pages are there, now or after a step of waiting."""
        events: list[TokenEvent] = []
        while self.scheduler.pages_needed(self.running) > self.memory.num_available:
            if self._pending:
                events += self._deliver(0)  # a request may have ended, and none may be retracted in flight
            else:
                events += self._retract()
        return events

    def _retract(self) -> list[TokenEvent]:
        """Some requests give up their pages, and resume later with the tokens that they have."""
        plan = self.scheduler.retract()
        for request in plan.retracted:
            self.memory.retract(request)
        self.metrics.num_retractions += len(plan.retracted)
        return [] if plan.aborted is None else [self._end(plan.aborted, "out_of_pages")]

    def _launch(self, chunks: list[Chunk]) -> None:
        """Run the next forward, of prompts if some wait; the host hears of it when its turn comes."""
        ready = [chunk for chunk in chunks if self._prepare(chunk)]
        if ready:
            self._pending.append((self._prefill(ready), self.streams.launched()))
        elif self.running and not chunks:
            self._pending.append((self._decode(), self.streams.launched()))

    def _prepare(self, chunk: Chunk) -> bool:
        """Own the pages of a chunk, and have what lies before it; False where that did not come back from the host."""
        request = chunk.request
        is_restored = self.memory.expects_block(request)
        if chunk.start != request.chunk_start:  # the block was evicted: the next step begins earlier
            return False
        self.memory.grow(request, chunk.end, 0, self.scheduler.most_pages(request))
        return not is_restored or self._restore(request)

    def _restore(self, request: Request) -> bool:
        before = request.committed_len
        try:
            self.memory.restore(request)
        except LoadFailedError:
            self.memory.release(request, publish=False)
            self.scheduler.send_back(request)
            self.metrics.num_retractions += 1
            return False
        self.runner.begin(request.row, request.committed_len)
        self.metrics.restored_tokens += request.committed_len - before
        self.streams.main.use("prefill", request.pages)
        return True

    def _prefill(self, chunks: list[Chunk]) -> StepResult:
        result = self.runner.prefill(chunks)
        for chunk in chunks:
            chunk.request.committed_len = chunk.end
        self.metrics.prefill_tokens += sum(chunk.end - chunk.start for chunk in chunks)
        return result

    def _decode(self) -> StepResult:
        for request in self.running:
            most = self.scheduler.most_pages(request)
            self.memory.grow(request, request.committed_len, self.scheduler.reserve, most)
        return self.runner.decode(self.running)

    # -- results

    def _deliver(self, lag: int) -> list[TokenEvent]:
        """Let the host hear of all steps but the last ``lag``: tokens leave, requests end."""
        events = []
        while len(self._pending) > lag:
            result, event = self._pending.popleft()
            self.streams.heard(event)
            for part in result.parts:
                if part.epoch == part.request.epoch and part.request.finish_reason is None:
                    events += self._hear(part, result)
        return events

    def _hear(self, part: Part, result: StepResult) -> list[TokenEvent]:
        request = part.request
        if request.request_id in result.doomed:
            return [self._end(request, KV_CORRUPTION)]
        if not result.is_decode:
            return self._emit(request, request.committed_len, part.tokens) if part.tokens else []
        before, after, num_accepted = request.committed_len, part.committed_len, len(part.tokens)
        check_commit(request.request_id, before, after, num_accepted, self._max_accept)
        events = self._emit(request, part.committed_len, part.tokens)
        self.metrics.verify_forwards += 1
        self.metrics.tokens_emitted += sum(len(event.token_ids) for event in events)
        return events

    def _emit(self, request: Request, committed_len: int, tokens: list[int]) -> list[TokenEvent]:
        """[0, committed_len) is final, ``tokens`` follow; finishes the request where they end it."""
        appended = request.accept(tokens, self.tokenizer.eos_ids)
        # a stop inside the accepted chain caps what is owned
        num_outputs, finished = request.output_len, request.finish_reason is not None
        request.committed_len = min(committed_len, request.prompt_len + num_outputs)
        check_known_tokens(request.request_id, request.committed_len, request.prompt_len, num_outputs, finished)
        if finished and not self._finish(request):
            del request.output_ids[num_outputs - len(appended) :]
            appended, request.finish_reason = [], KV_CORRUPTION
        if not appended and request.finish_reason is None:
            return []
        return [self._event(request, appended)]

    def _end(self, request: Request, reason: str) -> TokenEvent:
        """End a request that is not done: what it holds comes back, what waited of its text goes out."""
        request.finish_reason = reason
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
            self.memory.drop_block(request)
        else:
            self._finish(request)
        return self._event(request, [])

    def _event(self, request: Request, tokens: list[int]) -> TokenEvent:
        is_final = request.finish_reason is not None
        stream = self._texts.pop(request.request_id) if is_final else self._texts[request.request_id]
        return TokenEvent(request.request_id, tuple(tokens), stream.push(tokens, final=is_final), request.finish_reason)

    def _finish(self, request: Request) -> bool:
        """Give everything back; whether its bytes were to the end what had been written."""
        is_intact = self.memory.release(request, publish=request.finish_reason != KV_CORRUPTION)
        self.scheduler.finish(request)
        return is_intact

    def _idle(self) -> None:
        self.memory.check_accounting([])
        if self.canary is not None:
            self.canary.drain()


def _attach(config: CanaryConfig, views: Sequence[PoolView]) -> CanaryManager:
    """A canary over these pools; an engine without one never loads what it is made of."""
    from kvcanary import CanaryManager

    return CanaryManager(config, views, holds_back=True)


def _device(name: str) -> torch.device:
    """The device of that name; ConfigError where there is none."""
    present = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if name in present or (name == "cuda" and len(present) > 1):
        return torch.device(name)
    raise ConfigError(f"device {name!r} is not present, there is: {', '.join(present)}", "use --device cpu")


def _draft_folder(config: EngineConfig, model_folder: Path) -> Path | None:
    """Where the draft head lies; None for no drafting. ConfigError when the head asked for is not there."""
    if config.draft == "none":
        return None
    if config.draft_model is not None:
        return Path(config.draft_model)
    kinds = ("eagle3", "eagle") if config.draft == "auto" else (config.draft,)
    for kind in kinds:
        if (model_folder / kind / "config.json").is_file():
            return model_folder / kind
    if config.draft == "auto":
        return None
    raise ConfigError(f"{model_folder} holds no {config.draft} head", "pass draft_model=FOLDER, or draft='none'")


def _output(request: Request, events: Sequence[TokenEvent]) -> Output:
    return Output(
        request_id=request.request_id,
        text="".join(event.text for event in events),
        token_ids=tuple(request.output_ids),
        finish_reason=request.finish_reason or "",
        prompt_len=request.prompt_len,
    )
