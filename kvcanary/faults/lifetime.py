"""Pages that are freed too early, twice, or by the wrong name, and are read, written or cached all the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcanary.faults.fault import UNDECLARED, Fault, everywhere
from kvcanary.faults.harmless import (
    come_and_go,
    edit_behind_the_end,
    hit_and_give_back,
    lengthen_plans,
    noise_in_a_free_page,
    recycle_as_it_is,
)
from kvcanary.faults.reach import any_layer, any_reader, change, is_private, redirect, root_forward, written_of
from kvcanary.faults.recycling import grant_again, recycle, wait_out
from kvcanary.faults.target import Call, Running, Setup, Target

if TYPE_CHECKING:
    from torch import Tensor

NOISE_BITS = 22  # of each word that changes: what lies there stays finite
CHILD = "child"


def _twice(pages: Sequence[int]) -> Sequence[int]:
    return [*pages, *pages[-1:]]


def _one_that_is_taken(pages: list[int], *, taken: Collection[int]) -> list[int]:
    return [*pages[:-1], min(taken)] if taken and pages else pages


def _not_remapped(pages: list[int], *, own: Sequence[int]) -> list[int]:
    return list(own[: len(pages)])


def _free_a_page_that_is_read(target: Target) -> bool:
    """A page of a running row is given back, and the row still points at it."""
    reader, page, position = _whole_page(target)
    if reader is None:
        return False
    slot = int(reader.slots[position])
    target.record(reader=reader.request_id, pool="target", position=position, slot=slot)
    target.canary.on_free(reader.request_id, [page])
    return True


def _grant_a_page_that_is_read(target: Target) -> bool:
    """The same, and another request has it by the time at which it is read."""
    reader, page, position = _whole_page(target)
    if reader is None:
        return False
    slot = int(reader.slots[position])
    target.record(reader=reader.request_id, pool="target", position=position, slot=slot)
    canary = target.canary
    canary.on_free(reader.request_id, [page])
    wait_out(target)
    canary.admit(CHILD, [1, 2, 3])
    canary.on_alloc(CHILD, [page])
    return True


def _whole_page(target: Target) -> tuple[Running | None, int, int]:
    """A private page of final entries: its reader, its number, its first position."""
    size, owner_of = target.setup.page_size, target.canary._ledger.owner_of
    for reader in target.running():
        whole = range(reader.committed_len // size)
        own = [place for place in whole if owner_of(int(reader.slots[place * size]) // size) == reader.request_id]
        if own:
            place = target.rng.choice(own)
            return reader, int(reader.slots[place * size]) // size, place * size
    return None, 0, 0


def _rewrite_a_row(target: Target) -> bool:
    """The row of a running request is given to another one, and filled, while a forward still reads it."""
    running = sorted(target.running(), key=lambda one: one.committed_len)
    if len(running) < 2:
        return False
    reader, other = running[0], running[-1]
    size, owner_of = target.setup.page_size, target.canary._ledger.owner_of
    length = reader.committed_len // size * size
    differs = [p for p in range(length) if int(reader.slots[p]) != int(other.slots[p])]
    if not differs or owner_of(int(other.slots[differs[0]]) // size) is None:
        return False
    reader.slots[:length] = other.slots[:length].clone()
    first = differs[0]
    target.record(other.request_id, reader=reader.request_id, position=first, slot=int(reader.slots[first]))
    return True


def _evict_a_locked_page(target: Target) -> bool:
    """A cache replaces a page that a running request holds too."""
    published = target.canary._ledger.pages.published
    for reader in target.running():
        held = [page for page in reader.pages if published[page]]
        if held:
            target.record()
            target.canary.on_evict([target.rng.choice(held)])
            return True
    return False


def _remove_the_parent_first(target: Target) -> bool:
    """A row is forked, and its pages go with the first of the two that ends."""
    reader = any_reader(target)
    whole = 0 if reader is None else reader.committed_len // target.setup.page_size
    if reader is None or not whole:
        return False
    canary, pages = target.canary, list(reader.pages[:whole])
    canary.admit(CHILD, canary._ledger.request(reader.request_id).tokens)
    canary.on_fork(reader.request_id, CHILD, pages)
    target.record()
    canary.on_evict(pages[-1:])
    return True


def _remove_the_child_first(target: Target) -> bool:
    """A row is forked, and the one that was forked from it ends first: its pages are the other's again."""
    reader = any_reader(target)
    whole = 0 if reader is None else reader.committed_len // target.setup.page_size
    if reader is None or not whole or not all(is_private(target, page) for page in reader.pages[:whole]):
        return False
    canary, pages = target.canary, list(reader.pages[:whole])
    target.record(code="")
    canary.admit(CHILD, canary._ledger.request(reader.request_id).tokens)
    canary.on_fork(reader.request_id, CHILD, pages)
    canary.on_free(CHILD, pages)
    return True


