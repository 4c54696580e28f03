"""What the decoder computes on a GPU: the kernels between its products, here in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spec_engine.mock.random_model import random_model
from spec_engine.models import decoder as module
from spec_engine.models import fused

FAMILIES = {
    "llama": {},
    "biased": {"attention_bias": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
}


class SelfAttention:
    """A `KVAccess` without a cache, that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen += [q.clone(), k.clone(), v.clone()]
        return q + k.repeat_interleave(q.shape[1] // k.shape[1], 1) * v.mean()


def run(model: module.Decoder, positions: Tensor) -> tuple[module.DecoderOutput, list[Tensor]]:
    attention = SelfAttention()
    tokens = torch.arange(len(positions)) % model.config.vocab_size
    return model(tokens, positions, attention, tap_layers=(0, 1)), attention.seen


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_compute_what_the_products_between_them_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, values, taps and hidden states; positions anywhere, past the last of the table too."""
    model = random_model(3, dtype=torch.float32, **FAMILIES[family])
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    positions = torch.tensor([0, 7, 8, 511, 600])
    expected, seen = run(model, positions)
    monkeypatch.setattr(module, "is_fused", lambda x: True)
    fused, reported = run(model, positions)
    for one, other in zip([*fused, *reported], [*expected, *seen], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "dtype", "size", "by_row"),
    [
        (1, torch.bfloat16, 8192, True),
        (2, torch.bfloat16, 8, False),
        (64, torch.float32, 256, True),
        (65, torch.float32, 8, False),
        (2, torch.float32, 2048, False),
    ],
    ids=["one row", "two rows", "few float32 rows", "many rows", "a large weight"],
)
def test_few_float32_rows_read_a_small_weight_one_by_one(n: int, dtype: torch.dtype, size: int, by_row: bool) -> None:
    """Any single row too; all else is a library's product."""
    x, weight = torch.empty(n, size, dtype=dtype), torch.empty(1, dtype=dtype).expand(size, size)
    assert fused.goes_by_row(x, weight) is by_row


@pytest.mark.parametrize(
    ("n", "device"),
    [(1, "cpu"), pytest.param(1, "cuda", marks=pytest.mark.gpu), pytest.param(5, "cuda", marks=pytest.mark.gpu)],
)
def test_logits_of_a_gpu_are_float32(n: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bfloat16 model too, and as exact as the sums in them."""
    model = random_model(3, dtype=torch.bfloat16).to(device)
    monkeypatch.setattr(module, "is_fused", lambda x: True)
    hidden = torch.randn(n, model.config.hidden_size).to(device, torch.bfloat16)
    logits = model.logits(hidden)
    assert logits.dtype is torch.float32
    exact = hidden.double() @ model.lm_head_weight.double().t()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("is_cuda", "requires_grad", "dtype", "fused"),
    [
        (True, False, torch.bfloat16, True),
        (False, False, torch.bfloat16, False),
        (True, True, torch.bfloat16, False),
        (True, False, torch.float64, False),
    ],
)
def test_training_doubles_and_cpus_take_the_plain_way(is_cuda, requires_grad, dtype, fused) -> None:
    """Kernels know no gradients and no doubles."""
    x = SimpleNamespace(is_cuda=is_cuda, requires_grad=requires_grad, dtype=dtype)
    assert module.is_fused(x) is fused


def test_a_decoder_on_a_cpu_loads_no_kernels() -> None:
    """Triton takes a third of a second to import, for nothing."""
    script = (
        "import sys, torch\n"
        "from spec_engine.mock.random_model import random_model\n"
        "random_model().logits(torch.zeros(1, 32, dtype=torch.float64))\n"
        "print([name for name in ('triton', 'kvcanary_kernels.record.device') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
