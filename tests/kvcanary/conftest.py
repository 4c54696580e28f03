"""What the canary's tests drive it with: pools of every layout, an engine without a model, and captured substeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fake_engine import FakeEngine
from fake_pool import LAYOUTS, FakePool, make_fake_pool, seal_pool
from kvcanary.records.state import PoolState
from kvcanary_kernels.record.layout import signed
from static_rig import StaticRig, StaticRow
from static_tree import TOKENS, StaticTree


@pytest.fixture
def make_engine() -> Iterator[Callable[..., FakeEngine]]:
    """FakeEngine by keyword settings; those of CanaryConfig pass through."""
    with torch.inference_mode():
        yield FakeEngine


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Each of LAYOUTS."""
    return request.param


@pytest.fixture(name="make_fake_pool")
def make_fake_pool_fixture() -> Callable[..., FakePool]:
    """:func:`make_fake_pool`, for tests."""
    return make_fake_pool


@pytest.fixture(name="seal_pool")
def seal_pool_fixture() -> Callable[[PoolState], None]:
    """:func:`seal_pool`, for tests."""
    return seal_pool


@pytest.fixture
def make_static() -> Callable[..., StaticRig]:
    """StaticRig by device."""
    return StaticRig


@pytest.fixture
def static_row() -> type[StaticRow]:
    return StaticRow


@pytest.fixture(params=["eager", "captured"])
def way(request: pytest.FixtureRequest) -> str:
    """Each way of a forward (`TwoWays`)."""
    return request.param


@pytest.fixture
def tree(make_static, static_row) -> StaticTree:
    made = StaticTree(make_static(), static_row)
    truth = made.launch(1, made.prefill, [4, 5, 6], TOKENS[:3])
    assert (truth.uids, truth.prefix_lens, truth.truths) == ([made.uid], [0], [signed(made.verify.pool.root)])
    return made