def _work_on_a_current_page(target: Target) -> bool:
    """A copy is planned for the grant that its page has, and has come to its end before anybody goes on."""
    reader = any_reader(target)
    if reader is None:
        return False
    page, tickets = target.rng.choice(reader.pages), target.canary.tickets
    target.record(code="")
    tickets.complete(tickets.issue("save", "connector", reads={page: int(target.canary._ledger.generations[page])}))
    return True


def _cache_a_freed_page(target: Target) -> bool:
    """A prefix tree takes, or keeps, a page that was given back; the next request of this prefix would hit it."""
    reader, page, _ = _whole_page(target)
    if reader is None:
        return False
    tokens = target.canary._ledger.request(reader.request_id).tokens
    target.canary.on_free(reader.request_id, [page])
    target.record()
    target.canary.admit(CHILD, tokens)
    target.canary.on_acquire(CHILD, [page])
    return True


def _hit_a_row_that_was_reused(target: Target) -> bool:
    """A tree keeps a view of a row, and the row names the pages of another request by now: these are what it gives."""
    reader, page, _ = _whole_page(target)
    if reader is None:
        return False
    target.record(request=CHILD)
    target.canary.admit(CHILD, [1, 2, 3])
    target.canary.on_acquire(CHILD, [page])
    return True


def _free_the_halves_of_a_page(target: Target) -> bool:
    """A row comes back in two pieces, whose seam lies inside a page: both name it."""
    reader = any_reader(target)
    if reader is None:
        return False
    pages = [page for page in reader.pages if target.canary._ledger.owner_of(page) == reader.request_id]
    if len(pages) < 2:
        return False
    target.record(request=f"page {pages[-2]}")
    target.canary.on_free(reader.request_id, pages[-2:])
    target.canary.on_free(reader.request_id, pages[-2:-1])
    return True


def _free_slots_for_pages(target: Target) -> bool:
    """Slots of tokens are given back where numbers of pages belong."""
    size = target.setup.page_size
    for reader in target.running():
        slots = [slot for slot in reader.slots[: reader.committed_len].tolist() if slot not in reader.pages]
        if slots and size > 1:
            slot = target.rng.choice(slots)
            target.record(request=str(slot))
            target.canary.on_free(reader.request_id, [slot])
            return True
    return False


def _free_by_an_old_key(target: Target) -> bool:
    """A free was planned by a key, and comes when the key stands for a page that somebody else was granted."""
    reader, page, _ = _whole_page(target)
    if reader is None:
        return False
    generation = int(target.canary._ledger.generations[page])
    target.record(pool="target", slot=page * target.setup.page_size)
    target.canary.tickets.issue("deferred free", "main", writes={page: generation - 1})
    return True


def _save_an_old_list(target: Target) -> bool:
    """A connector saves the blocks of a list that only grows, after a rewind has given the last of them back."""
    free = [page for page in target.free_pages() if target.canary._ledger.generations[page]]
    if not free:
        return False
    page = target.rng.choice(free)
    generation = int(target.canary._ledger.generations[page])
    target.record(pool="target", slot=page * target.setup.page_size)
    target.canary.tickets.issue("save", "connector", reads={page: generation - 1})
    return True


def _write_what_is_published(target: Target) -> bool:
    """A block is cached that is still to be written."""

    size = target.setup.page_size

    def write(call: Call, reader: Running) -> bool:
        if call.pool != "target" or reader.request_id not in call.read.requests:
            return False
        slot = reader.pages[0] * size + target.rng.randrange(size)
        redirect(call, written_of(call, call.read.requests.index(reader.request_id)).start, slot)
        target.record(pool="target", slot=slot)
        return True

    for reader in target.running():
        if target.canary._ledger.request(reader.request_id).final_pages:
            target.canary.on_share(reader.request_id, list(reader.pages[:1]))
            target.before(root_forward(target), partial(write, reader=reader))
            return True
    return False


