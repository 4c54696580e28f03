"""Scales of quantised K and V, which lie beside them: as extras of a pool they are bytes like all others.

No engine is needed: a small pool of 8-bit rows and a scale a head is written, damaged and read under a canary of its
own, with the settings of the one that the target has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcanary.faults.fault import Fault
from kvcanary.faults.helpers.replays import own_canary
from kvcanary.faults.strike import UNDECLARED
from kvcanary.faults.target import Target

if TYPE_CHECKING:
    from torch import Tensor

    from kvcanary.manager.manager import CanaryManager

NAME, READER = "quantised", "reader"
LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 2, 4, 4, 2, 8
PROMPT_LEN = 9


class Quantised(NamedTuple):
    """By layer, keys and values [slots, heads, dim] int8 and their scales [slots, heads] float32."""

    k: list[Tensor]
    v: list[Tensor]
    k_scale: list[Tensor]
    v_scale: list[Tensor]


def _quantised() -> Quantised:
    import torch

    def rows(*shape: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(PAGES * PAGE_SIZE, HEADS, *shape, dtype=dtype) for _ in range(LAYERS)]

    keys, values = (rows(DIM, dtype=torch.int8) for _ in range(2))
    return Quantised(keys, values, rows(dtype=torch.float32), rows(dtype=torch.float32))


Damage = Callable[[Quantised, int, int], None]  # of a layer and slot
Put = Callable[[int, Sequence["Tensor"]], None]  # of a layer, what it stores


def _damage_between_two_reads(target: Target, damage: Damage, unwritten: bool = False) -> None:
    """A prompt is written, one of its rows is damaged, and the next step reads it.

    unwritten: it is the one that the next step writes first: nothing is due
    """
    from kvcanary.pools.views import PoolView

    pool = _quantised()
    extras = {"k_scale": pool.k_scale, "v_scale": pool.v_scale}
    with own_canary(target, PoolView(NAME, pool.k, pool.v, PAGE_SIZE, extras=extras)) as canary:
        canary.arm()
        canary.admit(READER, list(range(PROMPT_LEN)))
        canary.on_alloc(READER, list(range(1, PAGES)))
        _step(target, canary, pool, 0, PROMPT_LEN)
        layer, position = target.rng.randrange(LAYERS), PROMPT_LEN if unwritten else target.rng.randrange(PROMPT_LEN)
        slot = PAGE_SIZE + position
        damage(pool, layer, slot)
        if unwritten:
            target.record(code="")
        else:
            target.record(UNDECLARED, pool=NAME, slot=slot, position=position, layer=layer, reader=READER)
        canary.append(READER, [1])
        _step(target, canary, pool, PROMPT_LEN, PROMPT_LEN + 1)


def _store_a_scale(target: Target, scale: float, code: str | None = None) -> None:
    """A prompt is written, and one of its scales in one layer is this number."""
    from kvcanary.pools.views import PoolView

    pool = _quantised()
    extras = {"k_scale": pool.k_scale, "v_scale": pool.v_scale}
    layer, position = target.rng.randrange(LAYERS), target.rng.randrange(PROMPT_LEN)
    part, head = 2 + target.rng.randrange(2), target.rng.randrange(HEADS)

    def put(number: int, stored: Sequence[Tensor]) -> None:
        if number == layer:
            stored[part][position, head] = scale

    with own_canary(target, PoolView(NAME, pool.k, pool.v, PAGE_SIZE, extras=extras)) as canary:
        canary.arm()
        canary.admit(READER, list(range(PROMPT_LEN)))
        canary.on_alloc(READER, list(range(1, PAGES)))
        place: dict[str, Any] = {"pool": NAME, "slot": PAGE_SIZE + position, "position": position, "layer": layer}
        target.record(READER, code, **({} if code == "" else place))
        _step(target, canary, pool, 0, PROMPT_LEN, put)


def _step(
    target: Target, canary: CanaryManager, pool: Quantised, start: int, end: int, put: Put = lambda number, stored: None
) -> None:
    """One forward that writes positions [start, end), and reads all before it; `put` may change what a layer stores."""
    import torch

    from kvcanary.pools.plans import (
        ReadPlan,
        WritePlan,
    )

    canary.begin_step(canary.step + 1)
    slots, positions = PAGE_SIZE + torch.arange(end), torch.arange(start, end)
    tokens = torch.tensor([*range(PROMPT_LEN), 1])[start:end]
    substep = canary.forward("prefill" if not start else "decode", 0, NAME)
    read = ReadPlan(torch.tensor([0, end]), slots, (READER,), 1, torch.tensor([start]), end - start)
    substep.open(read, WritePlan(slots[start:], tokens, positions))
    for number in range(LAYERS):
        stored = [_noise(target, part[number][start:end]) for part in pool]
        put(number, stored)
        for part, values in zip(pool, stored, strict=True):
            part[number][slots[start:]] = values
        substep.store(number, *stored)
    substep.close()
    canary.collect(canary.end_step())
    canary.commit(READER, end)


def _noise(target: Target, like: Tensor) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(target.rng.randrange(1 << 30))
    return torch.randint(1, 100, like.shape, generator=generator).to(like.dtype)


def _reset(pool: Quantised, layer: int, slot: int) -> None:
    pool.k_scale[layer][slot] = 1.5
    pool.v_scale[layer][slot] = 1.5


def _of_the_next_slot(pool: Quantised, layer: int, slot: int) -> None:
    for scales in (pool.k_scale, pool.v_scale):
        scales[layer][slot] = scales[layer][slot - 1].clone()


def _rotate(pool: Quantised, layer: int, slot: int) -> None:
    pool.k[layer][slot] = pool.k[layer][slot].roll(1, -1).neg()


def _fault(name: str, bugs: tuple[str, ...], story: str, damage: Damage, cause: str = "") -> Fault:
    return Fault(
        f"scales.{name}",
        story,
        expected="R9",
        bugs=bugs,
        applies_to="any engine: the pool is the fault's own",
        strike=partial(_damage_between_two_reads, damage=damage),
        quiet=partial(_damage_between_two_reads, damage=damage, unwritten=True),
        cause=cause,
    )


FAULTS = (
    _fault(
        "reset",
        ("vllm-project/vllm#51091", "vllm-project/vllm#50702", "vllm-project/vllm#50749"),
        "Layers that share a cache made their views of its scales when they first ran, in the middle of a batch, and "
        "filled them with 1: scales that had just been written were gone. It looked random, and tied to the prefix "
        "cache.",
        _reset,
    ),
    _fault(
        "by_shape",
        ("vllm-project/vllm#49716",),
        "Scales were addressed by the shape of a pool whose pages are padded, not by its strides: they landed in other "
        "blocks. It took hundreds of production requests to prove the fix.",
        _of_the_next_slot,
    ),
    _fault(
        "rotated_as_they_are",
        ("ggml-org/llama.cpp#5652",),
        "A context shift rotated keys in place. Quantised keys were rotated as they are, and came out as garbage.",
        _rotate,
        cause="bits",
    ),
    Fault(
        "scales.not_finite",
        "The scale of a token overflowed in one layer. NaN spread to all layers behind it and to all steps after, and "
        "nobody could tell which phase and layer had written the first.",
        expected="N1",
        bugs=("vllm-project/vllm#44211", "vllm-project/vllm#43880"),
        applies_to="any engine: the pool is the fault's own",
        strike=partial(_store_a_scale, scale=float("inf")),
        quiet=partial(_store_a_scale, scale=3.4e38, code=""),
        cause="numerics",
        within=1,
    ),
)
