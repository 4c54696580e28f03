"""Long parts of prompts in the triton backend: cuDNN attends as our kernel does."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.engine.attention import paged_attention_torch
from spec_engine.attention import long_chunks as module
from spec_engine.attention.long_chunks import LEAST_LONG, LENGTH_STEP
from spec_engine.attention.triton_backend import TritonAttention
from spec_engine.core import ForwardBatch, indptr
from spec_engine.memory.pools.fp8_pool import Fp8Pool
from spec_engine.memory.pools.pool import KVPool

HEADS, KV_HEADS, DIM = 4, 2, 64


def prompts(lens: list[int], new_lens: list[int], device: str, num_slots: int) -> ForwardBatch:
    """Rows of so many entries in random slots, the last ``new_lens`` of each written by this forward."""
    indices = (torch.randperm(num_slots - 1)[: sum(lens)] + 1).to(device)
    rows = zip(indices.split(lens), new_lens, strict=True)
    slots = torch.cat([row[len(row) - new :] for row, new in rows])
    none = torch.zeros(len(lens), dtype=torch.int64, device=device)
    starts = indptr(lens, none.device)
    names = tuple(map(str, range(len(lens))))
    operands = (names, 1, none, starts, indices, tuple(lens), tuple(new_lens), slots, slots, slots)
    return ForwardBatch("prefill", 0, *operands)


CASES = [
    ([LEAST_LONG], [LEAST_LONG], True),
    ([LEAST_LONG + 77] * 3, [LEAST_LONG + 77] * 3, True),
    ([LEAST_LONG + 78], [LEAST_LONG + 78], True),
    ([2 * LEAST_LONG] * 2, [LEAST_LONG] * 2, True),
    ([3 * LEAST_LONG], [LEAST_LONG], True),
    ([LEAST_LONG, LEAST_LONG + 1], [LEAST_LONG, LEAST_LONG + 1], False),
    ([2 * LEAST_LONG, LEAST_LONG], [LEAST_LONG, LEAST_LONG], False),
    ([2 * LEAST_LONG + 5], [LEAST_LONG], False),
    ([LEAST_LONG - 1], [LEAST_LONG - 1], False),
]


def compare(pool: KVPool, batch: ForwardBatch, is_long: bool, tolerance: float) -> None:
    """The attention of random queries over random K and V, with that of float64."""
    device, dtype = pool.kv.device, pool.dtype
    everywhere = torch.arange(1, pool.num_slots, device=device)
    pool.store(0, everywhere, *torch.randn(2, len(everywhere), KV_HEADS, DIM, device=device, dtype=dtype))
    attention = TritonAttention(pool, batch, HEADS, batch.kv_indices, batch.slots, None)
    assert (attention.long is not None) is is_long
    q = torch.randn(sum(batch.new_lens), HEADS, DIM, device=device, dtype=dtype)
    k, v = torch.randn(2, sum(batch.new_lens), KV_HEADS, DIM, device=device, dtype=dtype)
    alone = TritonAttention.alone(pool, batch, HEADS)
    assert (alone is not None) is (is_long and batch.kv_lens == batch.new_lens and module.is_plain(pool))
    before = None if alone is None else alone(0, q, k, v)
    found = attention.attend(0, q, k, v)
    assert before is None or torch.equal(before, found)
    wanted = torch.empty(q.shape, dtype=torch.float64, device=device)
    paged_attention_torch(
        q.double(),
        *pool.load(0, torch.arange(pool.num_slots, device=device)).double().unbind(1),
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        q_indptr=indptr(batch.new_lens, device),
        max_kv_len=max(batch.kv_lens),
        max_q_len=max(batch.new_lens),
        scale=DIM**-0.5,
        out=wanted,
    )
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def new_pool(pool_type: type[KVPool], num_slots: int, dtype: torch.dtype, device: str, num_layers: int = 1) -> KVPool:
    shape = {"num_layers": num_layers, "page_size": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "token_offset": 0}
    return pool_type("target", num_pages=num_slots - 1, dtype=dtype, device=torch.device(device), **shape)


@pytest.mark.gpu
@pytest.mark.parametrize("pool_type", [KVPool, Fp8Pool])
@pytest.mark.parametrize(("lens", "new_lens", "is_long"), CASES, ids=str)
def test_every_prompt_is_attended_alike(pool_type, lens, new_lens, is_long: bool) -> None:
    """Chunks of equal lengths by cuDNN, all others by our kernel; both within bf16 of float64."""
    pool = new_pool(pool_type, 5120, torch.bfloat16, "cuda")
    compare(pool, prompts(lens, new_lens, "cuda", pool.num_slots), is_long, 2e-2)


@pytest.mark.parametrize(
    ("lens", "new_lens", "is_long"),
    [([16, 16], [8, 8], True), ([8, 8], [8, 8], True), ([24], [8], True), ([12], [8], False), ([6], [3], False)],
    ids=str,
)
def test_two_passes_see_what_one_would(monkeypatch, lens, new_lens, is_long: bool) -> None:
    """On a CPU, in float32, with a pass of plain torch in the place of cuDNN's."""
    play_cudnn(monkeypatch)
    pool = new_pool(KVPool, 48, torch.float32, "cpu")
    compare(pool, prompts(lens, new_lens, "cpu", pool.num_slots), is_long, 1e-5)


