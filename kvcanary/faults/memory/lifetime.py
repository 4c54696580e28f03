"""Pages that are freed too early, twice, or by the wrong name, and are read, written or cached all the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from kvcanary.faults.fault import Fault, everywhere
from kvcanary.faults.helpers.freeing import (
    free_a_page_that_is_read,
    free_by_an_old_key,
    free_slots_for_pages,
    free_the_halves_of_a_page,
    grant_a_page_that_is_read,
    save_an_old_list,
)
from kvcanary.faults.helpers.harmless import (
    come_and_go,
    edit_behind_the_end,
    hit_and_give_back,
    lengthen_plans,
    noise_in_a_free_page,
    recycle_as_it_is,
    remove_the_child_first,
    work_on_a_current_page,
)
from kvcanary.faults.helpers.holding import (
    cache_a_freed_page,
    evict_a_locked_page,
    hit_a_row_that_was_reused,
    remove_the_parent_first,
    write_what_is_published,
)
from kvcanary.faults.helpers.landing import (
    end_during_a_transfer,
    land_in_a_freed_page,
    land_in_a_granted_page,
    rewrite_a_row,
    write_after_the_end,
)
from kvcanary.faults.helpers.unsaid import clear_pools
from kvcanary.faults.target import Setup


def _twice(pages: Sequence[int]) -> Sequence[int]:
    return [*pages, *pages[-1:]]


def _one_that_is_taken(pages: list[int], *, taken: Collection[int]) -> list[int]:
    return [*pages[:-1], min(taken)] if taken and pages else pages


def _not_remapped(pages: list[int], *, own: Sequence[int]) -> list[int]:
    return list(own[: len(pages)])


def _has_whole_pages(setup: Setup) -> bool:
    return setup.page_size <= setup.prompt_len


def _fault(name: str, bugs: Sequence[str], story: str, **more: Any) -> Fault:
    return Fault(name=f"lifetime.{name}", bugs=tuple(bugs), story=story, **({"applies": _has_whole_pages} | more))


FAULTS = (
    _fault(
        "freed_while_read",
        ("sgl-project/sglang#24063", "vllm-project/vllm#42273", "vllm-project/vllm#42276"),
        "Slots of a prompt were freed when they had been copied to the host, or had left a window in the scheduler's "
        "books, although the request went on attending to them. One answer in twenty ended in loops of another "
        "prompt's text; the test that would have shown it had been off for six weeks.",
        expected="R7",
        applies_to="requests of a whole page and more that are not retracted before they read",
        applies=lambda setup: _has_whole_pages(setup) and setup.pages is None,
        strike=free_a_page_that_is_read,
        quiet=come_and_go,
    ),
    _fault(
        "freed_and_granted_while_read",
        ("vllm-project/vllm#47282", "vllm-project/vllm#47728"),
        "Blocks behind a window were freed by the tokens that were scheduled, not by those that were processed: a step "
        "in flight still read them when others were loaded there. Answers fell into mixed scripts.",
        expected="R12",
        also=("R7", "R8"),
        needs={"quarantine": 0},
        applies_to="requests of a whole page and more",
        strike=grant_a_page_that_is_read,
        quiet=come_and_go,
    ),
    _fault(
        "row_reused_while_read",
        ("sgl-project/sglang#18803",),
        "The row of a request that had ended was given to the next, and written on one stream, while the forward of "
        "the step before still read it on another.",
        expected="R8",
        applies_to="two requests of different prompts",
        applies=lambda setup: setup.batch > 1 and not setup.shared and setup.page_size <= setup.prompt_len,
        strike=rewrite_a_row,
        quiet=edit_behind_the_end,
        cause="identity",
    ),
    _fault(
        "locked_page_replaced",
        ("sgl-project/sglang#29352",),
        "To bring back a lost window the cache freed and replaced pages of a node, although a running request had "
        "locked it. A user suspected that answers leak between requests.",
        expected="PageReferenceError",
        applies_to="running requests that share cached pages",
        needs={"shared": 16, "batch": 4},
        applies=lambda setup: setup.prefix_cache and setup.page_size < 16 and setup.prompt_len >= 24,
        strike=evict_a_locked_page,
        quiet=hit_and_give_back,
    ),
    _fault(
        "duplicate_not_remapped",
        ("sgl-project/mini-sglang#142",),
        "Two requests computed one prefix, the cache kept the first one's pages and freed the other's, and the other's "
        "row still pointed at them.",
        expected="R7",
        applies_to="prefixes that two running requests compute at a time",
        needs={"shared": 16, "batch": 4},
        applies=lambda setup: setup.prefix_cache and setup.page_size < 16 and setup.prompt_len >= 24,
        perturb=_not_remapped,
        within=5,  # prompts that come meanwhile are prefilled first
        quiet=hit_and_give_back,
    ),
    _fault(
        "parent_removed_first",
        ("apache/tvm#17045",),
        "A sequence was forked twice and removed in the order of its birth: the pages that its children still read "
        "went with it.",
        expected="PageReferenceError",
        applies_to="requests of a whole page and more",
        strike=remove_the_parent_first,
        quiet=remove_the_child_first,
    ),
    _fault(
        "tree_keeps_freed_pages",
        (
            "sgl-project/sglang#38319",
            "sgl-project/sglang#38355",
            "NVIDIA/TensorRT-LLM#15018",
            "NVIDIA/TensorRT-LLM#12933",
        ),
        "Pages went into the prefix tree while their prompt was still prefilled. When the request was retracted they "
        "were freed, and the tree went on pointing at them: every request with that prefix began with an impossible "
        "token until somebody flushed the cache.",
        expected="PageStateError",
        applies_to="requests of a whole page and more",
        strike=cache_a_freed_page,
        quiet=hit_and_give_back,
    ),
    _fault(
        "tree_keeps_a_view",
        ("sgl-project/mini-sglang@94fe255",),
        "A prefix tree kept a view of a request's row and not a copy: when the row was given to the next request, the "
        "tree's slots changed with it.",
        expected="PageStateError",
        applies_to="requests of a whole page and more",
        strike=hit_a_row_that_was_reused,
        quiet=hit_and_give_back,
    ),
    _fault(
        "double_free",
        ("vllm-project/vllm#42571",),
        "A block that one request had used twice stood twice in a list, and was freed twice: the free list counted it "
        "as two.",
        expected="DoubleFreeError",
        applies=everywhere,
        perturb=_twice,
        quiet=come_and_go,
    ),
    _fault(
        "torn_free",
        ("sgl-project/sglang#38941", "sgl-project/sglang#38981"),
        "A request gave its tail back in two pieces, and the seam between them lay inside a page that is wider than "
        "the pieces knew: both freed it. Every scheduler died within a minute.",
        expected="PageStateError",
        applies=everywhere,
        strike=free_the_halves_of_a_page,
        quiet=partial(come_and_go, pages=2),
    ),
    _fault(
        "slots_for_pages",
        (),
        "Evicted tokens were given back by their slots, and taken for the pages of these numbers.",
        expected="LifetimeError",
        k="K54",
        also=("PageStateError", "PageOwnerError"),
        applies_to="pages of several slots",
        applies=lambda setup: setup.page_size > 1,
        strike=free_slots_for_pages,
        quiet=come_and_go,
    ),
    _fault(
        "freed_by_an_old_key",
        (
            "sgl-project/sglang#27586",
            "sgl-project/sglang#27789",
            "sgl-project/sglang#25805",
            "sgl-project/sglang#36135",
            "sgl-project/sglang#36081",
        ),
        "A page was freed through a translation that its last holder had left behind, or that had changed between the "
        "plan and the flush: somebody else's page went, and the books came out one page short after a long run.",
        expected="O1",
        applies_to="requests of a whole page and more",
        strike=free_by_an_old_key,
        quiet=work_on_a_current_page,
    ),
    _fault(
        "old_list_saved",
        ("NVIDIA/TensorRT-LLM#16448",),
        "A connector's block list only ever grew. A rewind over a block's edge gave the block back, and the connector "
        "waited for it for ever.",
        expected="O1",
        applies_to="everything, once a page was freed",
        applies=everywhere,
        needs={"pages": None},
        strike=save_an_old_list,
        quiet=work_on_a_current_page,
    ),
    _fault(
        "two_owners",
        ("sgl-project/sglang#27731", "sgl-project/sglang#28754"),
        "A session's committed length ran past what it had allocated, and the next allocation gave a page that was "
        "taken: free and held pages still added up, so that no sum could see it.",
        expected="PageAliasError",
        applies=everywhere,
        perturb=_one_that_is_taken,
        quiet=come_and_go,
    ),
    _fault(
        "written_after_publishing",
        ("sgl-project/sglang#35270", "sgl-project/sglang#35470", "sgl-project/sglang#35781"),
        "A block that every step of a diffusion model rewrites was put into the prefix cache, where two nodes came to "
        "own its pages: the server died when it fell idle.",
        expected="W3",
        applies_to="requests of a whole page and more",
        applies=lambda setup: setup.prefix_cache and setup.page_size <= setup.prompt_len,
        strike=write_what_is_published,
        quiet=lengthen_plans,
    ),
    _fault(
        "written_after_the_end",
        ("LMCache/LMCache#1858",),
        "Pages were given back by a thread that did not hold the lock of those who take them, while a write to them "
        "was still under way.",
        expected="W7",
        applies_to="two requests and more",
        applies=lambda setup: setup.batch > 1,
        strike=write_after_the_end,
        quiet=lengthen_plans,
    ),
    _fault(
        "ended_during_a_transfer",
        (
            "sgl-project/sglang#35049",
            "sgl-project/sglang#24527",
            "sgl-project/sglang#24580",
            "sgl-project/sglang#32564",
        ),
        "An abort gave a request's pages back at once, and did not stop the remote write into them: the next owner got "
        "a slightly wrong answer. The first reviewer thought that nobody could ever use those bytes.",
        expected="O1",
        applies_to="two requests and more",
        applies=lambda setup: setup.batch > 1,
        strike=end_during_a_transfer,
        quiet=work_on_a_current_page,
    ),
    _fault(
        "landed_in_a_free_page",
        ("kvcache-ai/Mooncake#778", "kvcache-ai/Mooncake#850", "kvcache-ai/Mooncake#4239"),
        "An object's lease ended in the middle of a slow copy, and its memory was used for something else; one path of "
        "several never looked at the lease.",
        expected="P1",
        needs={"quarantine": 0},
        applies_to="pools with pages that nobody has had",
        applies=lambda setup: setup.pages is None,
        strike=land_in_a_freed_page,
        quiet=recycle_as_it_is,
    ),
    _fault(
        "landed_in_a_granted_page",
        ("vllm-project/vllm#46951", "LMCache/LMCache#207"),
        "A copy that was planned for a block's former owner landed after the block had another, who had written there "
        "and read it back as his own.",
        expected="R9",
        applies_to="requests of a whole page and more",
        strike=land_in_a_granted_page,
        quiet=noise_in_a_free_page,
        cause="bits",
    ),
    _fault(
        "pool_cleared_under_its_rows",
        ("vllm-project/vllm-omni#6442",),
        "An engine slept: the bytes of its pools went, and the scheduler kept its requests and the hashes of its "
        "blocks. After the wake-up the memory was there again, and rows went on over zeros.",
        expected="R12",
        applies_to="running requests",
        strike=lambda target: clear_pools(target, keeps_bytes=False),
        quiet=lambda target: clear_pools(target, keeps_bytes=True),
    ),
)
