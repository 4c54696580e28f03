"""Penalties under drafting equal penalties without: a toy target, random trees, a brute-force loop as the oracle."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest
import torch

from spec_engine import SamplingParams
from spec_engine.acceptance.distribution import choose
from spec_engine.acceptance.penalties import TokenCounts, adjust_logits
from spec_engine.acceptance.settings import SamplingBatch
from spec_engine.acceptance.walk import match
from spec_engine.drafting.tree import ancestor_mask

VOCAB, NUM_STEPS, NUM_NODES, LENGTH = 7, 3, 9, 30
CPU = torch.device("cpu")
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.25, "logit_bias": {2: -0.5}}
PARAMS = (
    SamplingParams(**PENALTIES),
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=4, **PENALTIES),
    SamplingParams(repetition_penalty=0.7, logit_bias={0: float("-inf"), 3: 1.5}),
    SamplingParams(temperature=1.2, seed=9, frequency_penalty=-0.3, top_k=5),
)
PROMPTS = ([1, 2, 2], [3], [4, 4, 5, 6], [0, 1], [])


def logits_after(sequence: list[int]) -> list[float]:
    """A target that looks at the last two tokens only, so that greedy decoding without penalties goes round."""
    digest = hashlib.blake2b(repr(sequence[-2:]).encode(), digest_size=2 * VOCAB).digest()
    return [int.from_bytes(digest[2 * t : 2 * t + 2], "little") / 2**14 - 2 for t in range(VOCAB)]


def penalised(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """The formula for one row, token by token."""
    counts = Counter(output)
    rows = []
    for token, logit in enumerate(logits):
        if token in prompt or token in counts:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * counts[token] + params.presence_penalty * (token in counts)
        rows.append(logit + params.logit_bias.get(token, 0.0))
    return rows


def decoded(prompt: list[int], params: SamplingParams) -> list[int]:
    """Plain decoding, one token at a time."""
    output: list[int] = []
    while len(output) < LENGTH:
        row = torch.tensor([[penalised(logits_after(prompt + output), prompt, output, params)]], dtype=torch.float64)
        output.append(choose(row, SamplingBatch.of([params], VOCAB, CPU), torch.tensor([[len(output)]])).item())
    return output


def random_tree(root: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree whose siblings differ; with seven tokens some drafts are right."""
    tokens, parents = [root], [-1]
    while len(tokens) < NUM_NODES:
        parent, token = rng.randrange(len(tokens)), rng.randrange(VOCAB)
        if (parent, token) not in zip(parents, tokens, strict=True) and _depth(parents, parent) < NUM_STEPS:
            parents.append(parent)
            tokens.append(token)
    return tokens, parents


def _depth(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + _depth(parents, parents[node])


def _path(tokens: list[int], parents: list[int], node: int) -> list[int]:
    return [] if node == 0 else [*_path(tokens, parents, parents[node]), tokens[node]]


def test_drafting_with_penalties_equals_plain_decoding_with_penalties():
    """Greedy and sampled requests emit the tokens of the brute-force loop, and drafts were accepted on the way."""
    rng, bs = random.Random(5), len(PARAMS)
    expected = [decoded(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    outputs = [own[:1] for own in expected]  # the prefill's token
    settings = SamplingBatch.of(PARAMS, VOCAB, CPU)
    counts = TokenCounts.of(PROMPTS, outputs, VOCAB, CPU)
    num_steps = 0
    while min(len(output) for output in outputs) < LENGTH:
        trees = [random_tree(output[-1], rng) for output in outputs]
        tokens, parents = (torch.tensor(part) for part in zip(*trees, strict=True))
        paths = [[_path(*tree, node) for node in range(NUM_NODES)] for tree in trees]
        raw = [[logits_after(PROMPTS[b] + outputs[b] + path) for path in paths[b]] for b in range(bs)]
        mask = ancestor_mask(parents, NUM_STEPS)
        logits = adjust_logits(torch.tensor(raw, dtype=torch.float64), settings, counts, tokens, mask)
        positions = torch.tensor([[len(outputs[b]) + len(path) for path in paths[b]] for b in range(bs)])
        accepted = match(tokens, parents, choose(logits, settings, positions), NUM_STEPS)
        counts.add(accepted)
        for output, (_, emitted) in zip(outputs, accepted.to_lists(), strict=True):
            output += emitted
        num_steps += 1
    assert [output[:LENGTH] for output in outputs] == expected
    assert sum(len(output) - 1 for output in outputs) > 1.2 * num_steps * bs
    assert expected[0] != decoded(PROMPTS[0], PARAMS[1])


def test_each_row_is_penalised_by_its_own_path():
    """Presence shows once, frequency as often as the token stands on the path, the root only through the counts."""
    settings = SamplingBatch.of([SamplingParams(presence_penalty=10.0, frequency_penalty=1.0)], 4, CPU)
    tokens, mask = torch.tensor([[3, 1, 1, 2]]), ancestor_mask(torch.tensor([[-1, 0, 1, 0]]), 3)
    counts = TokenCounts.of([[0, 2]], [[3]], 4, CPU)
    found = adjust_logits(torch.zeros(1, 4, 4), settings, counts, tokens, mask)
    assert found[0].tolist() == [[0, 0, 0, -11], [0, -11, 0, -11], [0, -12, 0, -11], [0, 0, -11, -11]]


def test_repetition_counts_the_prompt_and_presence_does_not():
    """A token of the prompt is divided or multiplied by the one, and not lowered by the other."""
    settings = SamplingBatch.of([SamplingParams(repetition_penalty=2.0, presence_penalty=0.5)], 4, CPU)
    counts = TokenCounts.of([[0, 1]], [[3]], 4, CPU)
    found = adjust_logits(torch.tensor([[[4.0, -4.0, 4.0, 4.0]]]), settings, counts)
    assert found.tolist() == [[[2.0, -8.0, 4.0, 1.5]]]


def test_a_draft_outside_of_the_vocabulary_costs_its_branch_only():
    """It is never accepted; the rows of other branches are as without it."""
    settings = SamplingBatch.of([SamplingParams(presence_penalty=1.0)], 4, CPU)
    mask = ancestor_mask(torch.tensor([[-1, 0, 0]]), 1)
    counts = TokenCounts.of([[]], [[3]], 4, CPU)
    found = adjust_logits(torch.zeros(1, 3, 4), settings, counts, torch.tensor([[3, 99, 1]]), mask)
    assert found[0, 0].tolist() == [0, 0, 0, -1]
    assert found[0, 2].tolist() == [0, -1, 0, -1]


def test_requests_without_penalties_keep_their_logits():
    """Nothing is computed, nothing is counted: the very same tensor comes back."""
    logits = torch.zeros(1, 2, 4)
    assert adjust_logits(logits, SamplingBatch.of([SamplingParams()], 4, CPU)) is logits


def test_penalties_without_counts_are_refused():
    """A penalty that nothing was counted for would silently be none."""
    settings = SamplingBatch.of([SamplingParams(presence_penalty=1.0)], 4, CPU)
    with pytest.raises(ValueError, match="counts must be given where a request has a penalty, got None"):
        adjust_logits(torch.zeros(1, 2, 4), settings)
