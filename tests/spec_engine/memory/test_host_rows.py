"""Rows of tokens go to the host and come back, from any slots to any places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_engine.memory.cache.host_rows import HostRows, slots_of
from spec_engine.memory.pools.pool import KVPool
from spec_engine.step.streams import Streams


def test_slots_of_pages_are_in_order():
    """Page p has slots [p * page_size, (p + 1) * page_size), whatever the order of the pages."""
    assert slots_of([3, 1], 2).tolist() == [6, 7, 2, 3]
    assert slots_of([], 4).tolist() == []


@given(st.permutations(range(12)), st.permutations(range(12)), st.permutations(range(12)), st.integers(0, 12))
def test_rows_come_back_whole(slots, places, back, count):
    """Every layer of every token, in runs or scattered; all other rows and slots stay as they were."""
    shape = {"num_layers": 2, "num_pages": 5, "page_size": 2, "kv_heads": 1, "head_dim": 2, "token_offset": 0}
    pool = KVPool("target", dtype=torch.float32, device=torch.device("cpu"), **shape)
    pool.kv.copy_(torch.arange(pool.kv.numel()).view(pool.kv.shape))
    before, host = pool.kv.clone(), HostRows(pool, 12)
    host.save(torch.tensor(slots[:count], dtype=torch.int64), torch.tensor(places[:count], dtype=torch.int64))
    assert set(host.parts[0].any(-1).flatten(1).any(1).nonzero().flatten().tolist()) == set(places[:count])
    host.load(torch.tensor(places[:count], dtype=torch.int64), torch.tensor(back[:count], dtype=torch.int64))
    for source, destination in zip(slots[:count], back[:count], strict=True):
        assert torch.equal(pool.kv[:, destination], before[:, source])
    others = sorted(set(range(12)) - set(back[:count]))
    assert torch.equal(pool.kv[:, others], before[:, others])


@pytest.mark.gpu
def test_rows_travel_on_a_cuda_side_stream():
    """Pages go to pinned memory behind the forwards, and come back elsewhere before the forwards read them."""
    device = torch.device("cuda")
    shape = {"num_layers": 4, "num_pages": 512, "page_size": 16, "kv_heads": 8, "head_dim": 64, "token_offset": 0}
    pool, streams = KVPool("target", dtype=torch.bfloat16, device=device, **shape), Streams(device)
    host = HostRows(pool, 256 * 16)
    source, target = slots_of(range(1, 257), 16), slots_of(range(257, 513), 16)
    places = torch.arange(256 * 16)
    streams.main.submit("forward", lambda: pool.kv.normal_())
    streams.behind_main("copies").submit("save", lambda: host.save(source, places))
    event = streams.behind_main("copies").submit("load", lambda: host.load(places, target))
    streams.main.wait(event)
    assert torch.equal(pool.kv[:, source.to(device)], pool.kv[:, target.to(device)])
    streams.synchronize()
    assert torch.equal(host.parts[0].to(device).transpose(0, 1), pool.kv[:, source.to(device)])
