"""A runner whose decode steps are captured programs; prefill, moves and what is drawn stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from kvcanary.invariants import check_rows_distinct, check_window
from spec_engine.acceptance.acceptor import Decision
from spec_engine.acceptance.walk import NO_TOKEN
from spec_engine.drafting.drafter import Drafter
from spec_engine.graphs.decision import is_decided_by_argmax
from spec_engine.graphs.decode import DecodeProgram
from spec_engine.graphs.drafting import DraftProgram
from spec_engine.graphs.extend import ExtendProgram
from spec_engine.graphs.hooks import StaticForwards
from spec_engine.graphs.program import Recorder
from spec_engine.graphs.reader_probe import CapturedReader
from spec_engine.graphs.states import StateSource
from spec_engine.memory.pools.recurrent_watch import StateWatch
from spec_engine.models.decoder import DecoderOutput
from spec_engine.step.runner import Part, Runner, StepResult, Verified
from spec_engine.step.verify import Accepted

if TYPE_CHECKING:
    from kvcanary.captured import AcceptedTokens, CapturedStates
    from spec_engine.core import Batch
    from spec_engine.drafting.tree import Tree
    from spec_engine.memory.pools.pool import KVPool
    from spec_engine.memory.recurrent import RecurrentPool
    from spec_engine.request import Request
    from spec_engine.scheduling.scheduler import Chunk
    from spec_engine.step.reader_probe import ProbedReader


class Bucket(NamedTuple):
    """The programs of one batch size; extend: None without drafting."""

    step: DecodeProgram | DraftProgram
    extend: ExtendProgram | None = None


class GraphRunner(Runner):
    """Runs the smallest bucket that holds a batch; one that no bucket holds runs as without graphs.

    Where every request takes its likeliest token the program decides by itself, and the host reads what it did; else
    acceptance runs behind it as it does without graphs. A host that lags collects such a step, its tokens and what the
    canary found in it, behind the next launch.
    """

    def record(self, buckets: Sequence[int]) -> None:
        """Make the programs of these batch sizes, ascending; before the canary is armed."""
        self._lens: dict[int, int] = {}  # by row, the committed length that the host knows
        self._uncollected: dict[int, int] = {}  # by row, steps behind it that the host has not collected
        self._bucket: Bucket | None = None  # in which the current step runs
        self._decides = False  # whether its program does
        self._state_source = (
            None if self.states is None else StateSource(self.states, self._captured_states(self.states))
        )
        self._readers: dict[str, CapturedReader] = {}  # by pool
        recorder = Recorder(self.device)
        accepted_tokens = self._add_accepted_tokens(self.drafter)
        target = StaticForwards(self.forwards.pool, self.forwards.num_heads, self.canary, accepted_tokens)
        self._buckets = [self._make_bucket(size, target, recorder) for size in buckets]

    def captured_reader(self, pool: KVPool, num_heads: int, eager: ProbedReader) -> CapturedReader:
        """Who reads this pool in captured steps."""
        if pool.name not in self._readers:
            self._readers[pool.name] = CapturedReader(pool, num_heads, eager)
        return self._readers[pool.name]

    def _captured_states(self, states: RecurrentPool) -> CapturedStates | None:
        """Who judges them on the device, and is told of forwards that are not captured too."""
        if self.canary is None:
            return None
        captured = self.canary.capture_states("recurrent", len(self.table.table), states.entries_per_row - 1)
        states.watch = StateWatch(captured, states.entries_per_row)
        return captured

    def _add_accepted_tokens(self, drafter: Drafter | None) -> AcceptedTokens | None:
        """Where a canary keeps what steps accept, if the host goes ahead of that."""
        if self.canary is None or drafter is None or not self.lag:
            return None
        return self.canary.registry.add_accepted_tokens(len(self.table.table), drafter.most_accepted)

    def begin(self, row: int, committed_len: int) -> None:
        """A request takes this row with ``committed_len`` entries that are there already."""
        super().begin(row, committed_len)
        self._lens[row], self._uncollected[row] = committed_len, 0

    def collected(self, result: StepResult) -> None:
        """The host knows now what this step has done."""
        super().collected(result)
        if self.drafter is None or result.drafted is None:
            return
        for part in result.parts:
            request = part.request
            if request.goes_on:
                self._lens[request.row] = part.committed_len
                self._uncollected[request.row] -= 1
                self.drafter.renew(request, part.committed_len)

    def prefill(self, chunks: Sequence[Chunk]) -> StepResult:
        """Forward prompt chunks, as without graphs."""
        self._bucket, self._decides = None, False
        return super().prefill(chunks)

    def runs_ahead(self, requests: Sequence[Request]) -> bool:
        """Whether a decode step of these can be launched while the host has not collected the tokens of the last
        one.
        """
        return self._bucket_for(len(requests)) is not None and self._can_decide(requests)

    def _make_bucket(self, size: int, target: StaticForwards, recorder: Recorder) -> Bucket:
        drafter, states = self.drafter, self._state_source
        if drafter is None:
            return Bucket(DecodeProgram(size, self.model, target, self.table, self.relay, recorder, states))
        drafts = StaticForwards(drafter.forwards.pool, drafter.forwards.num_heads, self.canary, target.accepted_tokens)
        follows = self.lag > 0
        step = DraftProgram(size, self.model, target, drafter, drafts, self.relay, recorder, follows, states)
        return Bucket(step, ExtendProgram(size, drafter, drafts, step, recorder, follows))

    # a step, in the order of its run

    def _batch_of(self, requests: Sequence[Request]) -> Batch:
        """On the addresses of the smallest bucket that holds the requests; their lengths as the host last read them."""
        self._bucket = self._bucket_for(len(requests))
        if self._bucket is None:
            self._decides = False
            return super()._batch_of(requests)
        self._decides = self._can_decide(requests)
        check_rows_distinct([request.request_id for request in requests], [request.row for request in requests])
        return self._bucket.step.batch(requests, [self._lens[request.row] for request in requests])

    def _bucket_for(self, num_requests: int) -> Bucket | None:
        return next((bucket for bucket in self._buckets if bucket.step.size >= num_requests), None)

    def _can_decide(self, requests: Sequence[Request]) -> bool:
        return is_decided_by_argmax(request.params for request in requests)

    @property
    def _waits_for_results(self) -> bool:
        """A host that lags waits for the tokens of a captured step, and with them for all that it launched."""
        return self._decides and self.lag > 0

    def _decode_one(self, batch: Batch) -> StepResult:
        """A host that lags only launches the step: each request has one token more, whichever it is."""
        if not self._decides or not self.lag:
            return super()._decode_one(batch)
        accepted = self._decide(batch, self._decoded(batch)).accepted
        aborted, lens = self._judge(), [length + 1 for length in batch.lens]
        self._publish(batch, lens, ())
        parts = tuple(Part(*own, [NO_TOKEN]) for own in zip(batch.requests, lens, strict=True))
        if self.canary is not None:
            self.canary.commit_all(batch.ids, lens)
        return StepResult(True, parts, aborted, accepted, flight=self._take_flight(), is_collected=False)

    def _draft_step(self, batch: Batch, drafter: Drafter, num_steps: int | None) -> StepResult:
        """A host that lags only launches the step and its extend: the device knows what was accepted."""
        bucket = self._bucket
        if bucket is None or bucket.extend is None or not self._decides or not self.lag:
            return super()._draft_step(batch, drafter, num_steps)
        tree = self._verified(batch, drafter, num_steps).tree
        bucket.extend.follow(batch)
        aborted, accepted = self._judge(), bucket.step.accepted(len(batch))
        drafter.publish(batch.requests, batch.lens)
        for request in batch.requests:
            self._uncollected[request.row] += 1
        parts = tuple(Part(*own, [NO_TOKEN]) for own in zip(batch.requests, batch.lens, strict=True))
        return StepResult(True, parts, aborted, accepted, flight=self._take_flight(), is_collected=False, drafted=tree)

    def _decoded(self, batch: Batch) -> Tensor:
        if self._bucket is None:
            return super()._decoded(batch)
        return self._bucket.step(batch, self._decides)

    def _verified(self, batch: Batch, drafter: Drafter, num_steps: int | None) -> Verified:
        if self._bucket is None:
            return super()._verified(batch, drafter, num_steps)
        step, live = self._bucket.step, len(batch)
        self._check(batch, drafter, step)
        drafter.consume(batch)
        if self.states is not None and not self._decides:
            self.states.open_verify([request.row for request in batch.requests], drafter.num_draft_tokens)
        hidden = step(batch, self._decides)
        return Verified(step.tree(live), step.windows(live), DecoderOutput(hidden, None))

    def _decide(
        self, batch: Batch, hidden: Tensor, tree: Tree | None = None, draft_probs: Tensor | None = None
    ) -> Decision:
        if self._bucket is None or not self._decides:
            return super()._decide(batch, hidden, tree, draft_probs)
        return Decision(self._bucket.step.accepted(len(batch)), None)

    def _to_host(self, batch: Batch, tree: Tree | None, decision: Decision) -> list[Accepted]:
        if self._bucket is None or not self._decides:
            return super()._to_host(batch, tree, decision)
        return self._bucket.step.fetch(batch)

    def compact(self, windows: Tensor, accepted: Sequence[Accepted], going: Sequence[int]) -> None:
        """Bring accepted nodes of the requests ``going`` to the front of their windows, unless the program did."""
        if not self._decides:
            super().compact(windows, accepted, going)

    def commit_states(self, batch: Batch, tree: Tree, accepted: Sequence[Accepted]) -> None:
        """Each row goes on from the state of its last accepted node, unless the program has seen to it."""
        if not self._decides:
            super().commit_states(batch, tree, accepted)

    def _publish(self, batch: Batch, lens: Sequence[int], bonus: Sequence[int]) -> None:
        self._lens.update(zip((request.row for request in batch.requests), lens, strict=True))
        if not self._decides:
            super()._publish(batch, lens, bonus)

    def _extend(
        self, batch: Batch, drafter: Drafter, output: DecoderOutput, accepted: Sequence[Accepted], going: Sequence[int]
    ) -> None:
        if self._bucket is None or self._bucket.extend is None:
            super()._extend(batch, drafter, output, accepted, going)
            return
        self._bucket.extend(batch, accepted, going)
        lens = [batch.lens[b] + len(accepted[b].tokens) for b in going]
        drafter.publish([batch.requests[b] for b in going], lens)

    def _check(self, batch: Batch, drafter: Drafter, step: DraftProgram) -> None:
        """What the host knows of the step's slots before they are used: however much the last one has accepted."""
        page_size, most = self.table.page_size, drafter.most_accepted
        uncollected = [self._uncollected[request.row] for request in batch.requests]
        lens = [length + most * steps for length, steps in zip(batch.lens, uncollected, strict=True)]
        for request, length in zip(batch.requests, lens, strict=True):
            check_window(request.request_id, length, drafter.num_draft_tokens, len(request.pages) * page_size)
        ahead = drafter.head.ahead
        least = [length + steps + ahead for length, steps in zip(batch.lens, uncollected, strict=True)]
        lens = [length + ahead for length in lens]
        drafter.check_step(batch.requests, lens, drafter.num_steps, least)
        step.check_indices(sum(lens))
