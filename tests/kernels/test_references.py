"""Torch references of float operations against plain Python, and what each refuses, word for word."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcanary_kernels.engine.layers import add_norm_torch, gated_torch, norm_torch, rotate_torch
from kvcanary_kernels.engine.likeliest import likeliest_torch
from kvcanary_kernels.engine.product import product_torch
from kvcanary_kernels.engine.relay import leave_torch, take_torch
from kvcanary_kernels.engine.scatter import scatter_torch

POISON = -77.0


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def refused(call: Callable[..., object], *arguments: object, **named: object) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def close(found: Tensor, wanted: list[list[float]], rtol: float = 1e-12) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate(has_norm: bool) -> None:
    """Two query heads and one key head are normed, each kind by its weights, and turned; the value head stays."""
    qkv, cos, sin = numbers(2, 4, 6), numbers(2, 1, 6, seed=1), numbers(2, 1, 6, seed=2)
    norms = [numbers(6, seed=3), numbers(6, seed=4)]
    wanted = qkv.tolist()
    for n in range(2):
        for head in range(3):
            row = qkv[n, head].tolist()
            if has_norm:
                scale = 1 / math.sqrt(sum(x * x for x in row) / 6 + 0.5)
                row = [x * scale * w for x, w in zip(row, norms[head == 2].tolist(), strict=True)]
            turned = [row[(d + 3) % 6] for d in range(6)]
            wanted[n][head] = [row[d] * cos[n, 0, d].item() + turned[d] * sin[n, 0, d].item() for d in range(6)]
    named = {"q_norm": norms[0], "k_norm": norms[1], "num_q_heads": 2, "eps": 0.5} if has_norm else {}
    rotate_torch(qkv, cos, sin, num_heads=3, **named)
    torch.testing.assert_close(qkv, torch.tensor(wanted, dtype=torch.float64))


def test_rotate_computes_in_float32() -> None:
    """A sum that 16 bits would round twice is rounded once."""
    qkv = torch.tensor([[[1.0, 1.0]]], dtype=torch.bfloat16)
    rotate_torch(qkv, torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 2.0**-7), num_heads=1)
    assert qkv.flatten().tolist() == [1 + 2.0**-7] * 2
    exact = torch.tensor([[[1.0, 1.0]]], dtype=torch.bfloat16)
    rotate_torch(exact, torch.full((1, 1, 2), 1 + 2.0**-9), torch.full((1, 1, 2), 2.0**-8), num_heads=1)
    assert exact.flatten().tolist() == [1 + 2.0**-7] * 2


def test_rotate_refuses_other_shapes() -> None:
    """Even heads, dense; angles of one head a row."""
    wide, angles = torch.zeros(2, 3, 4), torch.zeros(2, 1, 4)
    rule = "qkv must be [n, >= {} heads, even dim] with dense heads, got {} at strides {}"
    for heads, qkv in ((4, wide), (0, wide), (1, torch.zeros(2, 3, 3)), (1, torch.zeros(2, 4, 3).transpose(1, 2))):
        words = rule.format(heads, list(qkv.shape), list(qkv.stride()))
        assert refused(rotate_torch, qkv, angles, angles, num_heads=heads) == words
    bad = [torch.zeros(2, 1, 2), torch.zeros(2, 1, 8)[:, :, ::2]]
    for angle in bad:
        words = f"must be [2, 1, 4] with dense rows, got {list(angle.shape)}"
        assert refused(rotate_torch, wide, angle, angles, num_heads=3) == f"cos {words}"
        assert refused(rotate_torch, wide, angles, angle, num_heads=3) == f"sin {words}"


def test_gated() -> None:
    """silu of the first half times the second."""
    gate_up, out = numbers(2, 6), torch.full((2, 3), POISON, dtype=torch.float64)
    gated_torch(gate_up, out)
    close(out, [[silu(row[i]) * row[i + 3] for i in range(3)] for row in gate_up.tolist()])
    words = "gate_up must be [2, 6] for out [2, 3], both of dense rows, got"
    assert refused(gated_torch, numbers(2, 8), out) == f"{words} [2, 8]"
    assert refused(gated_torch, numbers(2, 12)[:, ::2], out) == f"{words} [2, 6]"
    assert refused(gated_torch, gate_up, numbers(2, 6)[:, ::2]) == f"{words} [2, 6]"
    one = torch.full((2, 2), POISON, dtype=torch.float64)[:, :1]
    gated_torch(gate_up[:, :2], one)
    close(one, [[silu(row[0]) * row[1]] for row in gate_up.tolist()])


def test_gated_computes_in_float32() -> None:
    """Of 16-bit numbers silu is not rounded before it is multiplied."""
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    gated_torch(torch.tensor([[0.75, -0.5859375]], dtype=torch.bfloat16), out)
    assert out.item() == -0.298828125


def test_norms() -> None:
    """The sum is kept as it is rounded, and its norm is taken from that; without a delta the row's own."""
    hidden, delta, weight = numbers(2, 5), numbers(2, 5, seed=1), numbers(5, seed=2)
    total, normed, own = (torch.full((2, 5), POISON, dtype=torch.float64) for _ in range(3))
    add_norm_torch(hidden, delta, weight, 0.5, total=total, normed=normed)
    norm_torch(hidden, weight, 0.5, normed=own)

    def by_hand(rows: list[list[float]]) -> list[list[float]]:
        scales = [1 / math.sqrt(sum(x * x for x in row) / 5 + 0.5) for row in rows]
        return [
            [x * scale * w for x, w in zip(row, weight.tolist(), strict=True)]
            for row, scale in zip(rows, scales, strict=True)
        ]

    assert torch.equal(total, hidden + delta)
    close(normed, by_hand((hidden + delta).tolist()))
    close(own, by_hand(hidden.tolist()))


