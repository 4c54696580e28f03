"""Cached entries that are found under a name which is not the whole of what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.branches import page_of_another
from kvcanary.faults.helpers.harmless import hit_and_give_back, lengthen_plans
from kvcanary.faults.helpers.reach import redirect_row, strike_forward
from kvcanary.faults.target import Setup, Target


def _whoever_was_first(root: tuple[str, str], tree: Any, tokens: Sequence[int]) -> tuple[str, str]:
    """The tenant under whom pages of these tokens were cached first, as a key that has the tokens alone finds them."""
    tenants = [(salt, adapter) for salt, adapter, *_ in tree._root.children]
    return next((tenant for tenant in tenants if tree.match(tokens, *tenant).pages), root)


def _whatever_is_behind(tokens: Sequence[int], tree: Any, root: tuple[str, str]) -> Sequence[int]:
    """The tokens that find one page more, whose own tokens are theirs, and the one behind it is another."""
    match = tree.match(tokens, *root)
    end = match.num_tokens + tree.page_size
    page = tuple(tokens[match.num_tokens : end])
    known = page if match.pages else (*root, *page)
    others = [key[-1] for key in match.node.children if key[:-1] == known]
    return [*tokens[:end], others[0]] if others and end < len(tokens) else tokens


def _cascade_over_what_is_not_common(target: Target) -> None:
    """The first pages of one request are taken for the common prefix of all."""
    strike_forward(target, lambda call: redirect_row(call, 1, 0), requests=2)


def _shares(setup: Setup) -> bool:
    return setup.prefix_cache and setup.model == "random" and setup.page_size <= 12 and setup.prompt_len >= 24


FAULTS = (
    Fault(
        name="identity.weak_key",
        bugs=(
            "vllm-project/vllm#44701",
            "vllm-project/vllm#54342",
            "vllm-project/vllm#51748",
            "vllm-project/vllm#49377",
            "vllm-project/vllm#49449",
            "vllm-project/vllm#52806",
            "vllm-project/vllm#49125",
        ),
        story="A cache's key left out what else makes equal tokens mean other K and V, the adapter or the salt; or it "
        "stayed when the tokens were cut. The canary is told of adapter and salt; a difference that nobody tells it, "
        "such as the image or the version of the weights, is none to it.",
        expected="R5",
        also=("R6",),
        applies_to="a prefix cache, and prompts that two tenants have in common",
        needs={"shared": 12, "salts": 3, "batch": 4, "chunk": 512, "new_tokens": 20},
        applies=_shares,
        perturb=_whoever_was_first,
        quiet_needs={"salts": 1},
    ),
    Fault(
        name="identity.plain_key",
        bugs=("sgl-project/sglang#10846", "sgl-project/sglang#11231"),
        story="A draft's entry depends on the token behind its own, and the cache's key did not have it: where prompts "
        "part right behind a shared prefix the last entry was another prompt's. Acceptance was lower with the cache "
        "than without.",
        expected="R5",
        also=("R6", "W6", "PageOwnerError"),
        applies_to="drafts with a prefix cache, prompts that part at the end of a page",
        needs={"shared": 12, "batch": 4, "chunk": 512, "new_tokens": 20},
        applies=lambda setup: setup.drafts and _shares(setup) and 12 % setup.page_size == 0,
        perturb=_whatever_is_behind,
        quiet_needs={"shared": 0},
    ),
    Fault(
        name="identity.page_of_another_prompt",
        story="A hit in the prefix cache gave one page of another prompt: the list of its pages was built from two "
        "entries of the table.",
        expected="R5",
        also=("R4", "R6"),
        applies_to="a prefix cache with several prompts",
        needs={"shared": 12, "batch": 4, "chunk": 512, "new_tokens": 20},
        applies=_shares,
        perturb=page_of_another,
        quiet=hit_and_give_back,
    ),
    Fault(
        name="identity.common_prefix",
        bugs=("vllm-project/vllm#55227",),
        story="What all requests have in common was found by comparing reference counts with the number of requests. "
        "Blocks of requests that had ended, and were still in flight, counted too: eight different prompts seemed to "
        "share sixteen blocks.",
        expected="R8",
        applies_to="two requests of different prompts",
        applies=lambda setup: setup.batch > 1 and not setup.shared,
        strike=_cascade_over_what_is_not_common,
        quiet=lengthen_plans,
    ),
)
