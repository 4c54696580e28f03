"""Landings: loads of known bytes, compared and written by launches that are the same every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcanary.records import landings
from kvcanary.records.fingerprints import fingerprints_of_slots
from kvcanary.records.landings import KEPT, LEAST_ROOM, Landing, Landings
from kvcanary_kernels.record.layout import COLUMNS
from kvcanary_tools.bench.gpu.handover import Shape, Side, flip

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = Shape(layers=5, kv_heads=2, head_dim=16, page_size=4, tokens=88)


class Away(Side):
    """A prompt that was put away in another pool, and comes back here."""

    def __init__(self, device: str) -> None:
        there = Side(SHAPE, torch.device(device), 1)
        there.fill()
        self.sent, self.seal_of_it = there.rows.clone(), there.seal()
        super().__init__(SHAPE, torch.device(device), 1 + SHAPE.pages)

    def load(self, is_prepared: bool = True, is_wrong: bool = False) -> list[torch.Tensor]:
        """What the canary knows of its entries then."""
        name = self.admit()
        if is_prepared:
            self.prepare(name, self.seal_of_it)
        self.rows.copy_(self.sent)
        if is_wrong:
            flip(self)
        self.compare(name, self.seal_of_it)
        self.canary.check()
        (pool,) = self.canary.session.state.pools
        first = self.pages[0] * SHAPE.page_size
        slots = slice(first, first + SHAPE.tokens)
        known = pool.records[slots].clone(), pool.expected[slots].clone(), pool.content_a[:, slots].clone()
        self.leave(name)
        return list(known)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_prepared", [False, True])
@torch.inference_mode()
def test_every_load_is_read_whether_launched_or_replayed(device, is_prepared):
    """Launches run, are captured, and are replayed; wrong bytes are found in each of these loads, and no others."""
    for wrong in range(6):
        away = Away(device)
        for number in range(6):
            away.load(is_prepared, number == wrong)
            due = [("T1", 9, (3,))] if number >= wrong else []
            assert [(found.code, found.position, found.layers) for found in away.canary.findings] == due


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_what_is_known_after_a_load_is_the_same_in_any_room(device, monkeypatch):
    """In one that is too large, where the device is launched or replayed, and in one of its own."""
    other = Away(device)
    monkeypatch.setattr(landings, "MOST_ROOM", 0)
    others = [other.load() for _ in range(4)]
    monkeypatch.setattr(landings, "MOST_ROOM", 128)
    if device == "cpu":
        monkeypatch.setattr(Landings, "take", lambda self, pool, n, user: Landing(pool, 128))
    away = Away(device)
    loads = [away.load() for _ in range(4)]
    for one, same in zip(loads, others, strict=True):
        assert all(map(torch.equal, one, same))
        assert all(part.any() for part in one)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("room", [SHAPE.tokens, 100])
@torch.inference_mode()
def test_a_landing_with_room_to_spare_compares_what_is_in_it_alone(device, room):
    """The last slot comes again behind the others: right bytes are right, and one word that is not is seen."""
    away = Away(device)
    (pool,) = away.canary.session.state.pools
    slots = torch.arange(away.pages[0] * SHAPE.page_size, (away.pages[-1] + 1) * SHAPE.page_size)
    away.rows.copy_(away.sent)
    sent, _ = fingerprints_of_slots(pool, slots.to(pool.records.device))
    landing = Landing(pool, room)
    for word in (0, 1, 0):
        away.rows[4, -1, 1, 1, 2:4].view(torch.int32).bitwise_xor_(word)
        landing.fill(slots.numpy(), np.zeros((len(slots), COLUMNS), np.int64), sent.cpu().numpy())
        landing.read()
        assert landing.is_right() is (word == 0)
        away.rows[4, -1, 1, 1, 2:4].view(torch.int32).bitwise_xor_(word)
    before = pool.content_a.clone(), pool.records.clone()
    landing.write()
    others = torch.ones(pool.view.num_slots, dtype=torch.bool).index_fill_(0, slots, False).to(pool.records.device)
    assert torch.equal(pool.content_a[:, others], before[0][:, others])
    assert torch.equal(pool.records[others], before[1][others])
    assert torch.equal(pool.content_a[:, ~others].cpu(), sent.cpu())


@pytest.mark.gpu
@torch.inference_mode()
def test_landings_are_used_again_once_their_load_is_over():
    """As many as are kept; a further load that is under way has one of its own; one that never ends gives it back."""
    away = Away("cuda")
    (pool,) = away.canary.session.state.pools
    kept, users = Landings(pool.records.device), [Away.__new__(Away) for _ in range(KEPT + 1)]
    taken = [kept.take(pool, 70, user) for user in users]
    assert len({id(landing) for landing in taken}) == KEPT + 1
    assert [landing.where.numel() for landing in taken] == [128] * KEPT + [70]
    del users[0]
    again = kept.take(pool, 100, away)
    assert again is taken[0]
    assert kept.take(pool, 1, away).where.numel() == LEAST_ROOM
