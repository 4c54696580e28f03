"""The device's part of a step: forwards, acceptance, moves. It takes lengths from the relay, never from the host.

A step reads: plan, draft, verify, judge, accept, compact, extend. What it found out for the host is a StepResult. Eager
forwards are announced to the canary where they are decided on, so that it misses one that runs without its hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcanary.faults import seam
from kvcanary.invariants import check_chunk, check_chunk_feed, check_window
from spec_engine.acceptance.acceptor import Acceptor, Decision, Nodes
from spec_engine.acceptance.logprobs import TokenLogProb
from spec_engine.acceptance.walk import NO_TOKEN, Acceptance
from spec_engine.core import Batch, ForwardBatch, chain_forward, concat, indptr
from spec_engine.drafting.drafter import Drafter
from spec_engine.drafting.tree import Tree
from spec_engine.memory.recurrent import RecurrentPool
from spec_engine.memory.request_table import RequestTable
from spec_engine.models.decoder import Decoder, DecoderOutput
from spec_engine.request import Request
from spec_engine.scheduling.scheduler import Chunk
from spec_engine.step.hooks import Forwards
from spec_engine.step.layered import LayeredForwards
from spec_engine.step.relay import Relay
from spec_engine.step.state_forward import StateForward, last_nodes
from spec_engine.step.transfer import to_device
from spec_engine.step.verify import Accepted, owners_of, to_host

if TYPE_CHECKING:
    from kvcanary import CanaryManager
    from kvcanary.captured import InFlight
    from spec_engine.graphs.reader_probe import CapturedReader
    from spec_engine.memory.pools.pool import KVPool
    from spec_engine.step.reader_probe import ProbedReader


@dataclass(frozen=True)
class Part:
    """One request's share of a step: [0, committed_len) is final, ``tokens`` are new, the last of them the bonus.

    A token that the device has not told yet is NO_TOKEN, until the step's results says what it is. Where it has
    not told how many they are there is one, and the length is the one that the host knew before.
    logprobs: those of ``tokens``, where the request asks for them.
    root: the token behind which a tree was drafted.
    """

    request: Request
    committed_len: int
    tokens: list[int]
    logprobs: tuple[TokenLogProb, ...] | None = None
    root: int | None = None


class Verified(NamedTuple):
    """Drafted trees, the slots of their nodes [bs, N], and what the target's forward over them gave."""

    tree: Tree
    windows: Tensor
    output: DecoderOutput


@dataclass(frozen=True)
class StepResult:
    """What the host learns of a step; ``aborted`` are requests that a finding touches (mode abort).

    accepted: where the device has the tokens, one row for each of the ``parts`` that have some; None: none has.
    num_steps: T of a decode step, where it may change.
    flight: what the canary has still to judge of it, before a token leaves; None: nothing.
    is_collected: whether the host knows its tokens; else each is NO_TOKEN in the parts, and was not told to the canary.
    drafted: trees of a step of which the host knows not even how many tokens there are; None: it knows that.
    sums: of what ranks hold alike, behind the step.
    """

    is_decode: bool
    parts: tuple[Part, ...]
    aborted: frozenset[str]
    accepted: Acceptance | None = None
    num_steps: int | None = None
    flight: InFlight | None = None
    is_collected: bool = True
    drafted: Tree | None = None
    sums: tuple[int, ...] = ()


