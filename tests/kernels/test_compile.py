"""Every kernel compiles for a GPU on a machine without one, and the torch side works without Triton."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcanary_kernels

MOST_REGISTERS = 96  # of a thread
PROGRAM = r"""
import importlib, pkgutil, re, subprocess, sys
import kvcanary_kernels
import triton
from pathlib import Path
from kvcanary_kernels.record.rows import Piece
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NUMBERS = {"n", "num_slots", "num_layers", "num_segments", "num_codes", "num_rows", "num_row_ids", "max_depth", "layer"}
NUMBERS |= {"phase", "stride", "window", "at_step", "width", "page_size", "null_slots", "pool_id", "parts"}
NUMBERS |= {"num_entries", "num_table_rows", "table_width", "ancestors", "site", "max_tail", "m", "num_q_heads"}
NUMBERS |= {"pool_bit", "size", "parts", "num_heads", "num_lines", "ring", "num_seats", "most", "shift"}
NUMBERS |= {"place", "stamp", "num_before", "num_indices", "group", "checkpoints", "num_drafts", "num_others"}
NUMBERS |= {"ahead", "first_asked"}
FLOATS = {"qkv", "cos", "sin", "q_norm", "k_norm", "gate_up", "hidden", "delta", "weight", "total", "normed"}
FLOATS |= {"x", "bias", "residual", "logits"}
FLAGS = sys.argv[1] == "with"
DENSE = Piece(words=12, first=0, page_size=1, page_stride=24, slot_stride=24, run=12, run_stride=12, block=16)
HEADS = Piece(words=10, first=12, page_size=16, page_stride=320, slot_stride=5, run=5, run_stride=80, block=16)
CONSTEXPRS = {"PAGE": 16 if FLAGS else 1, "WORDS": 22, "PIECES": (*DENSE, *HEADS), "BLOCK_N": 128}
CONSTEXPRS |= {"FORMATS": (1, 2, 3, 4, 1 << 31) * 2}
CONSTEXPRS |= {"ALIGNMENT": 16 if FLAGS else 4, "TILE": 16, "HALF": 5, "SIZE": 12, "BLOCK": 16}
CONSTEXPRS |= {"BLOCK_M": 16, "BLOCK_K": 32, "BLOCK_H": 8, "LAYERS": 16, "SCAN_N": 256}
CONSTEXPRS |= {"CHUNK": 16, "BLOCK_P": 8, "BLOCK_L": 8, "GROUP": 4 if FLAGS else 1, "K": 4}
ATTENTION = {"HEADS": 8, "FOLD": 4, "DIM": 80, "BLOCK_D": 128, "BLOCK_M": 16, "BLOCK_S": 8, "PAGE": 16}
ATTENTION |= {"BLOCK_R": 16, "BLOCK_N": 64, "NODES": 9 if FLAGS else 0, "BLOCK_NODES": 16, "WINDOW": 5 if FLAGS else 0}
ATTENTION |= {"ITEM": 1 if FLAGS else 2}
ATTENDED = {"scale": "fp32", "v_factor": "fp32", "tree_mask": "*u8", "factors": "*fp16"}
ATTENDED |= {name: "i32" for name in ("n", "num_rows", "num_slots", "num_indices", "num_splits")}
ATTENDED |= {"q": "*bf16", "out": "*bf16"} | {name: "*fp8e4nv" if FLAGS else "*bf16" for name in ("k", "v")}
ATTENDED |= {name: "*fp32" for name in ("lse", "partial", "k_scale", "v_scale", "first_lse", "second_lse")}
ATTENDED |= {name: "*bf16" for name in ("first", "second")}
STATES = {name: "*fp32" for name in ("states", "conv", "decay", "shift", "norm")} | {"channels": "i32", "n": "i32"}
STATES |= {name: "*bf16" for name in ("x", "mixed", "gates", "out")} | {"sources": "*i64", "targets": "*i64"}
CONSTEXPRS |= {"K_HEADS": 2, "V_HEADS": 4, "V": 16, "WINDOW": 96, "WIDTH": 4, "BLOCK_V": 16, "COLUMN": 1}
CONSTEXPRS |= {"ZEROED": FLAGS, "COUNTED": not FLAGS, "BLOCK_R": 16, "ROW_BITS": 8}

def type_of(name, module):
    if "attention" in module and name in ATTENDED:
        return ATTENDED[name]
    if module.rpartition(".")[2] in ("delta", "copies") and name in STATES:
        return STATES[name]
    if name in ("values", "value_strides"):
        return ("*i32" if name == "values" else "i32",) * 2
    if name in NUMBERS or name.endswith("_stride"):
        return "i32"
    if name in ("eps", "largest"):
        return "fp32"
    if name in ("best", "highest", "sums", "probs"):
        return "*fp32"
    if name in FLOATS:
        return "*bf16"
    return "*i32" if name in ("key_a", "key_b") else "*i64"

