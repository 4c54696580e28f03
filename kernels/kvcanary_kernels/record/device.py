"""What every kernel shares: Triton where it is installed, the layout as constants, the hashes on the device.

Counts that change from launch to launch are not specialised (`do_not_specialize`): one compilation serves them all.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvcanary_kernels.record import formulas
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.rows import Piece

try:
    import triton
    import triton.language as tl
except ImportError:  # the torch references work without it

    class _NoKernel:
        """Stands in for a kernel; launching it says what is missing."""

        def __init__(self, function: Any) -> None: ...

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("Triton is not installed, use the operation's *_torch twin")

    def _jit(function: Any = None, **options: Any) -> Any:
        return _NoKernel(function) if function else _NoKernel

    triton = SimpleNamespace(jit=_jit, cdiv=lambda a, b: -(-a // b))
    tl = SimpleNamespace(constexpr=int)

COLUMNS = tl.constexpr(record.COLUMNS)  # of a record, in the order of the layout
TOKEN_POSITION, CHAIN, REQUEST_GENERATION, STEP_SITE, CONTENT_B, LAYERS_LOW, LAYERS_HIGH, SEAL = (
    tl.constexpr(column) for column in range(record.COLUMNS)
)
SEAL_START = tl.constexpr(record.SEAL_START)
SEAL_KEYS = tl.constexpr(record.SEAL_KEYS)
SEAL_SLOT_KEY = tl.constexpr(record.SEAL_SLOT_KEY)
SEAL_POOL_KEY = tl.constexpr(record.SEAL_POOL_KEY)
MIX_KEY = tl.constexpr(record.MIX_KEY)
MULTIPLIER = tl.constexpr(record.MULTIPLIER)
START_B = tl.constexpr(record.START_B)
INVERSES = tl.constexpr(2 * record.POWERS)  # where in Keys.powers the inverse's begin
R1, R2, R3, R4, R5, R6, R7, R8, _, R10, R11, R12 = (tl.constexpr(record.CODE_BITS[f"R{n}"]) for n in range(1, 13))
N1 = tl.constexpr(record.CODE_BITS["N1"])
STORED_TWICE, STORED_NOT_FINITE = map(tl.constexpr, (record.STORED_TWICE, record.STORED_NOT_FINITE))
W1, W2, W3, W4, W5, _, W7, W8, W9 = (tl.constexpr(record.CODE_BITS[f"W{n}"]) for n in range(1, 10))
QUARANTINED = tl.constexpr(record.QUARANTINED)
LOAD_FAILED = tl.constexpr(record.LOAD_FAILED)
RESERVED = tl.constexpr(record.RESERVED)
WRITTEN = tl.constexpr(record.WRITTEN)
SHARED = tl.constexpr(record.SHARED)
NO_OWNER = tl.constexpr(record.NO_OWNER)
SHARED_OWNER = tl.constexpr(record.SHARED_OWNER)
# PoolRows.constants holds PIECE_FIELDS numbers a piece; these say which.
PIECE_FIELDS = tl.constexpr(len(Piece._fields))
WORDS_FIELD = tl.constexpr(Piece._fields.index("words"))
FIRST_FIELD = tl.constexpr(Piece._fields.index("first"))
PAGE_SIZE_FIELD = tl.constexpr(Piece._fields.index("page_size"))
PAGE_STRIDE_FIELD = tl.constexpr(Piece._fields.index("page_stride"))
SLOT_STRIDE_FIELD = tl.constexpr(Piece._fields.index("slot_stride"))
RUN_FIELD = tl.constexpr(Piece._fields.index("run"))
RUN_STRIDE_FIELD = tl.constexpr(Piece._fields.index("run_stride"))
BLOCK_FIELD = tl.constexpr(Piece._fields.index("block"))
MASK_32 = tl.constexpr(record.MASK_32)

BLOCK = 128  # entries a program takes at a time where entries are records
INTERPRETED_UNITS = 8  # of a CPU, where nothing runs side by side, so that tests split work too
UNROLL = tl.constexpr(8)  # such readings that are on their way together
PROGRAMS_PER_SEGMENT = 32  # a fixed grid, whatever the lengths on the device; programs that last stand in others' way


def _formula(function: Any) -> Any:
    """A formula as kernels call it; Triton's interpreter takes it as it stands."""
    compiled = triton.jit(function)
    return compiled if isinstance(compiled, getattr(triton, "JITFunction", object)) else function


chain_step, poison_of = _formula(formulas.chain_step), _formula(formulas.poison_of)
_mix_of, _seal_column = _formula(formulas.mix_of), _formula(formulas.seal_column)


def programs_for(longest: int, block: int = BLOCK) -> int:
    """Programs that share a segment which has at most so many entries, of which each takes a block at a time."""
    return max(1, min(PROGRAMS_PER_SEGMENT, triton.cdiv(longest, block)))


def stride_of(values: Tensor) -> int:
    """0 for a [1] tensor that stands for every entry, else 1."""
    return 0 if values.numel() == 1 else 1


@cache
def num_units(device: torch.device) -> int:
    """Multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED_UNITS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """First in a kernel with `overlap_options`: the next kernel may be launched, and the one before must have ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def live_count(num_live, n, HAS_LIVE: tl.constexpr):
    """n, or the device's live count where there is one."""
    if HAS_LIVE:
        n = tl.minimum(tl.load(num_live), n)
    return n


@triton.jit
def low_word(column):
    return column & MASK_32


@triton.jit
def high_word(column):
    return (column >> 32) & MASK_32


@triton.jit
def pair(low, high):
    return (high << 32) | (low & MASK_32)


@triton.jit
def mix(tokens, positions, constants):
    """record.mix"""
    return _mix_of(tokens, positions, tl.load(constants + MIX_KEY))


@triton.jit
def seal_of(token_position, chain, request_generation, step_site, slots, pool_id, constants):
    """The seal of an identity; seal.seal_values."""
    key = constants + SEAL_KEYS
    seal = tl.load(constants + SEAL_START) + tl.load(constants + SEAL_POOL_KEY) * pool_id
    seal += tl.load(constants + SEAL_SLOT_KEY) * slots
    seal += _seal_column(token_position, tl.load(key), tl.load(key + 1))
    seal += _seal_column(chain, tl.load(key + 2), tl.load(key + 3))
    seal += _seal_column(request_generation, tl.load(key + 4), tl.load(key + 5))
    return seal + _seal_column(step_site, tl.load(key + 6), tl.load(key + 7))
