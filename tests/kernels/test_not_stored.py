"""Take, where a store did not arrive: a slot that holds another token's bytes as before, or nothing but zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.record.layout import CHAIN
from kvcanary_kernels.watch import reread
from kvcanary_kernels.watch.advance import FILLED_STAMP
from kvcanary_kernels.watch.reread import ENTRIES_PER_LAYER, NOT_STORED
from kvcanary_kernels.watch.walk import NO_VIOLATION, NOT_FOLLOWED
from tests.support.watched_rows import BLOCK_SIZE, LAYERS, RING, Rig


@pytest.fixture(params=["", "_torch"], ids=["triton", "torch"])
def rig(request: pytest.FixtureRequest, device: str) -> Rig:
    return Rig(device, request.param, asks_stored=True)


def entry_of(rig: Rig, layer: int, row: int, position: int) -> Tensor:
    """[2, 3] its words of K and V."""
    block, offset = divmod(rig.slot(row, position), BLOCK_SIZE)
    return rig.kv[layer].view(torch.int32)[block, :, offset]


def first(rig: Rig) -> tuple[int, int] | None:
    """The layer and entry of the last forward in which nothing was stored, where one was told."""
    own = rig.firsts[rig.step % RING, NOT_STORED].item()
    return None if own == NO_VIOLATION else divmod(own, ENTRIES_PER_LAYER)


def begin_again(rig: Rig, row: int) -> None:
    """A new request has this row, and its slots."""
    rig.tokens[row] = []
    rig.truth.ends[row], rig.truth.known[row], rig.truth.tails[row, 0] = 0, 1, rig.truth.roots[row]


def test_a_slot_that_holds_another_tokens_bytes_was_not_stored(rig: Rig) -> None:
    """Entries 1 and 2 of another request come into the slots of the last; the third is stored, the others are not."""
    rig.forward({0: [5, 6, 7, 8], 1: [1, 2, 3]})
    assert first(rig) is None
    begin_again(rig, 0)
    for layer in range(LAYERS):
        entry_of(rig, layer, 0, 3)[:] += 1
    entry_of(rig, 1, 0, 1)[1, 2] += 1  # one word of V is another
    rig.forward({1: [4], 0: [5, 9, 9, 9]})
    assert first(rig) == (LAYERS - 1, 3)  # not the fed token 5, which was there before
    assert int(rig.total) == 1
    begin_again(rig, 0)
    entry_of(rig, 1, 0, 2)[:] += 1
    entry_of(rig, 1, 0, 1)[:] += 1
    rig.forward({0: [5, 1, 2]})
    assert first(rig) is None
    assert int(rig.total) == 1


def test_a_draft_that_was_rejected_is_written_over(rig: Rig) -> None:
    rig.forward({0: [5, 6, 7, 8]})
    rig.forward({0: [9, 9]}, accepted={0: 3})
    assert first(rig) == (LAYERS - 1, 0)
    assert int(rig.total) == 1


def test_nobody_knows_of_slots_whose_bytes_were_not_taken(rig: Rig) -> None:
    rig.forward({0: [5, 6, 7, 8]})
    rig.stamps[rig.slot(0, 3)] = 77  # of an entry before that
    rig.forward({0: [9]}, accepted={0: 3})
    assert first(rig) is None
    rig.stamps.zero_()
    rig.forward({0: [5]}, accepted={0: 3})
    assert first(rig) is None
    assert int(rig.total) == 0


def test_rows_that_nobody_follows_are_not_asked(rig: Rig) -> None:
    """Whatever their line says from an earlier step."""
    rig.forward({0: [5, 6], 1: [7, 8]})
    rig.truth.ends[1] = NOT_FOLLOWED
    rig.overwritten.is_another.fill_(-1)
    rig.forward({1: [5], 0: [7]})
    assert rig.overwritten.is_another[rig.step % RING, :2].tolist() == [0, 0]
    assert int(rig.total) == 0


def test_a_pattern_that_is_still_there_was_not_written_over(rig: Rig) -> None:
    """Whatever the token: the pattern is nobody's."""
    rig.forward({0: [5, 6, 7, 8]})
    rig.stamps[rig.slot(0, 3)] = FILLED_STAMP
    rig.forward({0: [8]}, accepted={0: 3})
    assert first(rig) == (0, 0)
    assert int(rig.total) == LAYERS


