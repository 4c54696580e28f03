"""What the trained weights can do: held-out loss, completions that tokenize, accepted length of trees and chains.

Greedy acceptance needs no serving engine: the output is the target's greedy continuation, so the tree drafted
at every position of it can be compared with what follows, and the walk adds up what a serving loop would accept.
"""

from __future__ import annotations

import io
import tokenize
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcanary_tools.train.dense import CausalKV, continue_greedily
from kvcanary_tools.train.excerpts import complete_line_ends
from spec_engine.models.decoder import Decoder
from spec_engine.models.eagle import Eagle
from spec_engine.models.eagle3 import Eagle3


@dataclass(frozen=True)
class TreeShape:
    topk: int
    num_steps: int
    num_nodes: int


TREE, CHAIN = TreeShape(4, 5, 16), TreeShape(1, 5, 6)


def tokenizes(code: str) -> bool:
    """Whether Python's tokenizer reads the code to its end without an error."""
    try:
        kinds = {token.exact_type for token in tokenize.generate_tokens(io.StringIO(code).readline)}
    except (tokenize.TokenError, SyntaxError):
        return False
    return kinds.isdisjoint((tokenize.ERRORTOKEN, tokenize.OP))  # OP: a sign of no operator, since Python 3.12


def physical_lines(code: str, prompt_len: int) -> str:
    """The code cut at its last line break."""
    return code[: max(prompt_len, code.rfind("\n") + 1)]


def logical_lines(code: str, prompt_len: int) -> str:
    """The code cut after its last complete statement line: what token 64 left open is cut, not failed."""
    ends = [end for end in complete_line_ends(code) if end >= prompt_len]
    return code[: ends[-1]] if ends else code[:prompt_len]


def completion_rates(prompts: list[str], completions: list[str]) -> dict[str, Any]:
    """How many of prompt + completion tokenize when cut to whole lines, under both readings of a whole line."""
    rates: dict[str, Any] = {"prompts": len(prompts)}
    for name, cut in (("physical_lines", physical_lines), ("logical_lines", logical_lines)):
        codes = [cut(prompt + completion, len(prompt)) for prompt, completion in zip(prompts, completions, strict=True)]
        rates[name] = sum(tokenizes(code) for code in codes)
        if name == "logical_lines":
            grown = sum(len(code) > len(prompt) for code, prompt in zip(codes, prompts, strict=True))
            rates["with_a_complete_logical_line"] = grown
    return rates


@torch.no_grad()
def accepted_length(
    target: Decoder, head: Eagle | Eagle3, prompts: list[Tensor], num_new: int, shape: TreeShape, dtype: torch.dtype
) -> float:
    """Tokens emitted / verify forwards over all prompts, greedy, bonus included, prefill excluded."""
    continuation = continue_greedily(target, prompts, num_new + shape.num_steps + 2, dtype)
    emitted = verifies = 0
    for prompt, new in zip(prompts, continuation, strict=True):
        sequence = torch.cat((prompt.to(new.device), new))
        matched = matched_drafts(target, head, sequence, len(prompt), num_new, shape).tolist()
        done = 0  # the first new token comes from the prefill
        while done < num_new - 1:
            step = min(matched[done] + 1, num_new - 1 - done)
            done += step
            emitted += step
            verifies += 1
    return emitted / verifies


