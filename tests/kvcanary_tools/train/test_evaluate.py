"""The measurements behind the model card, checked against slower ones written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvcanary_tools.train.dense import CausalKV, continue_greedily
from kvcanary_tools.train.evaluate import (
    TreeShape,
    accepted_length,
    completion_rates,
    logical_lines,
    matched_drafts,
    physical_lines,
    tokenizes,
)
from kvcanary_tools.train.excerpts import complete_line_ends, top_level_starts
from spec_engine.models import load_draft, load_target
from spec_engine.models.embedded import EMBEDDED_MODEL, load_excerpts
from spec_engine.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def embedded():
    return load_target(EMBEDDED_MODEL), Tokenizer.from_folder(EMBEDDED_MODEL)


class PathKV:
    """A head's attention over exactly the rows it is given: history first, then one path of the tree."""

    def __init__(self) -> None:
        self.k, self.v = [], []

    def attend(self, layer, q, k, v):
        out = []
        for row in range(len(q)):
            self.k.append(k[row])
            self.v.append(v[row])
            group = q.shape[1] // k.shape[1]
            keys = torch.stack(self.k).repeat_interleave(group, 1)
            values = torch.stack(self.v).repeat_interleave(group, 1)
            scores = torch.einsum("hd,khd->hk", q[row], keys) / math.sqrt(q.shape[2])
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
        return torch.stack(out)


@torch.no_grad()
def matched_by_hand(target, head, sequence, first: int, shape: TreeShape) -> int:
    """One tree, grown node by node with a copied cache for every node, then walked along the true sequence."""
    length = first
    output = target(sequence[:length], torch.arange(length), CausalKV(1, length), head.tap_layers)
    kv = PathKV()
    hidden = head(sequence[1 : length + 1], head.features(output), torch.arange(length), kv)[-1:]
    frontier = [(1.0, (), hidden, kv)]
    candidates = []
    for step in range(shape.num_steps):
        children = []
        for score, path, state, cache in frontier:
            best = head.logits(state).softmax(-1)[0].topk(shape.topk)
            for prob, draft_id in zip(best.values.tolist(), best.indices, strict=True):
                token = int(head.to_target_ids(draft_id[None])[0])
                children.append((score * prob, (*path, token), state, cache))
        candidates += [(score, path) for score, path, _, _ in children]
        children.sort(key=lambda child: -child[0])
        frontier = []
        for score, path, state, cache in children[: shape.topk]:
            copied = PathKV()
            copied.k, copied.v = list(cache.k), list(cache.v)
            state = head(torch.tensor([path[-1]]), state, torch.tensor([first + step]), copied)
            frontier.append((score, path, state, copied))
    candidates.sort(key=lambda candidate: -candidate[0])
    kept = {path for _, path in candidates[: shape.num_nodes - 1]}
    accepted = 0
    while tuple(sequence[first + 1 : first + 2 + accepted].tolist()) in kept:
        accepted += 1
    return accepted


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("shape", [TreeShape(1, 4, 5), TreeShape(3, 3, 9)], ids=["chain", "tree"])
def test_matched_drafts_equal_a_tree_grown_by_hand(embedded, kind: str, shape: TreeShape) -> None:
    """The vectorised trees accept exactly what trees grown node by node accept."""
    target, tokenizer = embedded
    head = load_draft(EMBEDDED_MODEL / kind, target)
    prompt = torch.tensor(tokenizer.encode(load_excerpts()[0].prompt)[:60])
    sequence = torch.cat((prompt, continue_greedily(target, [prompt], 16, torch.float32)[0]))
    matched = matched_drafts(target, head, sequence, 60, 6, shape).tolist()
    assert matched == [matched_by_hand(target, head, sequence, first, shape) for first in range(60, 66)]
    assert max(matched) > 0


def test_a_batch_continues_as_each_prompt_alone(embedded) -> None:
    """Prompts of different lengths in one batch get the continuation they get alone."""
    target, tokenizer = embedded
    prompts = [
        torch.tensor(tokenizer.encode(excerpt.prompt)[-n:])
        for excerpt, n in zip(load_excerpts(), (7, 20), strict=False)
    ]
    together = continue_greedily(target, prompts, 5, torch.float32)
    alone = torch.cat([continue_greedily(target, [prompt], 5, torch.float32) for prompt in prompts])
    assert together.equal(alone)


@pytest.mark.slow
def test_the_recorded_accepted_length_is_reproduced(embedded) -> None:
    """EAGLE-3 with topk 4, 5 steps and 16 nodes emits at least three tokens per verify forward, more than the chain."""
    target, tokenizer = embedded
    head = load_draft(EMBEDDED_MODEL / "eagle3", target)
    prompts = [torch.tensor(tokenizer.encode(excerpt.prompt)) for excerpt in load_excerpts()[:8]]
    tree = accepted_length(target, head, prompts, 64, TreeShape(4, 5, 16), torch.float32)
    chain = accepted_length(target, head, prompts, 64, TreeShape(1, 5, 6), torch.float32)
    assert tree >= 3.0
    assert tree > chain


@pytest.mark.parametrize(
    ("code", "good"),
    [
        ("def f():\n    return 1\n", True),
        ("x = (1,\n", False),
        ("x = '''open\n", False),
        ("if x:\n        a\n    b\n", False),
        ("x = $\n", False),
        ("", True),
    ],
)
def test_tokenizes(code: str, good: bool) -> None:
    """Open brackets, open strings, wrong dedents and stray characters fail; complete code passes."""
    assert tokenizes(code) is good


def test_two_readings_of_whole_lines() -> None:
    """A bracket still open at the end is cut by the logical reading and fails the physical one."""
    prompt, completion = "def f():\n    a = 1\n", "    b = 2\n    c = (3,\n         4"
    code = prompt + completion
    assert physical_lines(code, len(prompt)) == prompt + "    b = 2\n    c = (3,\n"
    assert logical_lines(code, len(prompt)) == prompt + "    b = 2\n"
    rates = completion_rates([prompt], [completion])
    assert (rates["physical_lines"], rates["logical_lines"], rates["with_a_complete_logical_line"]) == (0, 1, 1)


def test_excerpts_are_cut_where_lines_are_complete() -> None:
    """Top-level definitions are found with their decorators, and lines inside brackets or strings end nothing."""
    code = "import x\n\n@deco\ndef f(a,\n      b):\n    '''doc\n    '''\n    return a\n"
    assert [code[start:][:5] for start in top_level_starts(code)] == ["@deco", "def f"][:1]
    ends = complete_line_ends(code)
    assert [code[:end].splitlines()[-1].strip() for end in ends] == ["import x", "@deco", "b):", "'''", "return a"]
