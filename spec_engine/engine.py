"""The engine at work: steps of the running requests, and the tokens that leave."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import torch
from torch.distributed import ProcessGroup

from kvcanary import KVCorruptionError, probe_pages
from kvcanary.faults import seam
from kvcanary.invariants import check_commit, check_known_tokens, check_root, check_step_estimate
from kvcanary.ranks import RanksDisagreeError
from spec_engine.acceptance.logprobs import TokenLogProb
from spec_engine.config import EngineConfig
from spec_engine.errors import ConfigError
from spec_engine.memory.cache.host_tier import LoadFailedError
from spec_engine.memory.pools.window_pool import WindowRow
from spec_engine.memory.pools.window_report import RowDivergence
from spec_engine.metrics import Metrics
from spec_engine.models.decoder import Decoder
from spec_engine.models.loader import Draft
from spec_engine.models.tokenizer import Tokenizer
from spec_engine.request import HANDED_OVER, Output, Refusal, Request, TokenEvent
from spec_engine.sampling import SamplingParams
from spec_engine.scheduling.intake import Intake, output_of
from spec_engine.scheduling.progress import Progress
from spec_engine.scheduling.scheduler import Chunk
from spec_engine.step.results import PendingResult
from spec_engine.step.runner import Part, StepResult

PROBE_STEPS = 8192  # from one probe of what attention reads to the next: some milliseconds each
KV_CORRUPTION = "kv_corruption"  # finish reason of a request that a finding touches


class Engine(Intake):
    """A continuous-batching engine over paged KV pools, with tree drafting and, if asked for, a canary."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: Decoder | None = None,
        draft: Draft | None = None,
        tokenizer: Tokenizer | None = None,
        ranks: ProcessGroup | None = None,
    ) -> None:
        """Loads what the config names, but for what is handed over ready-made, in the config's dtype on its device.

        A ``model`` comes with its ``tokenizer``, and is drafted for by a ``draft`` or the config's draft_model.

        ranks: a group (gloo, of nobody else) of the ranks that hold parts of the model; each runs such an engine and is
        given the same calls in the same order. With a canary it compares each step with the others before its tokens
        leave (X1, X2): KVCorruptionError where they differ, in mode log RanksDisagreeError where they decided
        otherwise.
        """
        super().__init__(config, model, draft, tokenizer, ranks)
        self.metrics = Metrics(adaptive=None if self.adaptive is None else self.adaptive.metrics)
        self._step_number = 0
        self._probed_at = 0
        self._pending: deque[PendingResult] = deque()  # steps that the host has not collected yet
        self.progress = Progress(self.scheduler)
        self._begins_anew = False  # somebody does, once all steps with the old row are collected
        self._corruption: KVCorruptionError | None = None  # to be raised when what left before it has been returned

    # -- what callers use

    @property
    def running(self) -> list[Request]:
        return self.scheduler.running

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending) or self._corruption is not None

    @property
    def _still_steps(self) -> int:
        return self.progress.still_steps

    def cancel(self, request_id: str) -> TokenEvent | None:
        """End a request now and free all that it holds; its last event, or None when it is not there any more."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.request_id == request_id:
                self.progress.moved()
                return self._end(request, "cancelled")
        return None

    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[Output]:
        """Complete every prompt; outputs come in the order of the prompts. One that is refused does not stop others."""
        params.check_vocabulary(self.model.config.vocab_size)
        events: dict[str, list[TokenEvent]] = {}
        requests = [self._try(prompt, params) for prompt in prompts]
        for event in self._events():
            events.setdefault(event.request_id, []).append(event)
        return [output_of(request, events) for request in requests]

    def stream(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> Iterator[TokenEvent]:
        """Complete every prompt, tokens as they come; ids count up in the order of the prompts.

        One that is refused ends at once with its only event, and does not stop others.
        """
        params.check_vocabulary(self.model.config.vocab_size)
        requests = [self._try(prompt, params) for prompt in prompts]
        refused = [request.event for request in requests if isinstance(request, Refusal)]
        return chain(refused, self._events())

    def _events(self) -> Iterator[TokenEvent]:
        while self.has_work:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """One prefill forward if prompts wait, else one decode step for everyone; returns the tokens that leave.

        KVCorruptionError when the canary stops the engine. What earlier steps, which were proved clean, have still to
        give leaves first; the error then comes with the next call.
        """
        self._raise_corruption()
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
        turn = self.scheduler.turn(self.running)
        chunks = self.scheduler.next_chunks(turn)
        if self.memory.make_room(self.scheduler.pages_needed(turn)):
            self._launch(turn, chunks, events)
        try:
            self._deliver(self.lag if self.running else 0, events)
            self.rest()
        except KVCorruptionError as error:
            self._stop(error, events)
        self.memory.drop_damaged()
        self.metrics.add_seconds(time.perf_counter() - started, is_prefill=bool(chunks))
        self.memory.check_accounting(self.running)
        self.progress.end_step(bool(events) or not self.has_work)
        if not self.has_work:
            self._idle()
        return events

    def rest(self) -> None:
        """Behind every step, and now and then where there is nothing to do: the canary looks at what waits for long.

        KVCorruptionError where that stops the engine.
        """
        if self.canary is not None:
            self.canary.rest()
            if self._step_number - self._probed_at >= PROBE_STEPS:
                self._probe()

    def _probe(self) -> None:
        """What attention reads, once more: in free pages of the pools whose slots are those that rows name."""
        self._probed_at = self._step_number
        free = self.allocator.unused(probe_pages(self.config.page_size))
        self.probe_readers({name: free for name in self.pools if self._behind(name) is None})

    def window_report(self) -> list[RowDivergence]:
        """The windows of running requests through the map, compared with the books; ConfigError without a window."""
        if self.windows is None:
            raise ConfigError("window_report needs a model with a sliding window, this one sees everything")
        return self.window_reports.compare([WindowRow(r.request_id, r.pages, r.committed_len) for r in self.running])

    # -- launching

    def _make_room(self) -> list[TokenEvent]:
        """Retract requests until the next forward's pages are there, now or after a step of waiting."""
        events: list[TokenEvent] = []
        self._deliver(self.lag, events)  # an interrupt may have left more
        while self.scheduler.pages_needed(self.running) > self.memory.num_available:
            if self._pending:
                self._deliver(0, events)  # a request may have ended, and none may be retracted in flight
            else:
                events += self._retract()
        return events

    def _retract(self) -> list[TokenEvent]:
        """Some requests give up their pages, and resume later with the tokens that they have."""
        pressure = self.scheduler.pressure()
        plan = self.scheduler.retract()
        for request in plan.retracted:
            self.memory.retract(request)
        self.progress.retracted(plan.retracted, plan.kept, pressure)
        self.metrics.num_retractions += len(plan.retracted)
        return [] if plan.aborted is None else [self._end(plan.aborted, "out_of_pages")]

    def _launch(self, turn: Sequence[Request], chunks: list[Chunk], events: list[TokenEvent]) -> None:
        """Run the next forward of these requests, of prompts if some wait; the host collects it later.

        Where the canary stops it the tokens of the steps before go to ``events``.
        """
        ready = [chunk for chunk in chunks if self._prepare(chunk)]
        try:
            if ready:
                self._send(self._prefill(ready))
            elif turn and not chunks and (going := self._catch_up(turn, events)):
                self._send(self._decode(going))
            self.scheduler.ran(turn)
        except KVCorruptionError as error:
            # a request that ends on the damage: its last tokens stay; so do all where ranks differ
            with suppress(KVCorruptionError, RanksDisagreeError):
                self._deliver(0, events)
            self._stop(error, events)

    def _send(self, result: StepResult) -> None:
        self._pending.append(self.results.send(result, () if self.ranks is None else self.ranks.take()))

    def _catch_up(self, turn: Sequence[Request], events: list[TokenEvent]) -> list[Request]:
        """Collect what a step needs of the last one, where it cannot run without; who of this turn still runs."""
        if any(not pending.result.is_collected for pending in self._pending) and not self.runner.runs_ahead(turn):
            self._deliver(0, events)
        return [request for request in turn if request.goes_on]

    def _stop(self, error: KVCorruptionError, events: list[TokenEvent]) -> None:
        """No token leaves from here on but those that did before: the error comes now, or behind them."""
        self._pending.clear()
        self._corruption = error
        if not events:
            self._raise_corruption()

    def _raise_corruption(self) -> None:
        if self._corruption is not None:
            error, self._corruption = self._corruption, None
            raise error

    def _prepare(self, chunk: Chunk) -> bool:
        """Own the pages of a chunk, and have what lies before it; False where that did not come back from the host."""
        request = chunk.request
        is_restored = request.block is not None
        if is_restored and not self.memory.expects_block(request):  # evicted: the next step begins earlier
            return False
        self.memory.grow(request, chunk.end, self.scheduler.ahead, self.scheduler.most_pages(request))
        return not is_restored or self._restore(request)

    def _restore(self, request: Request) -> bool:
        before = request.committed_len
        try:
            self.memory.restore(request)
        except LoadFailedError:
            self.memory.release(request, publish=False)
            self.scheduler.send_back(request)
            self.progress.load_failed(request)
            self.metrics.num_retractions += 1
            return False
        self.runner.begin(request.row, request.committed_len)
        self.metrics.restored_tokens += request.committed_len - before
        self.streams.main.use("prefill", request.pages, requests=(request.request_id,))
        return True

    def _prefill(self, chunks: list[Chunk]) -> StepResult:
        requests = [chunk.request for chunk in chunks]
        self.memory.bring("prefill", requests)
        if self.ranks is not None:
            self.ranks.planned(self._step_number, requests, [chunk.end for chunk in chunks])
        result = self.runner.prefill(chunks)
        for chunk in chunks:
            chunk.request.committed_len = chunk.end
            self.progress.computed(chunk.request, chunk.end)
        self.metrics.prefill_tokens += sum(chunk.end - chunk.start for chunk in chunks)
        return result

    def _decode(self, requests: Sequence[Request]) -> StepResult:
        estimate = self.scheduler.decode_estimate(requests)
        taken = self.memory.grow_all(requests, self.scheduler.reserve, self.scheduler.most_pages)
        check_step_estimate(self.config.schedule, estimate, taken, len(requests), self.config.page_size)
        self.memory.bring("decode", requests)
        if self.ranks is not None:
            self.ranks.planned(self._step_number, requests, [0] * len(requests))
        if self.adaptive is None:
            return self.runner.decode(requests)
        num_steps = self.adaptive.choose(len(requests))
        return replace(self.runner.decode(requests, num_steps), num_steps=num_steps)

    # -- results

    def _deliver(self, lag: int, events: list[TokenEvent]) -> None:
        """Let the host collect all steps but the last ``lag``: tokens leave into ``events``, requests end."""
        while len(self._pending) > (0 if self._begins_anew else lag):
            result = self.results.collect(self._pending[0])  # where somebody interrupts the wait it is collected later
            self._pending.popleft()
            if self.ranks is not None:
                self.ranks.check(self._step_number, result)
            self.runner.collected(result)
            if self.adaptive is not None and result.num_steps is not None:
                self.adaptive.observe(result.num_steps, [len(part.tokens) - 1 for part in result.parts])
            aborted = [request for request in self.running if request.request_id in result.aborted]
            for request in aborted:  # whoever else the step was of
                events += self._end_damaged(request)
            collected: list[TokenEvent] = []  # they leave together: a finding as some end takes back what others have
            for part in result.parts:
                if part.request.goes_on:
                    collected += self._collect(part, result)
            collected = self._clean(collected)
            if result.is_decode:
                self.metrics.tokens_emitted += sum(len(event.token_ids) for event in collected)
            events += collected
        self._begins_anew = False

    def _clean(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """The same events of a step, without tokens of requests that what was found as others ended touches."""
        if self.canary is None or not self.canary.aborted:
            return events
        places = {event.request_id: place for place, event in enumerate(events)}
        left = [[event] for event in events]
        while touched := [one for one in self.running if one.request_id in self.canary.aborted & places.keys()]:
            for request in touched:
                event = events[place := places[request.request_id]]
                request.finish_reason = KV_CORRUPTION
                self._finish(request)
                left[place] = self._withdraw(request, len(event.token_ids), event.text)
        return [event for own in left for event in own]

    def _collect(self, part: Part, result: StepResult) -> list[TokenEvent]:
        request = part.request
        if not result.is_decode:
            return self._emit(request, request.committed_len, part) if part.tokens else []
        before, num_accepted = request.committed_len, len(part.tokens)
        after = seam("lengths.rewound_by_another_count", part.committed_len)
        check_commit(request.request_id, before, after, num_accepted, self.sizes.max_accept)
        if part.root is not None:
            check_root(request.request_id, part.root, request.output_ids[-1])
        self.metrics.verify_forwards += 1
        return self._emit(request, part.committed_len, part)

    def _emit(self, request: Request, committed_len: int, part: Part) -> list[TokenEvent]:
        """[0, committed_len) is final, the part's tokens follow; finishes the request where they end it."""
        if request.hands_over:
            return self._hand_over(request)
        kept = self._scans[request.request_id].push(part.tokens)
        tokens = part.tokens[: kept.num_tokens]
        request.output_ids += tokens
        request.finish_reason = kept.finish_reason
        # a stop inside the accepted chain caps what is owned
        num_outputs, finished = request.output_len, request.finish_reason is not None
        request.committed_len = min(committed_len, request.prompt_len + num_outputs)
        check_known_tokens(request.request_id, request.committed_len, request.prompt_len, num_outputs, finished)
        if finished and not self._finish(request):
            return self._withdraw(request, kept.num_tokens, kept.text)
        if not tokens and not finished:
            return []
        return [self._event(request, tokens, kept.text, part.logprobs)]

    def _hand_over(self, request: Request) -> list[TokenEvent]:
        """It ends, and what it has computed stays on the host for whoever comes for it, unless that is damaged."""
        block, request.finish_reason = self.memory.hand_over(request), HANDED_OVER
        if not self._finish(request):
            if block is not None:
                self.memory.drop(block)
            return self._withdraw(request, 0, "")
        self._handed_over[request.request_id] = request, block
        return [self._event(request, [], "")]

    def _withdraw(self, request: Request, num_tokens: int, shown: str) -> list[TokenEvent]:
        """A request whose bytes are damaged: its last tokens and their text do not leave, text before does.

        What it held has come back already. It ends, or mode heal computes it again from the tokens that have left.
        """
        del request.output_ids[request.output_len - num_tokens :]
        num_shown = self._scans[request.request_id].num_shown - len(shown)
        scan = self._scan(request.params)
        text = scan.push(request.output_ids).text
        if self.canary is not None and self.canary.heals(request.request_id):
            self._scans[request.request_id] = scan
            self._begin_anew(request)
            return []
        text += scan.close()
        request.finish_reason = KV_CORRUPTION
        return [self._event(request, [], text[num_shown:])]

    def _end_damaged(self, request: Request) -> list[TokenEvent]:
        """A running request that a finding touches, of whose step no token leaves."""
        if self.canary is None or not self.canary.heals(request.request_id):
            return [self._end(request, KV_CORRUPTION)]
        request.finish_reason = KV_CORRUPTION
        self._finish(request)
        return self._withdraw(request, 0, "")

    def _begin_anew(self, request: Request) -> None:
        """It waits to be admitted again, until no step in flight has its old row."""
        request.finish_reason, request.begins_anew = None, True
        self.scheduler.put_in_front(request)
        self.runner.forget(request.request_id)
        self.metrics.num_heals += 1
        self._begins_anew = True

    def _end(self, request: Request, reason: str) -> TokenEvent:
        """End a request that is not done: what it holds comes back, what waited of its text goes out."""
        request.finish_reason = reason
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
            self.memory.drop_block(request)
        else:
            self._finish(request)
        return self._event(request, [], self._scans[request.request_id].close())

    def _event(
        self,
        request: Request,
        tokens: list[int],
        text: str,
        logprobs: tuple[TokenLogProb, ...] | None = None,
    ) -> TokenEvent:
        if request.finish_reason is not None:
            del self._scans[request.request_id]
        logprobs = None if logprobs is None else logprobs[: len(tokens)]
        return TokenEvent(request.request_id, tuple(tokens), text, request.finish_reason, logprobs)

    def _finish(self, request: Request) -> bool:
        """Give everything back; whether its bytes were to the end what had been written."""
        is_intact = self.memory.release(request, publish=request.finish_reason != KV_CORRUPTION)
        self.scheduler.finish(request)
        return is_intact

    def _idle(self) -> None:
        self.memory.check_accounting([])
        if self.canary is not None:
            self.canary.drain()
