"""The engine: submit prompts, step, and tokens come out. A drafting step: prepare, draft, verify, commit, extend."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary import CanaryConfig, PoolView
from kvcanary.invariants import (
    check_chunk,
    check_chunk_feed,
    check_commit,
    check_estimate,
    check_known_tokens,
    check_lengths,
    check_page_sizes,
    check_pool_slots,
    check_reserve,
    check_window,
)
from spec_engine.config import ConfigError, EngineConfig
from spec_engine.core import Batch, ForwardBatch, chain_forward, concat, indptr
from spec_engine.drafting.drafter import Drafter
from spec_engine.drafting.tree import Tree
from spec_engine.hooks import Forwards
from spec_engine.memory.allocator import PageAllocator
from spec_engine.memory.pool import KVPool
from spec_engine.memory.request_table import RequestTable
from spec_engine.memory.sizing import draft_alloc_len, pages_for, reserve_len, row_width
from spec_engine.models.embedded import EMBEDDED_MODEL
from spec_engine.models.loader import load_draft, load_target
from spec_engine.models.tokenizer import TextStream, Tokenizer
from spec_engine.request import Output, Request, TokenEvent
from spec_engine.sampling import SamplingParams, sample
from spec_engine.scheduler import Chunk, Scheduler
from spec_engine.verify import Accepted, accept

if TYPE_CHECKING:
    from kvcanary import CanaryManager

KV_CORRUPTION = "kv_corruption"  # finish reason of a request that a finding touches
HOST_LAG = 0  # verifies the host is behind the device: the synchronous schedule waits for each


@dataclass
class Metrics:
    """Counters since this object was made; seconds are wall time of whole steps, canary included."""

    num_steps: int = 0
    verify_forwards: int = 0  # target forwards past the prefill, counted once a request
    tokens_emitted: int = 0  # by those forwards
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens emitted a target verify forward, bonus included, prefill excluded."""
        return self.tokens_emitted / self.verify_forwards if self.verify_forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_emitted / self.decode_seconds if self.decode_seconds else 0.0


