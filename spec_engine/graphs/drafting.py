"""A captured drafting step: the draft loop and the target's forward over the tree that it grew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcanary.invariants import check_draft_indices
from spec_engine.acceptance.distribution import greedy_tokens
from spec_engine.acceptance.walk import Acceptance, match, match_chain
from spec_engine.drafting.chain import new_growth
from spec_engine.drafting.growing import grow
from spec_engine.drafting.layout import branch_positions
from spec_engine.graphs.decision import Moves, compact
from spec_engine.graphs.feed import Feed
from spec_engine.graphs.forward import StaticForward, slots_at
from spec_engine.graphs.hooks import Hooked, StaticForwards
from spec_engine.graphs.results import Results
from spec_engine.graphs.states import StateSource, StaticStates
from spec_engine.graphs.step import SECTIONS, StepProgram
from spec_engine.models.decoder import DecoderOutput
from spec_engine.step.verify import Accepted, accepted_of, owners_of, results_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvcanary.captured import CapturedAcceptance
    from spec_engine.core import Batch
    from spec_engine.drafting.drafter import Drafter
    from spec_engine.drafting.tree import Tree
    from spec_engine.graphs.program import Recorder
    from spec_engine.models.decoder import Decoder
    from spec_engine.step.relay import Relay


class Path(NamedTuple):
    """Accepted paths of all rows of a program, padding's of no node.

    lens: [size], committed lengths before;  counts: [size]
    tokens: [size, most], that follow each node;  nodes: [size, most], as they lie in the program's `output`
    """

    lens: Tensor
    counts: Tensor
    tokens: Tensor
    nodes: Tensor


class DraftProgram(StepProgram):
    """T selections with T - 1 draft forwards, the tree, and its verify, for up to ``size`` requests.

    After a run ``output`` holds what the verify made of all nodes, [size * N, ...], those of padding last.
    """

    def __init__(
        self,
        size: int,
        model: Decoder,
        target: StaticForwards,
        drafter: Drafter,
        drafts: StaticForwards,
        relay: Relay,
        recorder: Recorder,
        is_followed: bool,
        states: StateSource | None = None,
    ) -> None:
        """``is_followed``: by an extend in every step that decides, which tells the canary of moves; ``states``: of a
        model with recurrent layers
        """
        sizes = {"rows": size, "branches": 1, **dict.fromkeys(SECTIONS, 1)}
        sizes |= target.sections("verify", size) | drafts.sections("draft", size * drafter.topk)
        super().__init__(size, Feed(sizes, drafter.table.table.device), relay)
        self._model, self._target, self._drafter, self._drafts = model, target, drafter, drafts
        self._table, self._page_size = drafter.table.table, drafter.table.page_size
        self._steps = torch.arange(drafter.num_steps - 1, device=self._table.device)[:, None, None]
        self._slots, self._positions = (self._steps.new_zeros(len(self._steps), size, drafter.topk) for _ in range(2))
        self._rows = drafts.rows(self._feed, "draft", "branches", drafter.topk)
        self._draft_forwards = [self._make_draft(step) for step in range(drafter.num_steps - 1)]
        nodes, depth = drafter.num_draft_tokens, drafter.num_steps
        verify = StaticForward.allocate("verify", 0, self._table, requests=size, new=nodes, depth=depth, is_tree=True)
        self._verify = target.hook(verify, target.rows(self._feed, "verify", "live"))
        self._launches = self._launches_deciding = target.together(self._draft_forwards, [self._verify])
        self._states = None if states is None else StaticStates(states, self._verify)
        self._num_places = depth + 1
        self._results = Results({"results": (size, 1 + 4 * nodes + self._num_places + 2)}, self._table.device)
        self._move = self._target.hook_move(size * (depth + 1), self._feed) if self.compacts else None
        self._is_followed = is_followed
        self._moved: Moves | None = None
        self._tree: Tree
        self.output: DecoderOutput
        self._run = recorder.record(self._body)

    def follow_by(self, extend: Hooked, acceptance: CapturedAcceptance | None) -> None:
        """An extend runs behind each step that decides, over what it has accepted: they are launched together."""
        forwards = self._draft_forwards, [self._verify], [extend]
        self._launches_deciding = self._target.together(*forwards, acceptance=acceptance)

    def _make_draft(self, step: int) -> Hooked:
        topk = self._drafter.topk
        asks = self._drafts.canary is not None and topk > 1 and step > 0
        forward = StaticForward.allocate(
            "draft", step, self._table, requests=self.size, width=topk, new=1, ancestors=step, has_lineage=asks
        )
        forward = replace(forward, slots=self._slots[step].view(-1), positions=self._positions[step].view(-1))
        return self._drafts.hook(forward, self._rows, is_deferred=True)

    def __call__(self, batch: Batch, decides: bool) -> Tensor:
        """The hidden states of all nodes, [bs * N, H]; ``decides``: acceptance, moves, the relay's new lengths too."""
        live, topk, nodes = len(batch), self._drafter.topk, self._drafter.num_draft_tokens
        branches, committed = live * topk, sum(batch.lens)
        self._feed.set(
            rows=[request.row for request in batch.requests], live=[live], branches=[branches], decides=[decides]
        )
        prefixes = topk * (committed + live * self._drafter.head.ahead)
        reads = [prefixes + branches * (step + 1) for step in range(len(self._draft_forwards))]
        entries, written = [1] * live if reads else [], live * nodes
        reads.append(committed + written)
        if decides and self._is_followed:
            reads.append(committed + live * self._drafter.head.ahead)
        (self._launches_deciding if decides else self._launches).launch(batch.ids, [*entries, *[nodes] * live], reads)
        if self._move is not None and decides:
            self._target.launch_move(self._move)
        if self._states is not None:
            self._states.launch(batch.ids)
        self._feed.send()
        self._run()
        return self.output.hidden[:written]

    def tree(self, live: int) -> Tree:
        """The trees of the first ``live`` requests; gone with the next run."""
        return self._tree.first(live)

    def check_indices(self, committed: int) -> None:
        """IndexBufferError unless every draft forward can name ``committed`` entries of all prefixes, by each branch.

        A row of padding names what it writes and null ancestors alone.
        """
        for step, hooked in enumerate(self._draft_forwards):
            check_draft_indices(step, self._drafter.topk, self.size, committed, hooked.forward.indices.numel())

    def fetch(self, batch: Batch) -> list[Accepted]:
        """What each request accepts by argmax; waits for the device."""
        rows = self._results.fetch()["results"][: len(batch)].tolist()
        shape = self._drafter.num_draft_tokens, self._num_places
        return [accepted_of(row, *shape, owner) for row, owner in zip(rows, owners_of(batch), strict=True)]

    def path(self) -> Path:
        """What the requests have accepted, within a program behind this one."""
        accepted, size = self._accepted, self._drafter.most_accepted
        rows = torch.arange(self.size, device=self._table.device)
        counts = torch.where(rows < self._feed["live"], accepted.lens, 0)
        nodes = accepted.nodes[:, :size] + rows[:, None] * self._drafter.num_draft_tokens
        return Path(self._lens, counts, accepted.tokens[:, :size], nodes)

    def windows(self, live: int) -> Tensor:
        """[live, N] int64: the slots of their nodes."""
        return self._verify.forward.slots.view(self.size, -1)[:live]

    def _body(self) -> None:
        rows, lens, bonus = self._load()
        tree = self._grow(rows, lens + self._drafter.head.ahead, bonus)
        self._judge(rows, lens, tree)
        self._tree = replace(tree, num_seen=self._verify.forward.tree_mask.sum(-1))
        accepted = self._accept(tree)
        is_decided = self._commit(accepted)
        if self._states is not None:
            self._states.commit(accepted, is_decided)
        if self.compacts:
            self._moved = compact(self._target.pool, self.windows(self.size), accepted, is_decided)
            if not self._is_followed:
                self.record_moves()
        self._results.put(results=results_of(self._tree, accepted))
        self._target.join()

    def record_moves(self) -> None:
        """Within a program: records follow the entries that this one has moved."""
        if self._move is not None and self._moved is not None:
            self._move.record(*self._moved)

    @property
    def compacts(self) -> bool:
        """Whether a step that decides moves accepted nodes too: a chain has none to move."""
        return self._drafter.topk > 1

    def _accept(self, tree: Tree) -> Acceptance:
        chosen = greedy_tokens(self._model.logits(self.output.hidden).view(*tree.tokens.shape, -1))
        if self._drafter.chain_constants is not None:
            return match_chain(tree.tokens, chosen)
        return match(tree.tokens, tree.parents, chosen, self._drafter.num_steps)

    def _grow(self, rows: Tensor, lens: Tensor, bonus: Tensor) -> Tree:
        """Rows of the draft pool hold ``lens [size]`` final entries."""
        drafter, topk = self._drafter, self._drafter.topk
        layout = {"topk": topk, "num_steps": drafter.num_steps, "page_size": self._page_size}
        slots = slots_at(self._table, rows[:, None, None], branch_positions(lens, **layout))  # [size, K, T]
        self._slots.copy_(slots.permute(2, 0, 1)[:-1])
        self._positions.copy_(lens[:, None] + self._steps)
        self._drafts.admit(self._draft_forwards)
        growth = new_growth(topk, self.size, drafter.chain_constants)

        def run(
            step: int, tokens: Tensor, path: Tensor, parents: Tensor | None, hidden: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            hooked = self._draft_forwards[step]
            forward = hooked.forward
            forward.take(tokens, parents)
            forward.read(self._table, rows, lens, path.flatten(0, 1), self._drafts.pool.num_slots)
            with self._drafts.open(hooked) as attention:
                after = drafter.head(forward.tokens, hidden, forward.positions, attention)
            return after, *drafter.likeliest(after)

        grow(growth, slots, drafter.proposals(rows), run)
        return growth.finish(bonus, drafter.num_draft_tokens)

    def _judge(self, rows: Tensor, lens: Tensor, tree: Tree) -> None:
        """The target's forward over all nodes; node n is written at row position S + n."""
        forward = self._verify.forward
        nodes = torch.arange(forward.new, device=rows.device)
        window = slots_at(self._table, rows[:, None], lens[:, None] + nodes)
        first = torch.arange(self.size, device=rows.device)[:, None] * forward.new
        forward.tokens.copy_(tree.tokens.flatten())
        forward.positions.copy_((lens[:, None] + tree.depths).flatten())
        forward.slots.copy_(window.flatten())
        forward.parents.copy_(torch.where(tree.parents < 0, -1, tree.parents + first).flatten())
        forward.tree_mask.copy_(tree.mask)
        forward.read(self._table, rows, lens, window, self._target.pool.num_slots)
        if self._draft_forwards:
            self._rows.advance()  # postponed as they are
        self._verify.rows.advance()
        own: tuple[Any, ...] = (self._drafter.tap_layers,)
        if self._states is not None:
            self._states.begin(rows, lens)
            own += (self._states.access,)
        with self._target.open(self._verify) as attention:
            self.output = self._model(forward.tokens, forward.positions, attention, *own)
        if self._states is not None:
            self._states.end()
