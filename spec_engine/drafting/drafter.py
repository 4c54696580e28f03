"""The draft model's part of a step: grow a tree before the verify, catch up with what was accepted after it.

The pool of a head holds K/V of the pair (token p+1, target features of position p) in slot p: ``token_offset`` 1, one
entry for every committed position. That of a model of its own holds token p in slot p, and one entry more, the bonus
token's: ``ahead`` 1. Everything of a step shifts by that entry, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcanary.faults import seam
from kvcanary.invariants import check_branch_shape, check_branches, check_draft_indices, check_relay
from spec_engine.acceptance.distribution import greedy_tokens, likeliest_tokens
from spec_engine.core import Batch, ForwardBatch, chain_forward, concat, indptr
from spec_engine.drafting.chain import ChainConstants, ChainGrowth, new_growth
from spec_engine.drafting.drawn import DrawnDrafts
from spec_engine.drafting.growing import Proposals, ancestor_path, grow, row_positions
from spec_engine.drafting.layout import branch_positions, branch_stride, longest_starts
from spec_engine.drafting.paging import ancestor_copies, branch_prefix, tail_copies
from spec_engine.drafting.tree import Tree, TreeGrowth
from spec_engine.memory.request_table import RequestTable
from spec_engine.models.decoder import DecoderOutput
from spec_engine.models.loader import Draft
from spec_engine.request import Request
from spec_engine.scheduling.scheduler import Chunk
from spec_engine.step.hooks import Forwards
from spec_engine.step.transfer import to_device

if TYPE_CHECKING:
    from kvcanary import Announced


class Drafter:
    """Draft head, its forwards, and the relay of proposals from one step to the next, indexed by request row.

    num_steps: T of a step that asks for no other; num_draft_tokens: N of its tree, of a chain always T + 1.
    step_choices: every T that a step may have; None: num_steps alone.
    attend: "ancestors", or "columns": survivor b attends what was written for branch b before, whoever its ancestors
        are. Other engines do that; it mixes paths of the tree, which costs acceptance and never correctness.
    draws: drafts are drawn (topk 1 only) rather than the likeliest, for chain rejection sampling.
    """

    def __init__(
        self,
        head: Draft,
        forwards: Forwards,
        table: RequestTable,
        *,
        topk: int,
        num_steps: int,
        num_draft_tokens: int,
        step_choices: Sequence[int] | None = None,
        attend: str = "ancestors",
        draws: bool = False,
    ) -> None:
        self.head = head
        self.forwards = forwards
        self.table = table
        self.topk, self.num_steps, self.num_draft_tokens = topk, num_steps, num_draft_tokens
        self._attends_columns = attend == "columns"
        self._copies = forwards.backend.reads_pages and topk > 1 and table.page_size > 1
        num_rows, device = len(table.table), table.table.device
        self._chains = _chains(topk, step_choices or (num_steps,), table.num_rows, device)
        self._published: dict[int, tuple[str, int]] = {}  # by row: whose proposals, at which committed length
        self._drawn = DrawnDrafts(head, num_rows, device) if draws else None
        self._target_ids = _target_ids(head, device)
        self._sure = torch.ones(1, 1, device=device)
        self._columns = torch.arange(topk, device=device)
        self._probs = torch.zeros(num_rows, topk, device=device)
        self._tokens = torch.zeros(num_rows, topk + 2, dtype=torch.int64, device=device)  # then row, committed length
        self._hidden = torch.zeros(num_rows, head.config.hidden_size, dtype=forwards.pool.dtype, device=device)

    @property
    def most_accepted(self) -> int:
        """Most nodes that a request accepts of a tree, which is most tokens that a step gives it."""
        return min(self.num_steps + 1, self.num_draft_tokens)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose input the head wants to see."""
        return self.head.tap_layers

    @property
    def draft_probs(self) -> Tensor | None:
        """``[bs, T, V] float64``, what the drafts of the last `draft` were drawn from; None unless drafts are drawn."""
        return None if self._drawn is None else self._drawn.probs

    def draft(self, batch: Batch, num_steps: int | None = None) -> Tree:
        """T selections with T-1 forwards, then the tree of the N-1 likeliest candidates and the root.

        num_steps: T of this step, one of ``step_choices``; 0 makes a root alone.
        """
        num_steps = self.num_steps if num_steps is None else num_steps
        self.consume(batch)
        if self._drawn is not None:
            self._drawn.begin(batch)
        growth = new_growth(
            self.topk,
            len(batch),
            self._chains.get(seam("adaptive.constants_of_another_length", num_steps, chains=self._chains)),
        )
        if num_steps:
            self._grow(growth, batch.shifted([self.head.ahead] * len(batch)), num_steps)
        return growth.finish(batch.bonus, num_steps + 1 if self.topk == 1 else self.num_draft_tokens)

    def announced(self, num_steps: int | None = None) -> list[Announced]:
        """The forwards of a `draft` with this T, in the order of their run."""
        steps = range((self.num_steps if num_steps is None else num_steps) - 1)
        return [one for step in steps for one in self.forwards.announced("draft", step)]

    def begin(self, row: int) -> None:
        """A request takes this row: nobody has proposed anything for it."""
        self._tokens[row].zero_()
        if self._drawn is not None:
            self._drawn.forget(row)

    def _grow(self, growth: TreeGrowth | ChainGrowth, batch: Batch, num_steps: int) -> None:
        self.check_step(batch.requests, batch.lens, num_steps)
        slots, prefixes = self._branch_slots(batch, num_steps), self._prefixes(batch, num_steps)

        def forward(
            step: int, tokens: Tensor, path: Tensor, parents: Tensor | None, hidden: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            opened = draft_forward(batch, step, prefixes, path, tokens, self._lineage(parents))
            with self.forwards.open(opened) as attention:
                after = self.head(opened.tokens, hidden, opened.positions, attention)
            return after, *self._propose(after, batch, opened.positions, is_first=False)

        grow(growth, slots, self.proposals(batch.rows), forward, self._path)
        if self._drawn is not None:
            growth.made_for = torch.cat((growth.made_for, self._drawn.made_for), 1)

    def extend(
        self,
        kind: str,
        batch: Batch,
        tokens: Tensor,
        features: Tensor,
        new_lens: Sequence[int],
        written: Sequence[int] | None = None,
    ) -> None:
        """Write the entries of accepted or prompt positions, and propose from each row's last.

        new_lens: positions that become committed, by request; ``written``: entries, where they are more, see
        `num_leading`. tokens: [sum(written)] int64; features: [sum(written), F], which a draft that is ahead ignores.
        """
        written = new_lens if written is None else written
        shifts = [self.head.ahead + new - count for new, count in zip(new_lens, written, strict=True)]
        forward = chain_forward(kind, 0, batch.shifted(shifts), self.table, tokens, written)
        with self.forwards.open(forward) as attention:
            hidden = self.head(tokens, features, forward.positions, attention)
        last = to_device(written, tokens.device).cumsum(0) - 1
        hidden, positions = hidden.index_select(0, last), forward.positions.index_select(0, last)
        probs, proposed = self._propose(hidden, batch, positions, is_first=True)
        proposed = self._stamped(proposed, batch.rows, positions + (1 - self.head.ahead))
        for kept, own in zip((self._probs, self._tokens, self._hidden), (probs, proposed, hidden), strict=True):
            kept.index_copy_(0, batch.rows, own)
        self.publish(batch.requests, [length + new for length, new in zip(batch.lens, new_lens, strict=True)])

    def num_leading(self, chunk: Chunk) -> int:
        """Entries that a chunk writes before those of its positions: what lies ahead behind a row's first prefix."""
        return self.head.ahead if chunk.is_first else 0

    def features(self, output: DecoderOutput, rows: Tensor | None = None) -> Tensor:
        """What the head reads of the target's forward, for all tokens or for ``rows [n]`` of them."""
        if rows is not None:
            taps = None if output.taps is None else output.taps[rows]
            output = DecoderOutput(output.hidden[rows], taps)
        return self.head.features(output)

    def publish(self, requests: Sequence[Request], lens: Sequence[int]) -> None:
        """Proposals of these requests lie in the relay, for these committed lengths, as the host knows them."""
        for request, length in zip(requests, lens, strict=True):
            self._published[request.row] = request.request_id, length

    def renew(self, request: Request, length: int) -> None:
        """The host knows a request's committed length of later than when its proposals were published."""
        published = self._published.get(request.row)
        if published is not None and published[0] == request.request_id:
            self._published[request.row] = request.request_id, length

    def consume(self, batch: Batch) -> None:
        """RelayError unless each request takes the proposals of its own last forward, once."""
        for request, length in zip(batch.requests, batch.lens, strict=True):
            check_relay(request.request_id, request.row, length, self._published.pop(request.row, None))

    def check_step(
        self,
        requests: Sequence[Request],
        lens: Sequence[int],
        num_steps: int,
        least: Sequence[int] | None = None,
    ) -> None:
        """Before a step is launched, eager or captured: branches lie in what is owned, with what is copied for them.

        lens: final entries of each request in the draft pool.
        least: where the host does not know these but that they are ``lens`` at most, and so many at least.
        """
        page_size = self.table.page_size
        for request, length, low in zip(requests, lens, lens if least is None else least, strict=True):
            allocated = len(request.pages) * page_size
            for start in longest_starts(low, length, page_size):
                tail = start % page_size
                stride = branch_stride(tail, num_steps, page_size)
                copied = tail if self._copies else 0
                check_branches(request.request_id, start, stride, self.topk, num_steps, allocated, copied)

    def _propose(self, hidden: Tensor, batch: Batch, positions: Tensor, is_first: bool) -> tuple[Tensor, Tensor]:
        """K continuations of each row, the likeliest or drawn: probabilities and target-vocabulary ids, both [n, K].

        positions [n]: of the head's rows; is_first: the proposals wait for the next step.
        """
        logits = self.head.logits(hidden)
        if self._drawn is not None:
            propose = self._drawn.first if is_first else self._drawn.extend
            return propose(logits, batch, positions + self.head.token_offset + 1)
        return self._likeliest(logits)

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.topk == 1:  # of one candidate nobody asks how likely it is
            ids = greedy_tokens(logits)[:, None]
            probs = self._sure.expand_as(ids)
        else:
            probs, ids = likeliest_tokens(logits, self.topk)
        return probs, ids if self._target_ids is None else self._target_ids[ids]

    # parts of a captured step, which waits for nothing and looks at no device value

    @property
    def chain_constants(self) -> ChainConstants | None:
        """Those of a chain of ``num_steps``; None for trees."""
        return self._chains.get(self.num_steps)

    def proposals(self, rows: Tensor) -> Proposals:
        """What waits in the relay for ``rows [n]``."""
        rows = seam("draft.proposals_of_another_row", rows)
        tokens, made_for = self._tokens[rows].split((self.topk, 2), 1)
        return Proposals(self._probs[rows], tokens, self._hidden[rows], made_for)

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The K likeliest continuations of each row of ``hidden [n, H]``: probabilities and tokens, both [n, K]."""
        return self._likeliest(self.head.logits(hidden))

    def propose_from(self, rows: Tensor, lens: Tensor, hidden: Tensor, is_live: Tensor) -> None:
        """Leave the likeliest continuations of ``hidden [n, H]`` in the relay; padding is row 0, and leaves zeros.

        lens [n]: committed lengths, with what this hidden state stands for.
        """
        probs, tokens = self.likeliest(hidden)
        tokens = self._stamped(tokens, rows, lens)
        for relay, values in ((self._probs, probs), (self._tokens, tokens), (self._hidden, hidden)):
            relay[rows] = torch.where(is_live[:, None], values, 0)

    @staticmethod
    def _stamped(tokens: Tensor, rows: Tensor, lens: Tensor) -> Tensor:
        """Proposed ``tokens [n, K]``, then whose they are, ``rows, lens [n]``; who takes them tells the host."""
        return torch.cat((tokens, rows[:, None], lens[:, None]), 1)

    def _branch_slots(self, batch: Batch, num_steps: int) -> Tensor:
        layout = {"topk": self.topk, "num_steps": num_steps, "page_size": self.table.page_size}
        positions = branch_positions(batch.lens_tensor, **layout)
        slots = self.table.table[batch.rows[:, None, None], positions]
        check_branch_shape(slots.shape, len(batch), self.topk, num_steps)
        return slots

    def _prefixes(self, batch: Batch, num_steps: int) -> list[Tensor]:
        """By request ``[K, S] int64``: the slots from which each branch reads the prefix."""
        table = self.table.table
        lens = [(request.row, length) for request, length in zip(batch.requests, batch.lens, strict=True)]
        if not self._copies:
            return [table[row, :length].expand(self.topk, -1) for row, length in lens]
        layout = {"topk": self.topk, "num_steps": num_steps, "page_size": self.table.page_size}
        tails, copies = tail_copies(table, batch.rows, batch.lens_tensor, **layout)
        copies = seam("draft.tail_not_copied", copies)
        self.forwards.move(tails.flatten(), copies.flatten())
        return [branch_prefix(table[row], length, **layout) for row, length in lens]

    def _path(self, slots: Tensor, path: Tensor, parents: Tensor, step: int) -> Tensor:
        """``[bs, K, step + 1] int64``: the slots of each survivor's ancestors, then its own."""
        if self._attends_columns:
            return slots[:, :, : step + 1]
        if self._copies:
            ancestors, copies = ancestor_copies(slots, parents, step)
            if step:
                self.forwards.move(ancestors.flatten(), copies.flatten(), guesses=True)
            return slots[:, :, : seam("bounds.page_table_scatter", step + 1, num_steps=self.num_steps)]
        return ancestor_path(slots, path, parents, step)

    def _lineage(self, parents: Tensor | None) -> Tensor | None:
        """``[bs * K] int64``: whose entries survivors are to read, for the canary; None: nobody asks."""
        if parents is None or self.forwards.canary is None:
            return None
        return (self._columns.expand_as(parents) if self._attends_columns else parents).flatten()


def _target_ids(head: Draft, device: torch.device) -> Tensor | None:
    """[num_draft_vocab] int64, what the target calls each of the draft's tokens; None where both say the same."""
    ids = torch.arange(head.num_draft_vocab, device=device)
    own = head.to_target_ids(ids)
    return None if own.equal(ids) else own


def _chains(topk: int, step_choices: Sequence[int], max_bs: int, device: torch.device) -> dict[int, ChainConstants]:
    """The constants of every T that a chain may have; a tree has none."""
    if topk > 1:
        return {}
    return {steps: ChainConstants(max_bs, steps, steps + 1, device) for steps in step_choices}


def draft_forward(
    batch: Batch, step: int, prefixes: Sequence[Tensor], path: Tensor, tokens: Tensor, lineage: Tensor | None = None
) -> ForwardBatch:
    """Row (b, k) reads ``prefixes[b][k]``, then the slots of its node's ancestors, ``path[b, k]``, with its own last.

    prefixes: by request [K, S] int64; path: [bs, K, step + 1] int64; tokens, lineage: [bs * K] int64.
    """
    topk = path.shape[1]
    entries = [torch.cat((prefix, slots), 1).flatten() for prefix, slots in zip(prefixes, path, strict=True)]
    indices = concat(entries)
    check_draft_indices(step, topk, len(batch), sum(batch.lens), indices.numel())
    kv_lens = tuple(length + step + 1 for length in batch.lens for _ in range(topk))
    return ForwardBatch(
        kind="draft",
        index=step,
        requests=batch.ids,
        rows_per_request=topk,
        prefix_lens=batch.lens_tensor,
        kv_indptr=indptr(kv_lens, tokens.device),
        kv_indices=indices,
        kv_lens=kv_lens,
        new_lens=(1,) * len(kv_lens),
        slots=path.select(2, -1).flatten(),
        tokens=tokens,
        positions=row_positions(batch.lens_tensor, step, topk),
        lineage=lineage,
    )