def test_norms_compute_in_float32() -> None:
    """Squares of 16-bit numbers beyond their range are no infinity."""
    x = torch.full((1, 4), 1000.0, dtype=torch.float16)
    normed = torch.empty_like(x)
    norm_torch(x, torch.ones(4), 0.0, normed=normed)
    assert normed.tolist() == [[1.0] * 4]


def test_norms_refuse_other_shapes() -> None:
    """Every row tensor is named, and the weight."""
    rows = {name: torch.zeros(2, 4) for name in ("hidden", "delta", "total", "normed")}
    for name in ("delta", "total", "normed"):
        for bad in (torch.zeros(2, 3), torch.zeros(2, 8)[:, ::2]):
            given = rows | {name: bad}
            words = refused(
                add_norm_torch, given["hidden"], given["delta"], torch.ones(4), 0.0,
                total=given["total"], normed=given["normed"],
            )  # fmt: skip
            assert words == f"{name} must be [2, 4] with dense rows, got {list(bad.shape)}"
    sparse = torch.zeros(2, 8)[:, ::2]
    assert refused(norm_torch, sparse, torch.ones(4), 0.0, normed=rows["normed"]) == (
        "hidden must be [2, 4] with dense rows, got [2, 4]"
    )
    for weight in (torch.ones(3), torch.ones(4, 1)):
        words = refused(norm_torch, rows["hidden"], weight, 0.0, normed=rows["normed"])
        assert words.startswith("weight must be [4], at most ")
        assert words.endswith(f", got {list(weight.shape)}")


@pytest.mark.parametrize("terms", [(), ("bias",), ("residual",), ("bias", "residual")], ids="-".join)
def test_product(terms: tuple[str, ...]) -> None:
    """x times the weight's rows, plus what it is given."""
    x, weight = numbers(2, 3), numbers(4, 3, seed=1)
    given = {"bias": numbers(4, seed=2), "residual": numbers(2, 4, seed=3)}
    given = {name: given[name] for name in terms}
    out = torch.full((2, 4), POISON, dtype=torch.float64)
    product_torch(x, weight, out=out, **given)
    wanted = [[sum(a * b for a, b in zip(row, w, strict=True)) for w in weight.tolist()] for row in x.tolist()]
    for term in given.values():
        added = term.expand(2, 4).tolist()
        wanted = [[a + b for a, b in zip(row, more, strict=True)] for row, more in zip(wanted, added, strict=True)]
    close(out, wanted)


def test_a_gated_product() -> None:
    """Gates are the first half of the weight's rows."""
    x, weight, out = numbers(2, 3), numbers(4, 3, seed=1), torch.full((2, 2), POISON, dtype=torch.float64)
    product_torch(x, weight, out=out, gated=True)
    total = (x @ weight.t()).tolist()
    close(out, [[silu(row[0]) * row[2], silu(row[1]) * row[3]] for row in total])


def test_products_compute_in_float32() -> None:
    """A sum that 16 bits would round is rounded at the end; terms too."""
    x, weight = torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    out = torch.empty(1, 1, dtype=torch.float32)
    product_torch(x, weight, out=out, bias=torch.tensor([0.5], dtype=torch.bfloat16))
    assert out.item() == 257.5


