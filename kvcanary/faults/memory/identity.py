"""Cached entries that are found under a name which is not the whole of what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.branches import page_of_another
from kvcanary.faults.helpers.harmless import hit_and_give_back, lengthen_plans
from kvcanary.faults.helpers.reach import redirect_row, strike_forward
from kvcanary.faults.helpers.unsaid import (
    Told,
    admit_as,
    behind,
    hit_behind_new_weights,
    image,
    replace_weights,
)
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


def _unsaid(name: str, story: str, told: Told, harmless: Told, **fields: Any) -> Fault:
    """A cached prompt comes again, and what `admit` is told of it is not in the key that finds it."""
    return Fault(
        name=f"identity.{name}",
        story=story,
        applies_to="a prefix cache, and prompts that have a beginning in common",
        needs=_HITS,
        applies=_shares,
        strike=lambda target: admit_as(target, told, is_harmless=False),
        quiet=lambda target: admit_as(target, harmless, is_harmless=True),
        spares_tokens=True,
        within=4,
        **fields,
    )


#: Of a Setup in which prompts are found in the prefix cache, with room for one more.
_HITS = {"shared": 12, "batch": 4, "chunk": 512, "new_tokens": 20}


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
    Fault(
        name="identity.weights_replaced",
        story="Weights were replaced while requests ran; nobody said that their rows may be a mix of both, and they "
        "went on over what the ones before had computed.",
        expected="R5",
        also=("R6",),
        applies_to="running requests",
        strike=lambda target: replace_weights(target, keeps=False),
        quiet=lambda target: replace_weights(target, keeps=True),
        spares_tokens=True,
    ),
    Fault(
        name="identity.weights_behind_a_cache",
        bugs=("InternLM/lmdeploy#4917", "vllm-project/vllm-omni#6739"),
        story="Weights were replaced, and the reset of the prefix cache did nothing, or came too early: a later prompt "
        "with a known beginning joined K and V of the old weights with decoding by the new ones.",
        expected="R5",
        also=("R6",),
        applies_to="a prefix cache, and prompts that have a beginning in common",
        needs=_HITS,
        applies=_shares,
        strike=lambda target: hit_behind_new_weights(target, is_back=False),
        quiet=lambda target: hit_behind_new_weights(target, is_back=True),
        spares_tokens=True,
        within=4,
    ),
    _unsaid(
        "adapter_of_a_request",
        "An adapter was chosen by request, and what is cached was looked for by tokens alone.",
        lambda cached, count: {"adapter": "law"},
        lambda cached, count: {},
        bugs=("ggml-org/llama.cpp#26207",),
        expected="R5",
        also=("R6",),
    ),
    _unsaid(
        "other_image",
        "All images are the same placeholder ids, and keys were made of ids: a question about one was answered from "
        "another's K and V.",
        image("dog", 0.5),
        behind("dog"),
        bugs=("LMCache/LMCache#4086", "NVIDIA/TensorRT-LLM#13815", "LMCache/LMCache#4183", "ROCm/ATOM#1358"),
        expected="R6",
        also=("R5",),
    ),
    _unsaid(
        "image_at_the_beginning",
        "The image comes first, and nothing of what is cached is the prompt's.",
        image("dog", 0.0),
        behind("dog"),
        expected="R6",
        also=("R5",),
    ),
    _unsaid(
        "prompt_embeddings",
        "A prompt was given as embeddings, and its rows of ids were all the same to the cache.",
        lambda cached, count: {"spans": [(n, n + 1, f"row {n}") for n in range(cached // 2, count)]},
        behind("row"),
        expected="R6",
        also=("R5",),
    ),
)
