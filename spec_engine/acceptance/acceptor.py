"""One batch's acceptance: logits become tokens, by the rule of the engine and the parameters of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_engine.acceptance.coins import ACCEPT, DRAW, coins
from spec_engine.acceptance.distribution import choose, target_probs
from spec_engine.acceptance.logprobs import LogProbs, TokenLogProb, log_probs
from spec_engine.acceptance.penalties import RowCounts, TokenCounts, adjust_logits
from spec_engine.acceptance.rejection import reject_chain
from spec_engine.acceptance.settings import SamplingBatch
from spec_engine.acceptance.thresholds import Thresholds
from spec_engine.acceptance.tree_sampling import sample_tree
from spec_engine.acceptance.walk import Acceptance, match, single
from spec_engine.drafting.tree import Tree
from spec_engine.request import Request
from spec_engine.sampling import SamplingParams


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a forward after which something is chosen: those of ``tree``, or one a request.

    rows: [bs] int64, request-table rows; positions: [bs] int64, of the tokens that follow the roots.
    draft_probs: [bs, T, V], what each draft of a chain was drawn from, for chain rejection sampling alone.
    """

    requests: Sequence[Request]
    rows: Tensor
    positions: Tensor
    tree: Tree | None = None
    draft_probs: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Decision:
    """What a forward decided: the accepted paths, and log-probabilities where a request asks for them."""

    accepted: Acceptance
    logprobs: LogProbs | None

    def logprobs_of(self, b: int, params: SamplingParams, num_tokens: int) -> tuple[TokenLogProb, ...] | None:
        """Those of request ``b``'s ``num_tokens`` tokens; None where it does not ask. Waits for the device."""
        if self.logprobs is None or params.logprobs is None:
            return None
        return tuple(self.logprobs.to_list(b, num_tokens, params.logprobs))


class Acceptor:
    """rule: "match", "tree" or "rejection", as `EngineConfig.acceptance`; counts of penalised requests live by row."""

    def __init__(
        self, rule: str, thresholds: Thresholds, *, vocab_size: int, num_rows: int, device: torch.device
    ) -> None:
        self.rule, self.thresholds = rule, thresholds
        self.vocab_size, self.device = vocab_size, device
        self._counts = RowCounts(num_rows, vocab_size, device)
        self._params: tuple[SamplingParams, ...] = ()
        self._settings = SamplingBatch.of((), vocab_size, device)

    def begin(self, request: Request) -> None:
        """All that is known of a request is forwarded, now or again: count what stands in it, bonus token included."""
        if request.params.is_penalised:
            self._counts.begin(request.row, request.prompt_ids, request.output_ids)

    def decide(self, logits: Tensor, nodes: Nodes) -> Decision:
        """``logits [bs, N, V]``, raw, after each node. Counts what it emits, for the node after it."""
        settings = self._settings_of(nodes.requests)
        counts = self._counts.of(nodes.rows) if settings.penalises else None
        accepted = self._walk(self._adjusted(logits, settings, counts, nodes.tree), settings, nodes)
        if counts is not None:
            counts.add(accepted)
            self._counts.put(nodes.rows, counts)
        num_top = max((params.logprobs for params in self._params if params.logprobs is not None), default=None)
        return Decision(accepted, None if num_top is None else log_probs(logits, accepted, num_top))

    def _settings_of(self, requests: Sequence[Request]) -> SamplingBatch:
        params = tuple(request.params for request in requests)
        if params != self._params:
            self._params, self._settings = params, SamplingBatch.of(params, self.vocab_size, self.device)
        return self._settings

    def _adjusted(
        self, logits: Tensor, settings: SamplingBatch, counts: TokenCounts | None, tree: Tree | None
    ) -> Tensor:
        tokens, mask = (None, None) if tree is None else (tree.tokens, tree.mask)
        return adjust_logits(logits, settings, counts, tokens, mask)

    def _walk(self, logits: Tensor, settings: SamplingBatch, nodes: Nodes) -> Acceptance:
        tree, first = nodes.tree, nodes.positions[:, None]
        if tree is None:
            return single(choose(logits, settings, first))
        num_steps = int(tree.depths.max())
        if self.rule == "match" or settings.all_greedy:
            return match(tree.tokens, tree.parents, choose(logits, settings, first + tree.depths), num_steps)
        probs = target_probs(logits, settings)  # a greedy request's are certain, so that its walk is greedy
        places = first + torch.arange(num_steps + 1, device=first.device)
        accept_coins, draw_coins = (coins(settings.seeds, places, purpose) for purpose in (ACCEPT, DRAW))
        if nodes.draft_probs is None:
            return sample_tree(tree.tokens, tree.parents, probs, accept_coins, draw_coins, self.thresholds)
        return reject_chain(tree.tokens, probs, nodes.draft_probs[:, :num_steps], accept_coins, draw_coins)