def test_the_first_layer_of_a_model_may_store_the_same_of_two_tokens(rig: Rig) -> None:
    """Whose embeddings are the same; of layers that go on from others' it says that nothing was stored."""
    rig.forward({0: [5, 6, 7, 8]})
    rig.forward({0: [9]}, accepted={0: 3})
    assert first(rig) == (1, 0)
    rig.before = rig.before._replace(first=0)
    rig.forward({0: [8]}, accepted={0: 3})
    assert first(rig) == (0, 0)
    assert int(rig.total) == 1 + LAYERS


def test_zeros_of_two_tokens_were_not_stored(rig: Rig) -> None:
    """One token may have an embedding of zeros, wherever it stands; the next that has zeros, too, is told."""
    for position in (0, 2, 3):
        for layer in range(LAYERS):
            entry_of(rig, layer, 0, position)[:] = 0
    rig.forward({0: [5, 6, 5]})
    assert first(rig) is None
    assert int(rig.total) == 0
    assert rig.before.zeros.tolist() == [0] + [6] * (LAYERS - 1)
    rig.forward({1: [5], 0: [9]})
    assert first(rig) == (LAYERS - 1, 1)
    assert int(rig.total) == 1
    rig.before = rig.before._replace(first=0)
    rig.forward({1: [5]})
    assert int(rig.total) == 1


def test_zeros_in_one_of_k_and_v_are_bytes(rig: Rig) -> None:
    entry_of(rig, 1, 0, 0)[0] = 0
    entry_of(rig, 1, 0, 1)[1] = 0
    rig.before = rig.before._replace(first=0)
    rig.forward({0: [5, 6]})
    assert int(rig.total) == 0
    assert not rig.before.zeros.any()


def test_another_pool_of_the_same_slots_has_a_bit_of_its_own(rig: Rig) -> None:
    """What is known of one pool's bytes says nothing of another's."""
    rig.forward({0: [5, 6]})
    rig.overwritten.stamps[0].copy_(rig.stamps)
    rig.stamps.zero_()
    rig.forward({0: [9]}, accepted={0: 1})
    assert first(rig) is None
    assert rig.overwritten.is_another[rig.step % RING, 0] == 1


def test_a_line_of_slots_may_stand_for_every_step(rig: Rig) -> None:
    """As late layers have it, of whose entries some are not kept: the question is in the line of this step."""
    rig.forward({0: [5, 6, 7, 8]})
    rig.asks_stored = False
    rig.forward({0: [9, 9]}, accepted={0: 3})
    rig.stamps[rig.slot(0, 3)] = rig.records[rig.slot(0, 3), CHAIN]
    place = rig.step % RING
    rig.overwritten.is_another.zero_()
    rig.overwritten.is_another[place, :2] = 2
    slots, chains = (line[place].expand(RING, -1) for line in (rig.slots, rig.chains))
    firsts, watched = rig.cells(2), rig.watched(rig.records, 1, 2)
    assert place
    rig.call(reread, "take", watched, rig.pool, slots, chains, rig.keys, fingerprints=rig.fingerprints,
             stamps=rig.stamps, firsts=firsts, before=rig.before)  # fmt: skip
    assert firsts[place, NOT_STORED] == (LAYERS - 1) * ENTRIES_PER_LAYER


def test_kernel_and_reference_agree_on_long_rows(device: str) -> None:
    """Rows of several tiles and blocks, in which many tokens come again; whatever lies in the outputs before."""
    told = []
    for suffix in ("", "_torch"):
        rig = Rig(device, suffix, asks_stored=True)
        rig.overwritten.is_another.fill_(-1)
        drawn = torch.Generator().manual_seed(7)
        for _ in range(3):
            batch = {row: torch.randint(0, 3, (15 + 9 * row,), generator=drawn).tolist() for row in range(4)}
            rig.forward(batch)
            told.append((rig.firsts.clone(), rig.overwritten.is_another[rig.step % RING, :100].clone(), int(rig.total)))
            for row in range(4):
                begin_again(rig, row)
    for own, other in zip(told[:3], told[3:], strict=True):
        assert torch.equal(own[0], other[0])
        assert torch.equal(own[1], other[1])
        assert own[2] == other[2]
    assert told[-1][2] > 100