def registers(cubin):
    file = Path(sys.argv[2], "cubin")
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
    return re.search(r"REG:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)[1]

compiled = []
for package in pkgutil.walk_packages(kvcanary_kernels.__path__, "kvcanary_kernels."):
    module = importlib.import_module(package.name)
    fixed = CONSTEXPRS | (ATTENTION if "attention" in package.name else {})
    for name, function in vars(module).items():
        if not name.endswith("_kernel") or function.__module__ != package.name:
            continue
        signature, constants = {}, {}
        for parameter in function.arg_names:
            if parameter.isupper():
                signature[parameter] = "constexpr"
                constants[parameter] = fixed.get(parameter, FLAGS)
            else:
                signature[parameter] = type_of(parameter, package.name)
        source = ASTSource(fn=function, signature=signature, constexprs=constants)
        cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
        compiled.append(f"{name} {registers(cubin)}")
print(*sorted(compiled), sep="\n")
"""


@pytest.mark.parametrize("flags", ["with", pytest.param("without", marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_sm_90(flags: str, tmp_path) -> None:
    """Interpreted kernels are Python; this proves that the compiler takes them too, with all flags and with none.

    All but attention may run beside a forward, whose blocks need registers next to theirs.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, flags, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    used = [line.split() for line in result.stdout.splitlines()]
    assert [name for name, _ in used] == names_of_kernels()
    assert [name for name, registers in used if int(registers) > MOST_REGISTERS] == ["_attend_kernel"]


def names_of_kernels() -> list[str]:
    """Every function of the package's sources that is named as a kernel."""
    files = Path(kvcanary_kernels.__path__[0]).rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")]
    assert len(names) > 20
    return sorted(names)


ATTENTION = r"""
import sys
import triton
from kvcanary_kernels.engine.attention.kernels import _attend_kernel, _merge_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PLAIN = {"HEADS": 8, "FOLD": 4, "DIM": 128, "BLOCK_D": 128, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_S": 8, "PAGE": 1}
PLAIN |= {"NODES": 0, "BLOCK_NODES": 1, "WINDOW": 0, "HAS_SPLITS": True, "CAUSAL": True}
TREE = {"BLOCK_M": 64, "PAGE": 16, "NODES": 9, "BLOCK_NODES": 16, "WINDOW": 5, "HAS_SPLITS": False}
CONSTANTS, POOL, FLAG, WARPS = {
    "decode": ({}, "bf16", False, 4),
    "prefill": ({"BLOCK_M": 128, "HAS_SPLITS": False}, "bf16", False, 8),
    "tree": (TREE, "fp8e4nv", True, 4),
    "float32": ({"BLOCK_N": 32, "DIM": 80, "CAUSAL": False}, "fp32", True, 4),
    "reads": ({"HASHES": True, "PACKED": True}, "bf16", False, 2),
}[sys.argv[1]]
PLAIN |= {"ITEM": {"bf16": 2, "fp8e4nv": 1, "fp32": 4}[POOL]}
QUERIES = "fp32" if POOL == "fp32" else "bf16"

def type_of(name):
    numbers = {"scale": "fp32", "v_factor": "fp32"}
    numbers |= {name: "i32" for name in ("n", "num_rows", "num_slots", "num_indices", "num_splits")}
    numbers |= {name: f"*{POOL}" for name in ("k", "v")} | {name: f"*{QUERIES}" for name in ("q", "out")}
    numbers |= {name: "*fp32" for name in ("lse", "partial", "k_scale", "v_scale")} | {"tree_mask": "*u8"}
    numbers |= {"factors": "*fp16"}
    return numbers.get(name, "i32" if name.endswith("_stride") else "*i64")

for function in (_attend_kernel, _merge_kernel):
    names = {name: name.isupper() for name in function.arg_names}
    constants = {name: (PLAIN | CONSTANTS).get(name, FLAG) for name, is_constant in names.items() if is_constant}
    signature = {name: "constexpr" if is_constant else type_of(name) for name, is_constant in names.items()}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name.endswith("_stride")]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS}).asm["cubin"]
"""


@pytest.mark.parametrize(
    "shape",
    ["decode", "reads", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("prefill", "tree", "float32"))],
)
def test_attention_compiles_for_sm_90(shape: str, tmp_path) -> None:
    """Both of its kernels, by what they are used for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", ATTENTION, shape], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


WITHOUT_TRITON = """
import sys

sys.modules["triton"] = None
import torch

from kvcanary_kernels.content import attest, check, fingerprint, finite, poison, store
from kvcanary_kernels.engine import attention
from kvcanary_kernels.judge import count, move, verify
from kvcanary_kernels.record import chain, seal
from kvcanary_kernels.record.layout import make_keys

keys, one, out = make_keys(1, 1, 4), torch.tensor([0]), torch.tensor([0])
operands = one, one, torch.tensor([0, 1]), one
chain.chain_scan_torch(*operands, keys=keys, out=out)
assert int(out)
chain.chain_scan(*operands, keys=keys, out=out)
"""


def test_torch_references_work_without_triton() -> None:
    """Every module imports, a reference runs, and launching a kernel says what is missing."""
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    last = result.stderr.splitlines()[-1]
    assert last == "RuntimeError: Triton is not installed, use the operation's *_torch twin"