class Engine:
    """A continuous-batching engine over paged KV pools, with tree drafting and, if asked for, a canary."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = _device(config.device)
        folder = EMBEDDED_MODEL if config.model == "embedded" else Path(config.model)
        dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        self.model = load_target(folder, dtype, self.device)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.metrics = Metrics()
        self._texts: dict[str, TextStream] = {}
        self._num_requests = 0
        self._step_number = 0
        self._make_pools(_draft_folder(config, folder), dtype)

    def _make_pools(self, draft_folder: Path | None, dtype: torch.dtype) -> None:
        config, model = self.config, self.model.config
        drafting = draft_folder is not None
        alloc_len, max_accept = 1, 1
        if drafting:
            alloc_len = draft_alloc_len(config.page_size, config.topk, config.num_steps, config.num_draft_tokens)
            max_accept = config.num_steps + 1
        reserve = reserve_len(alloc_len, max_accept, HOST_LAG)
        context_length = min(config.context_length or model.max_position_embeddings, model.max_position_embeddings)
        num_pages = config.max_total_tokens // config.page_size
        self.allocator = PageAllocator(num_pages, config.canary.quarantine if config.canary.enabled else 0)
        self.scheduler = Scheduler(
            num_pages=num_pages,
            page_size=config.page_size,
            reserve=reserve,
            max_running=config.max_running_requests,
            context_length=context_length,
            chunk_tokens=config.prefill_chunk_tokens,
        )
        width = row_width(context_length, reserve, config.page_size)
        self.request_table = RequestTable(config.max_running_requests, width, config.page_size, self.device)
        self.pools = {"target": self._pool("target", self.model.config, 0, dtype)}
        head = None
        if draft_folder is not None:
            head = load_draft(draft_folder, self.model, dtype, self.device)
            self.pools["draft"] = self._pool("draft", head.config, 1, dtype)
        views = [pool.view() for pool in self.pools.values()]
        self.canary = _attach(config.canary, views) if config.canary.enabled else None
        backend = config.attention_backend
        self._target = Forwards(self.pools["target"], model.num_heads, self.canary, backend)
        self.drafter = None
        if head is not None:
            self.drafter = Drafter(
                head,
                Forwards(self.pools["draft"], head.config.num_heads, self.canary, backend),
                self.request_table,
                topk=config.topk,
                num_steps=config.num_steps,
                num_draft_tokens=config.num_draft_tokens,
            )
        self._max_accept = max_accept
        check_reserve(self.scheduler.reserve, HOST_LAG, max_accept, alloc_len)
        self._check_sizes()
        if self.canary is not None:
            self.canary.arm()

    def _check_sizes(self) -> None:
        """Allocator, scheduler, request table and pools count the same pages."""
        sizes = {"scheduler": self.scheduler.page_size, "request table": self.request_table.page_size}
        check_page_sizes(sizes | {f"pool {name!r}": pool.page_size for name, pool in self.pools.items()})
        for name, pool in self.pools.items():
            check_pool_slots(name, pool.kv.shape[1], self.allocator.num_pages, pool.page_size)

    def _pool(self, name: str, model, token_offset: int, dtype: torch.dtype) -> KVPool:
        return KVPool(
            name,
            num_layers=model.num_layers,
            num_pages=self.allocator.num_pages,
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
        return self.scheduler.has_work

    def submit(self, prompt: str | Sequence[int], params: SamplingParams) -> str:
        """Queue one prompt (text or token ids); returns its request id."""
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab_size = self.model.config.vocab_size
        stray = [token for token in prompt_ids if not 0 <= token < vocab_size]
        if stray:
            raise ConfigError(f"prompt token {stray[0]} is out of the vocabulary of {vocab_size} tokens")
        request = Request(f"req-{self._num_requests}", prompt_ids, params)
        self.scheduler.submit(request)
        self._num_requests += 1
        self._texts[request.request_id] = self.tokenizer.stream()
        return request.request_id

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
        first = len(self.scheduler.waiting)
        for prompt in prompts:
            self.submit(prompt, params)
        return list(self.scheduler.waiting)[first:]

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
            self._admit(request)
        chunks = self.scheduler.next_chunks()
        if chunks:
            events = self._prefill(chunks)
            self.metrics.prefill_seconds += time.perf_counter() - started
        else:
            events = self._decode()
            self.metrics.decode_seconds += time.perf_counter() - started
        self.allocator.check_accounting(owned=sum(len(request.pages) for request in self.running))
        if not self.has_work:
            self._idle()
        return events

    # -- steps

    def _admit(self, request: Request) -> None:
        request.row = self.request_table.acquire()
        if self.canary is not None:
            self.canary.admit(request.request_id, request.prompt_ids)

    def _prefill(self, chunks: list[Chunk]) -> list[TokenEvent]:
        for chunk in chunks:
            request = chunk.request
            check_chunk(request.request_id, chunk.start, chunk.end, request.committed_len, request.prompt_len)
            self._grow(chunk.request, chunk.end, 0)
        batch = Batch.of([chunk.request for chunk in chunks], self.device)
        lens = [chunk.end - chunk.start for chunk in chunks]
        tokens = [token for chunk in chunks for token in chunk.request.prompt_ids[chunk.start : chunk.end]]
        forward = chain_forward("prefill", 0, batch, self.request_table, torch.tensor(tokens, device=self.device), lens)
        output = self._forward(forward)
        last = torch.tensor(lens, device=self.device).cumsum(0) - 1
        params = tuple(chunk.request.params for chunk in chunks)
        ends = torch.tensor([[chunk.end] for chunk in chunks], device=self.device)
        first_tokens = sample(self.model.logits(output.hidden[last])[:, None], params, ends).flatten().tolist()
        if self.drafter is not None:
            following = [self._following(chunk, token) for chunk, token in zip(chunks, first_tokens, strict=True)]
            for chunk, part in zip(chunks, following, strict=True):
                check_chunk_feed(chunk.request.request_id, chunk.start, part, chunk.request.prompt_ids)
            fed = torch.tensor([token for part in following for token in part], device=self.device)
            self.drafter.extend("prefill", batch, fed, self.drafter.features(output), lens)
        self.metrics.prefill_tokens += len(tokens)
        events = self._end_corrupted()
        for chunk, token in zip(chunks, first_tokens, strict=True):
            if chunk.request.finish_reason is None:
                events += self._commit(chunk.request, chunk.end, [token] if chunk.is_last else [])
        return events

    def _following(self, chunk: Chunk, sampled: int) -> list[int]:
        """Token p+1 for every position p of a chunk; past the prompt's end that is the token just sampled."""
        known = chunk.request.prompt_ids[chunk.start + 1 : chunk.end + 1]
        return [*known, sampled] if chunk.is_last else known

    def _decode(self) -> list[TokenEvent]:
        for request in self.running:
            self._grow(request, request.committed_len, self.scheduler.reserve)
        batch = Batch.of(self.running, self.device)
        return self._decode_one(batch) if self.drafter is None else self._draft_step(batch, self.drafter)

    def _decode_one(self, batch: Batch) -> list[TokenEvent]:
        """Without drafting: one token a request."""
        tokens = torch.tensor([request.last_token for request in batch.requests], device=self.device)
        forward = chain_forward("decode", 0, batch, self.request_table, tokens, [1] * len(batch))
        chosen = self._choose(batch, self._forward(forward).hidden, batch.lens_tensor[:, None])
        events = self._end_corrupted()
        return events + self._commit_all(batch, [Accepted([0], tokens) for tokens in chosen.tolist()])

    def _draft_step(self, batch: Batch, drafter: Drafter) -> list[TokenEvent]:
        # slots of row positions [0, S): committed   [S, S + reserve): branches (draft pool), tree window (target pool)
        tree = drafter.draft(batch)
        forward = self._verify_forward(batch, tree)
        output = self._forward(forward)
        chosen = self._choose(batch, output.hidden, forward.positions.view(len(batch), -1))
        events = self._end_corrupted()
        accepted = accept(tree, chosen, batch.ids)
        self._compact(forward, batch, accepted)
        events += self._commit_all(batch, accepted)
        self._extend(batch, drafter, output, accepted)
        return events

    def _verify_forward(self, batch: Batch, tree: Tree) -> ForwardBatch:
        """All N nodes of every tree in one target forward; node n is written at row position S + n."""
        num_nodes = tree.tokens.shape[1]
        for request, length in zip(batch.requests, batch.lens, strict=True):
            check_window(request.request_id, length, num_nodes, len(request.pages) * self.config.page_size)
        table = self.request_table.table
        kv_lens = tuple(length + num_nodes for length in batch.lens)
        rows = batch.rows.tolist()
        first = torch.arange(len(batch), device=self.device)[:, None] * num_nodes
        return ForwardBatch(
            kind="verify",
            index=0,
            requests=batch.ids,
            rows_per_request=1,
            prefix_lens=batch.lens_tensor,
            kv_indptr=indptr(kv_lens, self.device),
            kv_indices=concat([table[row, :end] for row, end in zip(rows, kv_lens, strict=True)]),
            kv_lens=kv_lens,
            new_lens=(num_nodes,) * len(batch),
            slots=concat([table[row, end - num_nodes : end] for row, end in zip(rows, kv_lens, strict=True)]),
            tokens=tree.tokens.flatten(),
            positions=(batch.lens_tensor[:, None] + tree.depths).flatten(),
            parents=torch.where(tree.parents < 0, -1, tree.parents + first).flatten(),
            tree_mask=tree.mask,
        )

    def _forward(self, forward: ForwardBatch):
        taps = () if self.drafter is None else self.drafter.tap_layers
        with self._target.open(forward) as attention:
            return self.model(forward.tokens, forward.positions, attention, taps)

    def _choose(self, batch: Batch, hidden: Tensor, positions: Tensor) -> Tensor:
        """The target's choice after every node: hidden [bs * nodes, H], positions [bs, nodes] -> [bs, nodes]."""
        logits = self.model.logits(hidden).view(len(batch), -1, self.model.config.vocab_size)
        return sample(logits, tuple(request.params for request in batch.requests), positions + 1)

    def _compact(self, forward: ForwardBatch, batch: Batch, accepted: Sequence[Accepted]) -> None:
        """Bring accepted nodes to the front of their window, K/V and records."""
        windows = forward.slots.view(len(accepted), -1)
        moves = [
            (b, node, place)
            for b, path in enumerate(accepted)
            if batch.requests[b].finish_reason is None
            for place, node in enumerate(path.nodes)
            if node != place
        ]
        if not moves:
            return
        rows, nodes, places = torch.tensor(moves, device=self.device).unbind(1)
        source, destination = windows[rows, nodes], windows[rows, places]
        self.pools["target"].move(source, destination)
        if self.canary is not None:
            self.canary.on_move("target", source, destination)

    def _extend(self, batch: Batch, drafter: Drafter, output, accepted: Sequence[Accepted]) -> None:
        """Give the draft pool the accepted pairs of every request that goes on."""
        num_nodes = len(output.hidden) // len(batch)
        going = [b for b, request in enumerate(batch.requests) if request.finish_reason is None]
        if not going:
            return
        rows = [b * num_nodes + node for b in going for node in accepted[b].nodes]
        tokens = [token for b in going for token in accepted[b].tokens]
        lens = [len(accepted[b].tokens) for b in going]
        before = batch.select(going)  # with the lengths of before this step's commit
        features = drafter.features(output, torch.tensor(rows, device=self.device))
        drafter.extend("extend", before, torch.tensor(tokens, device=self.device), features, lens)

    # -- bookkeeping

    def _grow(self, request: Request, committed_len: int, reserve: int) -> None:
        """Own the pages that the next forward may touch."""
        page_size = self.config.page_size
        missing = pages_for(committed_len, reserve, page_size) - len(request.pages)
        if missing > 0:
            self._allocate(request, missing)
        taken, name = len(request.pages), request.request_id
        check_estimate(name, taken, committed_len, reserve, page_size, self.scheduler.most_pages(request))
        check_lengths(name, committed_len, taken * page_size, self.request_table.width)

    def _allocate(self, request: Request, missing: int) -> None:
        pages = self.allocator.allocate(missing)
        self.request_table.append_pages(request.row, len(request.pages) * self.config.page_size, pages)
        request.pages += pages
        if self.canary is not None:
            self.canary.on_alloc(request.request_id, pages)

    def _end_corrupted(self) -> list[TokenEvent]:
        """Let the canary judge the step before a token leaves; in mode abort, end the requests that it names."""
        doomed = frozenset() if self.canary is None else self.canary.check()
        events = []
        for request in [request for request in self.running if request.request_id in doomed]:
            request.finish_reason = KV_CORRUPTION
            self._finish(request)
            text = self._texts[request.request_id].push([], final=True)
            events.append(TokenEvent(request.request_id, (), text, request.finish_reason))
        return events

    def _commit_all(self, batch: Batch, accepted: Sequence[Accepted]) -> list[TokenEvent]:
        events = []
        for request, path in zip(batch.requests, accepted, strict=True):
            if request.finish_reason is not None:
                continue
            committed_len = request.committed_len + len(path.nodes)
            check_commit(request.request_id, request.committed_len, committed_len, self._max_accept)
            events += self._commit(request, committed_len, path.tokens)
            self.metrics.verify_forwards += 1
        self.metrics.tokens_emitted += sum(len(event.token_ids) for event in events)
        return events

    def _commit(self, request: Request, committed_len: int, tokens: list[int]) -> list[TokenEvent]:
        """[0, committed_len) is final, ``tokens`` follow; finishes the request where they end it."""
        appended = request.accept(tokens, self.tokenizer.eos_ids)
        # a stop inside the accepted chain caps what is owned
        num_outputs, finished = len(request.output_ids), request.finish_reason is not None
        request.committed_len = min(committed_len, request.prompt_len + num_outputs)
        check_known_tokens(request.request_id, request.committed_len, request.prompt_len, num_outputs, finished)
        if self.canary is not None:
            self.canary.append(request.request_id, appended)
            self.canary.commit(request.request_id, request.committed_len)
        if request.finish_reason is not None and not self._finish(request):
            del request.output_ids[num_outputs - len(appended) :]
            appended, request.finish_reason = [], KV_CORRUPTION
        if not appended and request.finish_reason is None:
            return []
        text = self._texts[request.request_id].push(appended, final=request.finish_reason is not None)
        return [TokenEvent(request.request_id, tuple(appended), text, request.finish_reason)]

    def _finish(self, request: Request) -> bool:
        """Give everything back; whether its bytes were to the end what had been written."""
        is_intact = True
        if self.canary is not None:
            is_intact = self.canary.release(request.request_id)
            self.canary.on_free(request.request_id, request.pages)
        self.allocator.free(request.pages)
        self.request_table.release(request.row)
        request.pages = []
        self.scheduler.finish(request)
        return is_intact

    def _idle(self) -> None:
        self.allocator.check_accounting(owned=0)
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