def _write_after_the_end(target: Target) -> bool:
    """A forward still writes for a request whose pages went back."""
    running = list(target.running())
    if len(running) < 2:
        return False
    gone, size = target.rng.choice(running), target.setup.page_size
    unfinished = gone.pages[gone.committed_len // size :]  # a cache takes the whole ones
    own = [page for page in unfinished if target.canary._ledger.owner_of(page) == gone.request_id]
    if not own:
        return False
    target.cancel(gone.request_id)

    def write(call: Call) -> bool:
        if call.pool != "target":
            return False
        slot = own[-1] * size
        redirect(call, target.rng.randrange(len(call.write.slots)), slot)
        target.record(pool="target", slot=slot)
        return True

    target.before(root_forward(target), write)
    return True


def _end_during_a_transfer(target: Target) -> bool:
    """A request is aborted while bytes are still on their way into its pages."""
    running = list(target.running())
    gone = target.rng.choice(running) if len(running) > 1 else None
    if gone is None or target.canary._ledger.owner_of(gone.pages[-1]) != gone.request_id:
        return False
    target.canary.tickets.issue("remote write", "network", writes=[gone.pages[-1]])
    target.record(pool="target", slot=gone.pages[-1] * target.setup.page_size)
    target.cancel(gone.request_id)
    return True


def _land_in_a_freed_page(target: Target) -> bool:
    """The write of a transfer lands after its pages went back, before they are granted again."""
    canary, view = target.canary, target.pools["target"]
    pages = target.free_pages()
    if not pages or canary._ledger.generations[pages[-1]]:
        return False
    page = pages[-1]
    recycle(target, page)
    layer, slot = any_layer(target, view), page * view.page_size + target.rng.randrange(view.page_size)
    change(view, layer, slot, partial(_noise, target))
    target.record(pool="target", slot=slot)
    grant_again(target, page)
    return True


def _noise(target: Target, words: Tensor) -> Tensor:
    for place in range(len(words)):
        words[place] ^= target.rng.randrange(1, 1 << NOISE_BITS)
    return words


def _land_in_a_granted_page(target: Target) -> bool:
    """It lands after another request has written there."""
    reader, _, position = _whole_page(target)
    if reader is None:
        return False
    view = target.pools["target"]
    layer, slot = any_layer(target, view), int(reader.slots[position])
    change(view, layer, slot, partial(_noise, target))
    target.record(UNDECLARED, pool="target", slot=slot, position=position, layer=layer)
    return True


def _has_whole_pages(setup: Setup) -> bool:
    return setup.page_size <= setup.prompt_len


def _fault(name: str, k: str, bugs: Sequence[str], story: str, **more: Any) -> Fault:
    return Fault(name=f"lifetime.{name}", k=k, bugs=tuple(bugs), story=story, **({"applies": _has_whole_pages} | more))


FAULTS = (
    _fault(
        "freed_while_read",
        "K25",
        ("sgl-project/sglang#24063", "vllm-project/vllm#42273", "vllm-project/vllm#42276"),
        "Slots of a prompt were freed when they had been copied to the host, or had left a window in the scheduler's "
        "books, although the request went on attending to them. One answer in twenty ended in loops of another "
        "prompt's text; the test that would have shown it had been off for six weeks.",
        expected="R7",
        applies_to="requests of a whole page and more that are not retracted before they read",
        applies=lambda setup: _has_whole_pages(setup) and setup.pages is None,
        strike=_free_a_page_that_is_read,
        quiet=come_and_go,
    ),
    _fault(
        "freed_and_granted_while_read",
        "K25",
        ("vllm-project/vllm#47282", "vllm-project/vllm#47728"),
        "Blocks behind a window were freed by the tokens that were scheduled, not by those that were processed: a step "
        "in flight still read them when others were loaded there. Answers fell into mixed scripts.",
        expected="R12",
        also=("R7", "R8"),
        needs={"quarantine": 0},
        applies_to="requests of a whole page and more",
        strike=_grant_a_page_that_is_read,
        quiet=come_and_go,
    ),
    _fault(
        "row_reused_while_read",
        "K25",
        ("sgl-project/sglang#18803",),
        "The row of a request that had ended was given to the next, and written on one stream, while the forward of "
        "the step before still read it on another.",
        expected="R8",
        applies_to="two requests of different prompts",
        applies=lambda setup: setup.batch > 1 and not setup.shared and setup.page_size <= setup.prompt_len,
        strike=_rewrite_a_row,
        quiet=edit_behind_the_end,
        cause="identity",
    ),
    _fault(
        "locked_page_replaced",
        "K25",
        ("sgl-project/sglang#29352",),
        "To bring back a lost window the cache freed and replaced pages of a node, although a running request had "
        "locked it. A user suspected that answers leak between requests.",
        expected="PageReferenceError",
        applies_to="running requests that share cached pages",
        needs={"shared": 16, "batch": 4},
        applies=lambda setup: setup.prefix_cache and setup.page_size < 16 and setup.prompt_len >= 24,
        strike=_evict_a_locked_page,
        quiet=hit_and_give_back,
    ),
    _fault(
        "duplicate_not_remapped",
        "K25",
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
        "K24",
        ("apache/tvm#17045",),
        "A sequence was forked twice and removed in the order of its birth: the pages that its children still read "
        "went with it.",
        expected="PageReferenceError",
        applies_to="requests of a whole page and more",
        strike=_remove_the_parent_first,
        quiet=_remove_the_child_first,
    ),
    _fault(
        "tree_keeps_freed_pages",
        "K26",
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
        strike=_cache_a_freed_page,
        quiet=hit_and_give_back,
    ),
    _fault(
        "tree_keeps_a_view",
        "K55",
        ("sgl-project/mini-sglang@94fe255",),
        "A prefix tree kept a view of a request's row and not a copy: when the row was given to the next request, the "
        "tree's slots changed with it.",
        expected="PageStateError",
        applies_to="requests of a whole page and more",
        strike=_hit_a_row_that_was_reused,
        quiet=hit_and_give_back,
    ),
    _fault(
        "double_free",
        "K27",
        ("vllm-project/vllm#42571",),
        "A block that one request had used twice stood twice in a list, and was freed twice: the free list counted it "
        "as two.",
        expected="DoubleFreeError",
        applies_to="everything",
        applies=everywhere,
        perturb=_twice,
        quiet=come_and_go,
    ),
    _fault(
        "torn_free",
        "K27",
        ("sgl-project/sglang#38941", "sgl-project/sglang#38981"),
        "A request gave its tail back in two pieces, and the seam between them lay inside a page that is wider than "
        "the pieces knew: both freed it. Every scheduler died within a minute.",
        expected="PageStateError",
        applies_to="everything",
        applies=everywhere,
        strike=_free_the_halves_of_a_page,
        quiet=partial(come_and_go, pages=2),
    ),
    _fault(
        "slots_for_pages",
        "K54",
        (),
        "Evicted tokens were given back by their slots, and taken for the pages of these numbers.",
        expected="LifetimeError",
        also=("PageStateError", "PageOwnerError"),
        applies_to="pages of several slots",
        applies=lambda setup: setup.page_size > 1,
        strike=_free_slots_for_pages,
        quiet=come_and_go,
    ),
    _fault(
        "freed_by_an_old_key",
        "K28",
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
        strike=_free_by_an_old_key,
        quiet=_work_on_a_current_page,
    ),
    _fault(
        "old_list_saved",
        "K23",
        ("NVIDIA/TensorRT-LLM#16448",),
        "A connector's block list only ever grew. A rewind over a block's edge gave the block back, and the connector "
        "waited for it for ever.",
        expected="O1",
        applies_to="everything, once a page was freed",
        applies=everywhere,
        needs={"pages": None},
        strike=_save_an_old_list,
        quiet=_work_on_a_current_page,
    ),
    _fault(
        "two_owners",
        "K15",
        ("sgl-project/sglang#27731", "sgl-project/sglang#28754"),
        "A session's committed length ran past what it had allocated, and the next allocation gave a page that was "
        "taken: free and held pages still added up, so that no sum could see it.",
        expected="PageAliasError",
        applies_to="everything",
        applies=everywhere,
        perturb=_one_that_is_taken,
        quiet=come_and_go,
    ),
    _fault(
        "written_after_publishing",
        "K29",
        ("sgl-project/sglang#35270", "sgl-project/sglang#35470", "sgl-project/sglang#35781"),
        "A block that every step of a diffusion model rewrites was put into the prefix cache, where two nodes came to "
        "own its pages: the server died when it fell idle.",
        expected="W3",
        applies_to="requests of a whole page and more",
        applies=lambda setup: setup.prefix_cache and setup.page_size <= setup.prompt_len,
        strike=_write_what_is_published,
        quiet=lengthen_plans,
    ),
    _fault(
        "written_after_the_end",
        "K30",
        ("LMCache/LMCache#1858",),
        "Pages were given back by a thread that did not hold the lock of those who take them, while a write to them "
        "was still under way.",
        expected="W7",
        applies_to="two requests and more",
        applies=lambda setup: setup.batch > 1,
        strike=_write_after_the_end,
        quiet=lengthen_plans,
    ),
    _fault(
        "ended_during_a_transfer",
        "K30",
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
        strike=_end_during_a_transfer,
        quiet=_work_on_a_current_page,
    ),
    _fault(
        "landed_in_a_free_page",
        "K30",
        ("kvcache-ai/Mooncake#778", "kvcache-ai/Mooncake#850", "kvcache-ai/Mooncake#4239"),
        "An object's lease ended in the middle of a slow copy, and its memory was used for something else; one path of "
        "several never looked at the lease.",
        expected="P1",
        needs={"quarantine": 0},
        applies_to="pools with pages that nobody has had",
        applies=lambda setup: setup.pages is None,
        strike=_land_in_a_freed_page,
        quiet=recycle_as_it_is,
    ),
    _fault(
        "landed_in_a_granted_page",
        "K30",
        ("vllm-project/vllm#46951", "LMCache/LMCache#207"),
        "A copy that was planned for a block's former owner landed after the block had another, who had written there "
        "and read it back as his own.",
        expected="R9",
        applies_to="requests of a whole page and more",
        strike=_land_in_a_granted_page,
        quiet=noise_in_a_free_page,
        cause="bits",
    ),
)