def play_cudnn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A pass of plain torch in its place, which prompts of 4 tokens go to; the lengths that come are noted."""
    lengths: list[int] = []

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        lengths.append(q.shape[2])
        return plain_pass(q, k, v, causal=causal)

    monkeypatch.setattr(module, "LEAST_LONG", 4)
    monkeypatch.setattr(module, "LENGTH_STEP", 4)
    monkeypatch.setattr(module, "LENGTHS", module.Lengths())
    monkeypatch.setattr(module, "_has_cudnn", lambda dtype, device: True)
    monkeypatch.setattr(module, "_pass", noted)
    return lengths


def attended(pool: KVPool, batch: ForwardBatch, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """By layer, what one forward gives for q, k and v."""
    attention = TritonAttention(pool, batch, HEADS, batch.kv_indices, batch.slots, None)
    return [attention.attend(layer, *values) for layer in range(pool.kv.shape[0])]


@pytest.mark.parametrize(
    ("length", "rows", "wanted"),
    [
        (8, 1, [[8, 8], [8, 8], [8, 8]]),
        (6, 1, [[8, 8], [8, 6], [6, 6]]),
        (6, 2, [[8, 8], [8, 6], [6, 6]]),
    ],
)
def test_a_length_that_is_new_is_filled_up(monkeypatch, length, rows, wanted) -> None:
    """To one of few; when it comes again the last layer prepares for it, and what is attended stays the same."""
    lengths = play_cudnn(monkeypatch)
    pool = new_pool(KVPool, 48, torch.float32, "cpu", num_layers=2)
    batch = prompts([length] * rows, [length] * rows, "cpu", pool.num_slots)
    values = [torch.randn(rows * length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    outputs = [attended(pool, batch, values) for _ in wanted]
    assert [lengths[2 * number : 2 * number + 2] for number in range(len(wanted))] == wanted
    for again in outputs[1:]:
        torch.testing.assert_close(again, outputs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
def test_a_filled_up_length_changes_no_bit(monkeypatch, rows) -> None:
    """Of what the tokens of the prompt see: the passes of the first three forwards of a length."""
    monkeypatch.setattr(module, "LENGTHS", module.Lengths())
    length = LEAST_LONG + LENGTH_STEP - 37
    pool = new_pool(KVPool, 4096, torch.bfloat16, "cuda", num_layers=2)
    batch = prompts([length] * rows, [length] * rows, "cuda", pool.num_slots)
    values = [torch.randn(rows * length, n, DIM, device="cuda").bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)]
    first, *others = [attended(pool, batch, values) for _ in range(3)]
    assert all(torch.equal(one, other) for again in others for one, other in zip(first, again, strict=True))


def plain_pass(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention and its LSE by the formula."""
    k, v = (values.repeat_interleave(HEADS // KV_HEADS, 1) for values in (k, v))
    scores = q @ k.transpose(2, 3) * DIM**-0.5
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