def test_products_refuse_other_shapes() -> None:
    """Each operand by its name."""
    x, weight, out = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 4)
    rule = "weight must be [m, 3] and out [2, {}], got {} and {}"
    assert refused(product_torch, x, torch.zeros(4, 2), out=out) == rule.format("m", [4, 2], [2, 4])
    assert refused(product_torch, x, weight, out=torch.zeros(2, 3)) == rule.format("m", [4, 3], [2, 3])
    assert refused(product_torch, x, weight, out=out, gated=True) == rule.format("m / 2", [4, 3], [2, 4])
    odd = {"out": torch.zeros(2, 2), "gated": True}
    assert refused(product_torch, x, torch.zeros(5, 3), **odd) == rule.format("m / 2", [5, 3], [2, 2])
    sparse = {"x": torch.zeros(2, 6)[:, ::2], "weight": torch.zeros(4, 6)[:, ::2], "out": torch.zeros(2, 8)[:, ::2]}
    for name, value in sparse.items():
        given = {"x": x, "weight": weight, "out": out} | {name: value}
        words = f"{name} must have dense rows, got strides {list(value.stride())}"
        assert refused(product_torch, **given) == words
    for term in ({"bias": torch.zeros(2)}, {"residual": torch.zeros(2, 2)}):
        words = refused(product_torch, x, weight, out=torch.zeros(2, 2), gated=True, **term)
        assert words == "a gated product takes neither bias nor residual, got one: leave it out"
    assert refused(product_torch, x, weight, out=out, bias=torch.zeros(3)) == "bias must be [4], got [3]"
    for residual in (torch.zeros(2, 3), torch.zeros(2, 8)[:, ::2]):
        words = f"residual must be [2, 4] with dense rows, got {list(residual.shape)}"
        assert refused(product_torch, x, weight, out=out, residual=residual) == words


def test_the_likeliest() -> None:
    """The first of equals; NaN is below everything, inf no more than the largest number."""
    nan, inf, most = math.nan, math.inf, torch.finfo(torch.float32).max
    logits = torch.tensor([[1.0, 3.0, 3.0], [nan, -inf, -5.0], [most, inf, 0.0], [nan, nan, -inf], [-inf, nan, nan]])
    out = torch.full((5,), -77)
    likeliest_torch(logits, out)
    assert out.tolist() == [1, 2, 0, 0, 0]
    words = "logits must be [n, size > 0] with dense rows, got"
    assert refused(likeliest_torch, torch.zeros(5, 0), out) == f"{words} [5, 0]"
    assert refused(likeliest_torch, torch.zeros(5, 6)[:, ::2], out) == f"{words} [5, 3]"
    assert "out must be" in refused(likeliest_torch, logits, out[:4])
    likeliest_torch(torch.zeros(5, 2)[:, :1], out)
    assert out.tolist() == [0] * 5


def test_scatter() -> None:
    """Rows go to their slots; slots outside the pool write nothing."""
    k, v = numbers(3, 1, 2), numbers(3, 1, 2, seed=1)
    pools = [torch.full((4, 1, 2), POISON, dtype=torch.float64) for _ in range(2)]
    scatter_torch(torch.tensor([2, 4, -1]), k, v, *pools)
    for pool, rows in zip(pools, (k, v), strict=True):
        assert torch.equal(pool[2], rows[0])
        assert (pool[[0, 1, 3]] == POISON).all()


def test_relays_refuse_other_shapes() -> None:
    """Each array by its name, on both ways."""
    good = torch.zeros(2, dtype=torch.int64)
    one, table = good[:1], good.view(2, 1)
    taken = {"rows": good, "relay_lens": good, "relay_bonus": good, "table": table}
    taken |= {"lens": good, "bonus": good, "slots": good}
    for name in ("relay_lens", "relay_bonus", "lens", "bonus", "slots"):
        assert refused(take_torch, **taken | {name: good.int()}).startswith(f"{name} must be ")
    for bad in (good, torch.zeros(3, 1, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64).t()):
        words = f"table must be contiguous [2, width], got {list(bad.shape)}"
        assert refused(take_torch, **taken | {"table": bad}) == words
    left = {"rows": good, "relay_lens": good, "relay_bonus": good, "lens": good, "chosen": good}
    left |= {"num_live": one, "decides": one}
    for name in ("relay_lens", "relay_bonus", "lens", "chosen"):
        assert refused(leave_torch, **left | {name: one.expand(3)}).startswith(f"{name} must be ")
    for name in ("num_live", "decides"):
        assert refused(leave_torch, **left | {name: good}).startswith(f"{name} must be ")


def test_scatter_refuses_other_shapes() -> None:
    """Each operand by its name, with its type and strides."""
    given = {"slots": torch.tensor([1]), "k": torch.zeros(1, 2, 2), "v": torch.zeros(1, 2, 2)}
    given |= {"k_pool": torch.zeros(4, 2, 2), "v_pool": torch.zeros(4, 2, 2)}
    for slots in (torch.tensor([1.0]), torch.tensor([[1]])):
        words = f"slots must be [n] torch.int64, got {list(slots.shape)} {slots.dtype}"
        assert refused(scatter_torch, **given | {"slots": slots}) == words
    for name, length in (("k", 1), ("v", 1), ("v_pool", 4)):
        bad = torch.zeros(length + 1, 2, 2), torch.zeros(length, 2, 2).double(), torch.zeros(length, 2, 2).mT
        for value in (*bad, torch.zeros(length, 2, 3)):
            assert refused(scatter_torch, **given | {name: value}) == (
                f"{name} must be [{length}, 2, 2] torch.float32 with dense rows, got {list(value.shape)} {value.dtype} "
                f"at strides {list(value.stride())}"
            )