@torch.no_grad()
def matched_drafts(
    target: Decoder, head: Eagle | Eagle3, sequence: Tensor, first: int, count: int, shape: TreeShape
) -> Tensor:
    """For each bonus token at first, first + 1, ...: how many drafts of its tree the target accepts, [count]."""
    topk, device = shape.topk, sequence.device
    length = first + count - 1
    positions = torch.arange(length, device=device)
    output = target(sequence[:length], positions, CausalKV(1, length), head.tap_layers)
    kv = TreeKV(first - 1, count)
    # Row p reads token p+1 and the features of position p; the row of the bonus opens the tree.
    hidden = head(sequence[1 : length + 1], head.features(output), positions, kv)[first - 1 :]
    base = torch.arange(first, first + count, device=device)
    score, ids = _best(head, hidden, topk)  # [count, topk]
    hidden = hidden[:, None].expand(-1, topk, -1)
    matched = ids == sequence[base + 1][:, None]
    scores, hits = [score], [matched]
    paths = torch.arange(topk, device=device).expand(count, topk)[..., None]  # indices into the tree's rows
    for step in range(1, shape.num_steps):
        kv.step(paths)
        place = (base + step - 1)[:, None].expand(-1, topk)
        hidden = head(ids.flatten(), hidden.flatten(0, 1), place.flatten(), kv)
        child_score, child_ids = _best(head, hidden, topk)  # [count * topk, topk]
        child_score = score[..., None] * child_score.unflatten(0, (count, topk))
        child_ids = child_ids.unflatten(0, (count, topk))
        child_hit = matched[..., None] & (child_ids == sequence[base + 1 + step][:, None, None])
        scores.append(child_score.flatten(1))
        hits.append(child_hit.flatten(1))
        score, kept = child_score.flatten(1).topk(topk)
        ids, matched = child_ids.flatten(1).gather(1, kept), child_hit.flatten(1).gather(1, kept)
        parent = kept // topk
        hidden = hidden.unflatten(0, (count, topk)).gather(1, parent[..., None].expand(-1, -1, hidden.shape[-1]))
        older = paths.gather(1, parent[..., None].expand(-1, -1, paths.shape[-1]))
        own = torch.arange(topk, device=device).expand(count, topk)[..., None] + step * topk
        paths = torch.cat((older, own), -1)
    selected = torch.zeros_like(torch.cat(scores, 1), dtype=torch.bool)
    selected.scatter_(1, torch.cat(scores, 1).topk(min(shape.num_nodes - 1, selected.shape[1])).indices, True)
    per_step = [
        (part & hit).any(1) for part, hit in zip(selected.split([s.shape[1] for s in scores], 1), hits, strict=True)
    ]
    return torch.stack(per_step, 1).int().cumprod(1).sum(1)


class TreeKV:
    """The draft's view of one sequence with a tree hung on each of its positions; a node sees exactly its ancestors."""

    def __init__(self, first_row: int, count: int) -> None:
        self.first_row, self.count = first_row, count
        self.paths: Tensor | None = None

    def step(self, paths: Tensor) -> None:
        """The rows of the tree [count, topk, depth] that each node of the next forward attends, its own last."""
        self.paths = paths

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scale = q.shape[-1] ** -0.5
        if self.paths is None:
            self.base_k, self.base_v = k, v
            future = torch.ones(len(k), len(k), dtype=torch.bool, device=q.device).triu(1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * scale
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, v)
        count, topk, depth = self.paths.shape
        k, v = k.unflatten(0, (count, topk)), v.unflatten(0, (count, topk))
        self.tree_k = k if depth == 1 else torch.cat((self.tree_k, k), 1)
        self.tree_v = v if depth == 1 else torch.cat((self.tree_v, v), 1)
        q = q.unflatten(0, (count, topk))
        rows = torch.arange(len(self.base_k), device=q.device)
        last = torch.arange(self.first_row, self.first_row + count, device=q.device)
        hidden_rows = (rows > last[:, None])[:, None, None]
        base = torch.einsum("ckhd,rhd->ckhr", q, self.base_k) * scale
        base = base.masked_fill(hidden_rows, float("-inf"))
        which = torch.arange(count, device=q.device)[:, None, None]
        own_k, own_v = self.tree_k[which, self.paths], self.tree_v[which, self.paths]  # [count, topk, depth, heads, d]
        own = torch.einsum("ckhd,ckthd->ckht", q, own_k) * scale
        weights = torch.cat((base, own), -1).softmax(-1)
        out = torch.einsum("ckhr,rhd->ckhd", weights[..., : len(rows)], self.base_v)
        out = out + torch.einsum("ckht,ckthd->ckhd", weights[..., len(rows) :], own_v)
        return out.flatten(0, 1)


def _best(head: Eagle | Eagle3, hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    probs, ids = head.logits(hidden).float().softmax(-1).topk(topk)
    return probs, head.to_target_ids(ids)
