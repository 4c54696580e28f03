"""The ways to hash K and V inside attention: their algebra in plain torch, and that a GPU's compiler takes them."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from kvcanary_kernels.fingerprint import fingerprint_torch
from kvcanary_kernels.record import make_keys
from kvcanary_kernels.rows import pool_rows
from kvcanary_tools.bench.fused_kernels import DIM, SHIFTS, UNSIGNED, byte_keys

HEADS, SLOTS = 3, 5


def test_products_of_bytes_are_lane_a() -> None:
    """Digits of keys times bytes, column by column, shifted and added over heads, are the fingerprint's very bits."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 256, (2, SLOTS, HEADS, 2 * DIM), dtype=torch.uint8, generator=generator)
    values[:, 0], values[:, 1] = 0, 255
    rows = pool_rows([values[0].view(torch.bfloat16)], [values[1].view(torch.bfloat16)])
    keys = make_keys(7, 1, rows.words_per_row)
    lanes = torch.empty(1, SLOTS, dtype=torch.int64)
    fingerprint_torch(rows, torch.arange(SLOTS), keys, lane_a=lanes)
    factors, missing = byte_keys(keys, HEADS)
    signed = (values.view(torch.int8) ^ UNSIGNED).to(torch.int64)
    columns = torch.einsum("pshb,hpbc->shc", signed, factors.to(torch.int64))
    assert columns.abs().max() < 2**31
    parts = (columns << 8 * torch.arange(SHIFTS)).sum(-1) + missing
    assert torch.equal(parts.sum(1) + keys.start_a[0], lanes[0])


PROGRAM = """
import triton
from kvcanary_tools.bench.fused_kernels import _attend_and_hash_in_place_kernel, _attend_and_hash_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

CONSTANTS = {"HEADS": 8, "FOLD": 4, "D": 128, "N": 32, "STAGES": 2, "HASHES": True}
TYPES = {"length": "i32", "num_keys": "i32", "stride": "i32", "scale": "fp32", "keys": "*i32"}
TYPES |= {"slots": "*i64", "sums": "*i64", "factors": "*i8", "q": "*bf16", "out": "*bf16"}

for kernel, source, way in (
    (_attend_and_hash_kernel, ASTSource, 1),
    (_attend_and_hash_kernel, ASTSource, 2),
    (_attend_and_hash_in_place_kernel, GluonASTSource, 0),
):
    constants = {name: (CONSTANTS | {"WAY": way})[name] for name in kernel.arg_names if name.isupper()}
    types = TYPES | {name: "*i32" if way == 1 else "*bf16" for name in "kv"}
    signature = {name: "constexpr" if name.isupper() else types[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(signature) if signature[name][0] == "*" or name in ("length", "stride")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    built = source(kernel, signature, constants, attributes)
    assert triton.compile(built, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]
"""


def test_every_way_compiles_for_sm_90(tmp_path) -> None:
    """On a machine without a GPU, as the package's own kernels do."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
