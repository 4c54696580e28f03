"""vLLM's recurrent states, without vLLM: blocks of positions, and what its forwards take, copy and leave in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcanary import CanaryConfig
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import RING
from kvcanary.adapters.vllm.states import BlockStates, group_of, is_state, not_followed
from kvcanary.errors import PlanError
from tests.support.watching_canary import found_in, watching_canary

BLOCKS, LAYERS, SIZE = 12, 2, 8
GENERATOR = torch.Generator().manual_seed(2)


def spec(mode: str = "align", **others: Any) -> SimpleNamespace:
    """As vLLM's MambaSpec."""
    own = {"block_size": SIZE, "mamba_cache_mode": mode, "num_speculative_blocks": 0}
    own |= {"num_prefill_checkpoint_blocks": 0}
    return SimpleNamespace(**own | others)


def layers(device: str = "cpu") -> list[Any]:
    """Each with a window and a matrix a block, in one tensor that has more room a block."""
    made = []
    for _ in range(LAYERS):
        whole = torch.randn(BLOCKS, 256, generator=GENERATOR).to(device)
        made.append(SimpleNamespace(kv_cache=(whole[:, :48].view(-1, 3, 16), whole[:, 64:192].view(-1, 2, 8, 8))))
    return made


class Host:
    """Two rows whose table has two columns; `forward` runs them to so many tokens each."""

    def __init__(self, own: Any = None) -> None:
        own = spec() if own is None else own
        self.canary, self.layers = watching_canary("full"), layers()
        group = group_of(self.canary, 0, 0, own, self.layers, SIZE)
        self.states, self.is_aligned = BlockStates([group], [SIZE]), own.mamba_cache_mode == "align"
        self.table = torch.tensor([[1, 3, 0], [2, 4, 0]], dtype=torch.int32)
        self.states.given([("a", [[1, 3]], 0), ("b", [[2, 4]], 0)])
        self.copies = True

    def forward(self, *ends: int, chains: tuple[int, int] = (100, 200), between: int = 0) -> list[tuple[str, Any, int]]:
        """`between`: of row a, a block in which its state after SIZE tokens is left as well."""
        canary, truth, now = self.canary, self.canary.memory.truth, torch.tensor(ends, dtype=torch.int32)
        past, new = truth.ends.clone(), now - truth.ends
        canary.step += 1
        site = "prefill", 0
        canary.steps.append(SimpleNamespace(events=canary.events, number=canary.step, requests=["a", "b"], site=site))
        canary.events = []
        canary.launches.read(site, int(new.sum()))
        canary.launches.seeds[:, 0], canary.launches.seeds[:, 1] = torch.tensor(chains) + past, 1
        own = [chain + 1 + n for row, chain in enumerate(chains) for n in range(int(past[row]), ends[row])]
        canary.launches.chains[canary.step % RING, : len(own)] = torch.tensor(own)
        truth.ends[:], truth.tails[:, 0] = now, torch.tensor(chains) + now
        starts = torch.cat((torch.zeros(1), new.cumsum(0))).to(torch.int32)
        for row, (first, last) in enumerate(zip(past.tolist(), ends, strict=True)):
            source, entry = self.entry(row, first), self.entry(row, last)
            if first and source != entry and self.copies:
                self._each(entry, lambda part, at=entry, source=source: part[at].copy_(part[source]))
        made: Any = SimpleNamespace(lengths=now, starts=starts, num_tokens=int(new.sum()), numbers=np.array([0, 1]))
        self.states.taken(made, [self.table])
        for row, last in enumerate(ends):
            entry = self.entry(row, last)
            self._each(entry if entry < BLOCKS else 0, lambda part, at=entry: part[at].add_(1))
        self._each(between, lambda part: part[between].add_(3))
        self.states.left()
        return [(own.code, own.request_id, own.slot) for own in found_in(canary)]

    def entry(self, row: int, count: int) -> int:
        return int(self.table[row, max(count - 1, 0) // SIZE if self.is_aligned else 0])

    def _each(self, block: int, change: Any) -> None:
        for layer in self.layers if block else ():
            for part in layer.kv_cache:
                change(part)


@pytest.fixture
def host() -> Host:
    """Both rows stand before the end of their first block."""
    host = Host()
    assert host.forward(7, 6) == []
    return host


def test_states_move_into_the_next_block(host: Host) -> None:
    """Row a crosses from block 1 to 3, row b a step later; nothing is found, and all states are counted."""
    assert [host.forward(8 + n, 7 + n) for n in range(4)] == [[]] * 4
    assert host.canary.coverage.states_checked == 10


def test_a_copy_that_is_left_out_is_told(host: Host) -> None:
    """T1 of the block that the state should lie in."""
    assert host.forward(8, 7) == []
    host.copies = False
    assert host.forward(9, 8) == [("T1", "a", 3)]


def test_a_full_block_that_goes_on_in_place_is_told(host: Host) -> None:
    """W3: the prefix cache hands out what was left there."""
    assert host.forward(8, 7) == []
    host.table[0, 1] = 1
    assert host.forward(9, 8) == [("W3", "a", 1)]


def test_a_hit_takes_what_was_left_at_the_end_of_a_block(host: Host) -> None:
    """Silent where row b goes on from row a's prefix; R6 where its prompt is another, R4 where it is as long only."""
    assert host.forward(8, 6) == []
    host.table[1] = torch.tensor([1, 5, 0])
    host.canary.memory.truth.uids[1] = 13
    host.states.given([("c", [[1, 5]], SIZE)])
    host.canary.memory.truth.ends[1] = SIZE
    assert host.forward(9, 9, chains=(100, 100)) == []
    host.table[1, 1] = 6
    host.canary.memory.truth.ends[1] = SIZE
    assert host.forward(10, 9, chains=(100, 70)) == [("R6", "b", 6)]
    host.canary.memory.truth.ends[1] = SIZE - 1
    assert ("R4", "b", 6) in host.forward(11, 9, chains=(100, 100))


def test_a_state_of_nobody_and_a_null_block_are_told(host: Host) -> None:
    """R12 of a block that was given anew, W2 of the block that padding has."""
    host.states.given([("b", [[9]], None)])
    host.table[1, 0] = 9
    assert host.forward(8, 7) == [("R12", "b", 9)]
    host.table[1, 0] = 0
    assert host.forward(9, 8) == [("W2", "b", 0)]


def test_what_was_found_is_not_told_of_a_later_step_without_states(host: Host) -> None:
    """Cells of a step lie in a ring: a step that no state was taken in finds those of one long ago there."""
    host.table[1, 0] = 0
    assert host.forward(8, 7) == [("W2", "b", 0)]
    step = host.canary.steps[-1]
    host.canary.steps.append(SimpleNamespace(**vars(step) | {"number": step.number + RING, "events": []}))
    assert found_in(host.canary) == []


def test_a_table_that_names_no_block_is_told(host: Host) -> None:
    host.table[1, 0] = BLOCKS
    assert [code for code, *_ in host.forward(8, 7)] == ["W1"]


def test_what_a_kernel_leaves_within_a_prompt_can_be_hit() -> None:
    """Row a runs through two blocks at once and leaves its state after the first in block 1: a hit there is silent, of
    another prompt R6, and R9 where its bytes have changed since. Where the row has no block for it, nothing is left.
    """
    host = Host(spec(num_prefill_checkpoint_blocks=1))
    assert host.forward(11, 3, between=1) == []
    host.table[1] = torch.tensor([1, 5, 0])
    for chain, harm, found in ((100, 0, []), (70, 0, [("R6", "b", 5)]), (100, 2, [("T1", "b", 5)])):
        host.canary.memory.truth.ends[1] = SIZE
        for layer in host.layers:
            layer.kv_cache[1][1] += harm
        assert host.forward(int(host.canary.memory.truth.ends[0]) + 1, 10, chains=(100, chain)) == found


def test_a_block_within_a_prompt_that_the_pool_does_not_have_is_nobodys() -> None:
    """The column before the last names no block: what lies there is not looked at, the state itself is."""
    host = Host(spec(num_prefill_checkpoint_blocks=1))
    host.table[0, 0] = BLOCKS
    assert host.forward(11, 3) == []
    assert host.forward(12, 4) == []


def test_without_a_prefix_cache_a_request_has_one_block() -> None:
    """Mode none: column 0, however long the request is."""
    host = Host(spec("none"))
    assert [host.forward(7 + n, 6 + n) for n in range(0, 9, 3)] == [[]] * 3
    host.table[0, 0] = 2
    assert host.forward(20, 19) == [("R8", "a", 2)]


def test_a_block_that_was_given_back_is_told() -> None:
    """R7 of who goes on from it, as long as nobody is given it; who is begins there in silence, or R12 where a state
    should lie.
    """
    host = Host(spec("none"))
    host.forward(7, 6)
    host.states.freed([1])
    host.states.freed([5])
    host.states.given([])
    assert host.forward(8, 7) == [("R7", "a", 1)]
    host.states.freed([2])
    host.states.given([("b", [[2]], 0)])
    assert host.forward(9, 8) == [("R7", "a", 1), ("R12", "b", 2)]
    host.states.given([])
    assert host.forward(10, 9) == [("R7", "a", 1)]


@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_block_that_another_group_was_given_is_told(mode: str) -> None:
    """R7 of a row that goes on from a block of K and V; R12 where that is to be a state of its own group."""
    host = Host(spec(mode))
    host.states._block_sizes = [SIZE, SIZE]
    host.forward(7, 6)
    host.states.given([("b", ([], [1]), None)])
    assert host.forward(8, 7) == [("R7", "a", 1)]
    host.states.given([("b", ([1], []), None)])
    assert host.forward(8, 8) == [("R12", "a", 1)]


def test_a_prefix_that_was_given_back_can_be_hit(host: Host) -> None:
    """The prefix cache keeps it: whoever is given it next finds what was left there."""
    assert host.forward(8, 6) == []
    host.states.freed([1])
    host.states.given([])
    assert host.forward(9, 7) == []


def test_blocks_that_are_copied_bring_their_state(host: Host) -> None:
    """As for a hit in the middle of a block: from one block to another, of which the request goes on."""
    host._each(7, lambda part: part[7].copy_(part[1]))
    host.states.copied([(1, 7)])
    host.table[1, 0] = 7
    host.canary.memory.truth.ends[1] = 7
    assert host.forward(8, 8, chains=(100, 100)) == []


@pytest.mark.parametrize(
    ("own", "drafts", "connector", "why"),
    [
        (spec(num_speculative_blocks=2), False, False, "where a server drafts, only those of gated delta nets and"),
        (spec(), True, False, "where a server drafts, only those of gated delta nets and"),
        (spec("all"), False, False, "with --mamba-cache-mode all kernels leave"),
        (spec(), False, True, "a connector loads them"),
    ],
)
def test_states_that_are_not_watched_are_named(own: Any, drafts: bool, connector: bool, why: str) -> None:
    told = not_followed(own, drafts, connector)
    assert told is not None
    assert told.startswith("states of linear attention, of which a request has one for all its tokens: ")
    assert why in told


def test_what_is_watched_needs_no_word() -> None:
    """Groups whose specs differ by layer have their first layer's say; K and V are no state."""
    assert not_followed(spec(), False, False) is None
    assert is_state(SimpleNamespace(kv_cache_specs={"a": spec()}))
    assert not is_state(SimpleNamespace(block_size=16))


@pytest.mark.gpu
def test_states_are_judged_without_a_wait() -> None:
    """Torch raises where the host waits for the device; the second forward has nothing to compile."""
    canary, device = watching_canary("rolling", "cuda"), "cuda"
    states = BlockStates([group_of(canary, 0, 0, spec(), layers(device), SIZE)], [SIZE])
    table = torch.tensor([[1, 3], [2, 4]], dtype=torch.int32, device=device)
    states.given([("a", [[1, 3]], 0), ("b", [[2, 4]], 0)])
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    ends = [torch.tensor([7 + n, 5 + n], dtype=torch.int32, device=device) for n in range(4)]
    for number, lengths in enumerate(ends):
        canary.step += 1
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            states.given([("a", [[5 + number]], None)])
            canary.launches.read(("decode", 0), 2)
            made: Any = SimpleNamespace(lengths=lengths, starts=starts, numbers=np.array([0, 1]), num_tokens=2)
            states.taken(made, [table])
            states.left()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert canary.coverage.states_checked == 8


def test_states_of_half_words_are_refused_by_name() -> None:
    odd = [SimpleNamespace(kv_cache=(torch.zeros(4, 3, dtype=torch.int8),))]
    with pytest.raises(PlanError, match=r"states of linear attention.*whole 32-bit words"):
        group_of(watching_canary("full"), 0, 0, spec(), odd, SIZE)


def test_what_is_kept_of_states_has_a_size(host: Host) -> None:
    """Five numbers of a block, and one of each slice of each layer."""
    [group] = host.states.groups
    assert group.watched.num_bytes == 8 * BLOCKS * (5 + LAYERS * group.watched.view.num_slices)


def test_what_judges_beside_a_canary_counts_with_it() -> None:
    """A certificate's `bytes` are all that is kept."""

    class Judge:
        num_bytes = 40

    canary, judge = PagedCanary(CanaryConfig(mode="log", seed=3), 2, 1, 16, "cpu"), Judge()
    canary.beside.add(judge)
    assert canary.num_bytes == canary.memory.num_bytes + judge.num_bytes