class Runner:
    """Target, drafter and canary at work on one batch after the other."""

    def __init__(
        self,
        model: Decoder,
        forwards: Forwards | LayeredForwards,
        drafter: Drafter | None,
        table: RequestTable,
        relay: Relay,
        acceptor: Acceptor,
        canary: CanaryManager | None,
        states: RecurrentPool | None = None,
        lag: int = 0,
    ) -> None:
        """``states``: of a model with recurrent layers, by request-table row; ``lag``: steps the host may be behind."""
        self.model, self.forwards, self.drafter, self.acceptor = model, forwards, drafter, acceptor
        self.states, self.lag = states, lag
        self.table, self.relay, self.canary = table, relay, canary
        self.device = table.table.device
        self.aborted: frozenset[str] = frozenset()  # as of the last check
        self._flight: InFlight | None = None  # what the canary has still to judge of the current step

    def record(self, buckets: Sequence[int]) -> None:
        """Make what a step needs beforehand, for batches of these sizes: nothing, where each is built as it comes."""

    def captured_reader(self, pool: KVPool, num_heads: int, eager: ProbedReader) -> CapturedReader | None:
        """Who reads this pool in captured steps, for the canary to ask; None where none are."""
        return None

    def runs_ahead(self, requests: Sequence[Request]) -> bool:
        """Whether a decode step of these can be launched while the host has not collected the tokens of the last
        one.
        """
        return False

    def collected(self, result: StepResult) -> None:
        """The host knows now what this step has done."""
        if result.flight is not None:
            self.aborted = result.aborted

    def forget(self, request_id: str) -> None:
        """A request that was to end begins anew, and is no more kept out of what comes."""
        self.aborted -= {request_id}

    def begin(self, row: int, committed_len: int) -> None:
        """A request takes this row with ``committed_len`` entries that are there already."""
        self.relay.seed(row, committed_len)
        if self.drafter is not None:
            self.drafter.begin(row)
        if self.states is not None:
            self.states.reset(row)

    def prefill(self, chunks: Sequence[Chunk]) -> StepResult:
        """Forward prompt chunks; a row whose last token is not known yet samples its first one."""
        for chunk in chunks:
            request = chunk.request
            check_chunk(request.request_id, chunk.start, chunk.end, request.committed_len, request.prefill_len)
        batch = Batch.of([chunk.request for chunk in chunks], self.relay, [chunk.start for chunk in chunks])
        lens = [chunk.end - chunk.start for chunk in chunks]
        tokens = np.concatenate([chunk.numbers for chunk in chunks])
        last = to_device(np.cumsum(lens) - 1, self.device)
        if self.canary is not None:
            drafts = [] if self.drafter is None else self.drafter.forwards.announced("prefill")
            self.canary.expect([*self.forwards.announced("prefill"), *drafts], batch.ids)
        wanted = last if self.drafter is None else None  # a drafter goes on from every token's features
        output = self._forward(chain_forward("prefill", 0, batch, self.table, tokens, lens), batch, wanted=wanted)
        hidden = output.hidden[last] if wanted is None else output.hidden
        is_ahead = self.is_ahead(batch.requests)
        new, logprobs, accepted = self._first_tokens(chunks, batch, hidden, is_ahead)
        if self.drafter is not None:
            self._extend_prompts(self.drafter, batch, chunks, new, output, lens)
        aborted = self._judge()
        ends = [chunk.end for chunk in chunks]
        bonus = [own[0] if own else chunk.following for chunk, own in zip(chunks, new, strict=True)]
        self._publish(batch, ends, bonus)
        if accepted is not None and is_ahead:
            sampled = to_device([chunk.request.row for chunk in chunks if chunk.samples], self.device)
            self.relay.bonus.index_copy_(0, sampled, accepted.bonus)
        return self._finish(False, batch, ends, new, logprobs, aborted, accepted, is_ahead)

    def is_ahead(self, requests: Sequence[Request]) -> bool:
        """Whether nobody on the host needs the tokens of a prefill before it collects the step.

        A canary that judges at once does, for its truth, a drafter for what it extends by, and log-probabilities come
        with the tokens.
        """
        needs = self.drafter is not None or (self.canary is not None and not self.canary.judges_behind)
        return self.lag > 0 and not needs and all(request.params.logprobs is None for request in requests)

    def decode(self, requests: Sequence[Request], num_steps: int | None = None) -> StepResult:
        """One decode step for everyone: one token each, or a drafted tree of ``num_steps`` (None: as configured).

        But for those that a finding has ended, of whom a lagging host does not know yet: nothing was proposed for them.
        """
        requests = [request for request in requests if request.request_id not in self.aborted]
        if not requests:
            return StepResult(True, (), self.aborted)
        batch = self._batch_of(requests)
        if self.drafter is None:
            return self._decode_one(batch)
        return self._draft_step(batch, self.drafter, num_steps)

    # decode steps

    def _batch_of(self, requests: Sequence[Request]) -> Batch:
        return Batch.of(requests, self.relay)

    def _decode_one(self, batch: Batch) -> StepResult:
        decision = self._decide(batch, self._decoded(batch))
        aborted = self._judge()
        accepted = self._to_host(batch, None, decision)
        return self._commit(batch, accepted, decision, aborted)

    def _decoded(self, batch: Batch) -> Tensor:
        """The hidden states of the bonus tokens, [bs, H]."""
        if self.canary is not None:
            self.canary.expect(self.forwards.announced("decode"), batch.ids)
        forward = chain_forward("decode", 0, batch, self.table, batch.bonus, [1] * len(batch))
        return self._forward(forward, batch).hidden

    def _draft_step(self, batch: Batch, drafter: Drafter, num_steps: int | None) -> StepResult:
        # slots of row positions [0, S): committed   [S, S + reserve): branches (draft pool), tree window (target pool)
        tree, windows, output = self._verified(batch, drafter, num_steps)
        decision = self._decide(batch, output.hidden, tree, drafter.draft_probs)
        aborted = self._judge()
        accepted = self._to_host(batch, tree, decision)
        going = [b for b, request_id in enumerate(batch.ids) if request_id not in aborted]
        self.compact(windows, accepted, going)
        self.commit_states(batch, tree, accepted)
        result = self._commit(batch, accepted, decision, aborted)
        if not going:
            return result
        self._extend(batch, drafter, output, accepted, going)
        return self._judged_again(result)

    def _verified(self, batch: Batch, drafter: Drafter, num_steps: int | None) -> Verified:
        """Draft and verify."""
        if self.canary is not None:
            self.canary.expect([*drafter.announced(num_steps), *self.forwards.announced("verify")], batch.ids)
        tree = drafter.draft(batch, num_steps)
        forward = self.verify_forward(batch, tree)
        output = self._forward(forward, batch, tree)
        return Verified(tree, forward.slots.view(len(batch), -1), output)

    def verify_forward(self, batch: Batch, tree: Tree) -> ForwardBatch:
        """All N nodes of every tree in one target forward; node n is written at row position S + n."""
        num_nodes = tree.tokens.shape[1]
        for request, length in zip(batch.requests, batch.lens, strict=True):
            check_window(request.request_id, length, num_nodes, len(request.pages) * self.table.page_size)
        table = self.table.table
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

    def compact(self, windows: Tensor, accepted: Sequence[Accepted], going: Sequence[int]) -> None:
        """Bring accepted nodes of the requests ``going`` to the front of their ``windows [bs, N]``, K/V and records."""
        moves = [(b, node, place) for b in going for place, node in enumerate(accepted[b].nodes) if node != place]
        moves = seam("draft.rewind_by_count", moves)
        if not moves:
            return
        rows, nodes, places = to_device(moves, self.device).unbind(1)
        source, destination = windows[rows, nodes], windows[rows, places]
        self.forwards.move(source, destination)

    def commit_states(self, batch: Batch, tree: Tree, accepted: Sequence[Accepted]) -> None:
        """Each row goes on from the state of its last accepted node."""
        if self.states is not None:
            self.states.commit(batch.rows.tolist(), last_nodes(tree, accepted))

    def _commit(
        self, batch: Batch, accepted: Sequence[Accepted], decision: Decision, aborted: frozenset[str]
    ) -> StepResult:
        lens = [length + len(path.nodes) for length, path in zip(batch.lens, accepted, strict=True)]
        tokens = [path.tokens for path in accepted]
        self._publish(batch, lens, [new[-1] for new in tokens])
        requests = enumerate(batch.requests)
        logprobs = [decision.logprobs_of(b, request.params, len(tokens[b])) for b, request in requests]
        roots = [path.root for path in accepted]
        return self._finish(True, batch, lens, tokens, logprobs, aborted, decision.accepted, roots=roots)

    def _extend(
        self,
        batch: Batch,
        drafter: Drafter,
        output: DecoderOutput,
        accepted: Sequence[Accepted],
        going: Sequence[int],
    ) -> None:
        """Give the draft pool the accepted pairs of the requests ``going``."""
        num_nodes = len(output.hidden) // len(batch)
        rows = [b * num_nodes + node for b in going for node in accepted[b].nodes]
        tokens = [token for b in going for token in accepted[b].tokens]
        lens = [len(accepted[b].tokens) for b in going]
        before = batch if len(going) == len(batch) else batch.select(going)
        features = drafter.features(output, to_device(rows, self.device))
        features = seam("draft.approximate_features", features)
        if self.canary is not None:
            self.canary.expect(drafter.forwards.announced("extend"), before.ids)
        drafter.extend("extend", before, to_device(tokens, self.device), features, lens)

    # parts of both

    def _forward(
        self, forward: ForwardBatch, batch: Batch, tree: Tree | None = None, wanted: Tensor | None = None
    ) -> DecoderOutput:
        if self.states is not None:
            return self._forward_with_states(self.states, forward, batch, tree, wanted)
        taps = () if self.drafter is None else self.drafter.tap_layers
        with self.forwards.open(forward) as attention:
            return self.model(forward.tokens, forward.positions, attention, taps, wanted=wanted)

    def _forward_with_states(
        self, states: RecurrentPool, forward: ForwardBatch, batch: Batch, tree: Tree | None, wanted: Tensor | None
    ) -> DecoderOutput:
        """Each token of a recurrent layer goes on from its predecessor, in a verify each node from its parent."""
        taps = () if self.drafter is None else self.drafter.tap_layers
        access = StateForward(states, forward, batch, tree)
        with self.forwards.open(forward) as attention:
            output = self.model(forward.tokens, forward.positions, attention, taps, access.states, wanted=wanted)
        access.close()
        return output

    def _decide(
        self, batch: Batch, hidden: Tensor, tree: Tree | None = None, draft_probs: Tensor | None = None
    ) -> Decision:
        """What follows the nodes of each request, ``hidden [bs * nodes, H]``; the root is its bonus token."""
        logits = self.model.logits(hidden).view(len(batch), -1, self.model.config.vocab_size)
        nodes = Nodes(batch.requests, batch.rows, batch.lens_tensor + 1, tree, draft_probs)
        return self.acceptor.decide(logits, nodes)

    def _first_tokens(
        self, chunks: Sequence[Chunk], batch: Batch, hidden: Tensor, is_ahead: bool
    ) -> tuple[list[list[int]], list[tuple[TokenLogProb, ...] | None], Acceptance | None]:
        """The first token of every chunk at whose end it is not known yet, and what is asked of its probability.

        Last the device's own word for these chunks, None where there are none. ``hidden``: [bs, H], of their last
        tokens; ``is_ahead``: nobody waits for it.
        """
        new: list[list[int]] = [[] for _ in chunks]
        logprobs: list[tuple[TokenLogProb, ...] | None] = [None] * len(chunks)
        for chunk in chunks:
            if chunk.end == chunk.request.prefill_len:
                self.acceptor.begin(chunk.request)
        ending = [c for c, chunk in enumerate(chunks) if chunk.samples]
        if not ending:
            return new, logprobs, None
        rows = to_device(ending, self.device)
        requests = [chunks[c].request for c in ending]
        positions = to_device([chunks[c].end for c in ending], self.device)
        logits = self.model.logits(hidden[rows])[:, None]
        decision = self.acceptor.decide(logits, Nodes(requests, batch.rows[rows], positions))
        shown = [NO_TOKEN] * len(ending) if is_ahead else decision.accepted.bonus.tolist()
        for number, (c, token) in enumerate(zip(ending, shown, strict=True)):
            new[c], logprobs[c] = [token], decision.logprobs_of(number, requests[number].params, 1)
        return new, logprobs, decision.accepted

    def _extend_prompts(
        self,
        drafter: Drafter,
        batch: Batch,
        chunks: Sequence[Chunk],
        new: Sequence[list[int]],
        output: DecoderOutput,
        lens: Sequence[int],
    ) -> None:
        leading = [drafter.num_leading(chunk) for chunk in chunks]
        following = [
            chunk.tokens[:count] + self.following(chunk, sampled)
            for chunk, sampled, count in zip(chunks, new, leading, strict=True)
        ]
        for chunk, part, count in zip(chunks, following, leading, strict=True):
            check_chunk_feed(chunk.request.request_id, chunk.start - count, part, chunk.request.tokens)
        fed = to_device([token for part in following for token in part], self.device)
        drafter.extend("prefill", batch, fed, drafter.features(output), lens, [len(part) for part in following])

    def following(self, chunk: Chunk, sampled: list[int]) -> list[int]:
        """Token p + 1 for every position p of a chunk; past what is known that is the token just sampled."""
        return chunk.request.tokens[chunk.start + 1 : chunk.end + 1] + sampled

    def _to_host(self, batch: Batch, tree: Tree | None, decision: Decision) -> list[Accepted]:
        """Each request's accepted path; waits for the device."""
        if tree is None:
            return [Accepted([0], [token]) for token in decision.accepted.bonus.tolist()]
        return to_host(tree, decision.accepted, owners_of(batch))

    def _publish(self, batch: Batch, lens: Sequence[int], bonus: Sequence[int]) -> None:
        """New committed lengths, and the tokens that follow them."""
        self.relay.publish(batch.rows, lens, bonus)

    @property
    def _waits_for_results(self) -> bool:
        """Whether the host will have waited for all that this step has launched when it collects it."""
        return False

    def _judge(self) -> frozenset[str]:
        """Let the canary judge the step before a token of it counts.

        A host that lags collects later what a device has to say of it, and knows now what it collected last.
        """
        self._flight = None
        if self.canary is None:
            return self.aborted
        flight = self.canary.end_step(is_waited_for=self._waits_for_results)
        if self.lag and not flight.is_collected:
            self._flight = flight
        else:
            self.aborted = self.canary.collect(flight)
        return self.aborted

    def _judged_again(self, result: StepResult) -> StepResult:
        """Behind what runs when the step has been judged: whether all of it had its hooks."""
        if self.canary is None or not (aborted := self.canary.check_forwards()):
            return result
        self.aborted = aborted
        return replace(result, aborted=result.aborted | aborted)

    def _finish(
        self,
        is_decode: bool,
        batch: Batch,
        lens: Sequence[int],
        tokens: Sequence[list[int]],
        logprobs: Sequence[tuple[TokenLogProb, ...] | None],
        aborted: frozenset[str],
        accepted: Acceptance | None,
        is_ahead: bool = False,
        roots: Sequence[int | None] | None = None,
    ) -> StepResult:
        """Truth advances with acceptance: the canary learns it now, the host when it reads the result.

        ``is_ahead``: nobody has collected the tokens, the canary learns them when somebody does; ``roots``: of trees.
        """
        roots = [None] * len(batch) if roots is None else roots
        parts = tuple(Part(*own) for own in zip(batch.requests, lens, tokens, logprobs, roots, strict=True))
        if self.canary is not None:
            going = [part for part in parts if part.request.request_id not in aborted]
            ids = [part.request.request_id for part in going]
            if not is_ahead:
                self.canary.append_all(ids, [part.tokens for part in going])
            self.canary.commit_all(ids, [part.committed_len for part in going])
        is_collected = self.canary is None or not is_ahead
        return StepResult(is_decode, parts, aborted, accepted, flight=self._take_flight(), is_collected=is_collected)

    def _take_flight(self) -> InFlight | None:
        """What the canary has still to judge of this step; nobody else holds it, and what it needs on the device."""
        flight, self._flight = self._flight, None
        return flight
