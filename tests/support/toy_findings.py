"""Toy engines under test: the findings that stop a call, places and bits of entries, plans that are changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcanary import Finding, KVCorruptionError
from kvcanary_tools.bench.toy.engine import ToyEngine


def found(run: Callable[..., object], *arguments: object) -> list[Finding]:
    """The findings with which a call is stopped."""
    with pytest.raises(KVCorruptionError) as caught:
        run(*arguments)
    return list(caught.value.findings)


def places(findings: list[Finding]) -> list[tuple[str, int, int | None]]:
    return [(finding.code, finding.slot, finding.position) for finding in findings]


def slot_of(engine: ToyEngine, name: str, position: int) -> int:
    return int(engine.rows[name].slots[position])


def bits(engine: ToyEngine, layer: int, slot: int, part: str = "K", pool: str = "target") -> Tensor:
    """The bits of one row, [heads * head_dim] int32 in the pool's memory."""
    return engine.pools[pool].kv[layer, slot, "KV".index(part)].view(torch.int32).flatten()


def with_entry(tensor: Tensor, place: int, value: int) -> Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


def on(kind: str, change: Callable[..., object], pool: str | None = None) -> Callable[..., object]:
    """A hook of the toy engine that changes plans of this kind alone."""
    return lambda k, index, p, plan: change(plan) if k == kind and pool in (None, p) else plan
