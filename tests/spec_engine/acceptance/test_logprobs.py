"""Log-probabilities of emitted tokens."""

from __future__ import annotations

import math

import torch

from spec_engine.acceptance.logprobs import TokenLogProb, log_probs
from spec_engine.acceptance.walk import Acceptance, match


def accepted_of(logits: torch.Tensor) -> Acceptance:
    """A bush of two drafts and a chain, of which [0, 2] and [0, 1, 2] are accepted whatever the logits."""
    tokens, parents = torch.tensor([[9, 4, 5, 1], [9, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    return match(tokens, parents, torch.tensor([[5, 0, 6, 0], [1, 2, 0, 0]]), 3)


def test_each_emitted_token_has_the_log_probability_at_the_node_before_it():
    """Rows are those of accepted nodes in the uncompacted tree; the likeliest come beside, in descending order."""
    logits = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
    found = log_probs(logits, accepted_of(logits), 2)
    for b, path in enumerate(([(0, 5), (2, 6)], [(0, 1), (1, 2), (2, 0)])):
        listed = found.to_list(b, len(path), 2)
        for (node, token), entry in zip(path, listed, strict=True):
            expected = logits[b, node].log_softmax(-1)
            assert entry.token_id == token
            assert math.isclose(entry.logprob, expected[token].item(), rel_tol=1e-6)
            order = sorted(range(8), key=lambda token, row=expected: -row[token].item())
            assert [other for other, _ in entry.top] == order[:2]
            assert math.isclose(entry.top[0][1], expected.max().item(), rel_tol=1e-6)


def test_requests_get_as_many_as_they_ask_for():
    """A batch is computed once for the most that one of its requests wants."""
    logits = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
    found = log_probs(logits, accepted_of(logits), 3)
    assert [len(entry.top) for entry in found.to_list(0, 2, 1)] == [1, 1]
    assert [entry.top for entry in log_probs(logits, accepted_of(logits), 0).to_list(1, 3, 0)] == [(), (), ()]


def test_logits_that_are_no_numbers_give_numbers():
    """A NaN has no probability and takes none from the others."""
    logits = torch.zeros(2, 4, 8)
    logits[0, 0, 7] = math.nan
    [entry] = log_probs(logits, accepted_of(logits), 1).to_list(0, 1, 1)
    logprob = torch.log(torch.tensor(1 / 7)).item()
    assert isinstance(entry, TokenLogProb)
    assert math.isclose(entry.logprob, logprob, rel_tol=1e-6)
    assert math.isclose(entry.top[0][1], logprob, rel_tol=1e-6)
