"""Gated delta nets and Mamba 2 of SGLang on a CPU: its Triton kernels, which Triton's interpreter runs, as on a GPU.

Those that it has for a CPU are of a package that is not here.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any


def stand_in() -> None:
    """Let these kernels be taken; before SGLang's models are imported. They want 16-bit floats, and the interpreter
    cannot compute with bfloat16: models are float16.
    """
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float16"
    import sglang.srt.utils as utils
    import torch
    import triton
    from sglang.kernels.ops.attention.fla import layernorm_gated, op

    torch.cpu.device = contextlib.nullcontext
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    layernorm_gated._get_sm_count = lambda device: 1
    for name in ("exp", "exp2", "log", "log2"):
        setattr(op, name, functools.partial(_of_language, name))
    tuned, is_cpu = triton.autotune, utils.is_cpu
    triton.autotune = lambda configs, *args, **kwargs: tuned(configs[:1], *args, **kwargs)
    utils.is_cpu = lambda: False
    try:
        import sglang.srt.layers.attention.mamba.mamba as mamba
        import sglang.srt.models.qwen3_5  # noqa: F401
    finally:
        utils.is_cpu = is_cpu
    from sglang.kernels.ops.mamba import causal_conv1d_triton as convolutions

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):  # it has these of known devices alone
        for own in (name, f"{name}_triton"):
            setattr(mamba, own, getattr(convolutions, name))
    _scatter_by_torch()


def _scatter_by_torch() -> None:
    """What is accepted is put into its entries by a kernel that refuses a CPU: SGLang has the same in torch."""
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as kernels
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    kernels._conv_multi_eligible = lambda pairs: False
    for name in ("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask"):
        setattr(kernels, name, HybridLinearAttnBackend._scatter_speculative_state_with_mask)


def _of_language(name: str, x: Any) -> Any:
    """Triton's function of that name as it is now: the interpreter puts others in its place."""
    import triton.language as tl

    return getattr(tl, name)(x)
