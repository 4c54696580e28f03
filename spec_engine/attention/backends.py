"""The attention backends by name, what each can read, and where each can run. Loading one imports torch and more.

Three index styles: token indices name every entry's slot; page tables name whole pages; the dense reference gathers
what it is told to, slowly and plainly, for the others to be compared with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from spec_engine.errors import ConfigError

if TYPE_CHECKING:
    from spec_engine.attention.base import OpenAttention
    from spec_engine.memory.pools.pool import KVPool


@dataclass(frozen=True)
class Needs:
    """What a backend cannot run without; None: anything will do.

    package:   a module that must be installed
    cuda:      a CUDA device; "or interpreter": on a CPU also where Triton interprets its kernels (TRITON_INTERPRET=1)
    dtypes:    number types that K and V are read in
    head_dims: sizes of a head
    own_types: the pool must hold such numbers: 8-bit ones with a scale for each row are not read
    """

    package: str | None = None
    cuda: str | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    own_types: bool = False


@dataclass(frozen=True)
class Backend:
    """One entry of the table.

    home:                module and class that `load` gives
    supports_tree_pages: reads the branches of a draft tree that own whole pages (topk > 1 with page_size > 1)
    reads_pages:         reads by page tables: entry p of a row must lie at offset p % P of its page, so the pages of a
                         branch must hold its ancestors and the prefix tail before they are read
    supports_windows:    reads rows that begin behind position 0, each token within its window
    needs:               where it runs
    """

    name: str
    home: str
    supports_tree_pages: bool
    reads_pages: bool
    supports_windows: bool
    needs: Needs = field(default_factory=Needs)

    def check_pool(self, pool: KVPool) -> None:
        """ConfigError, which names what runs there instead, for a pool that this backend cannot read."""
        reason = self._refusal(pool)
        if reason is not None:
            others = ", ".join(name for name, other in BACKENDS.items() if other._refusal(pool) is None)
            raise ConfigError(f"attention_backend {self.name!r} {reason}: those that run here are {others}")

    def _refusal(self, pool: KVPool) -> str | None:
        """What this backend needs and the pool or the machine has not; None: it runs."""
        needs, kv = self.needs, pool.kv
        dtype, head_dim = str(pool.dtype).removeprefix("torch."), kv.shape[-1]
        interpreted = needs.cuda == "or interpreter" and os.environ.get("TRITON_INTERPRET") == "1"
        if needs.package is not None and find_spec(needs.package) is None:
            return f"needs the package {needs.package}, which is not installed"
        if needs.cuda is not None and not kv.is_cuda and not interpreted:
            return f"needs a CUDA device, got {kv.device.type}"
        if needs.dtypes is not None and dtype not in needs.dtypes:
            return f"computes in {' or '.join(needs.dtypes)}, got {dtype}"
        if needs.own_types and kv.dtype is not pool.dtype:
            return f"knows no scales of single rows, got a pool of {str(kv.dtype).removeprefix('torch.')}"
        if needs.head_dims is not None and head_dim not in needs.head_dims:
            return f"reads heads of {' or '.join(map(str, needs.head_dims))} numbers, got {head_dim}"
        return None

    def load(self) -> OpenAttention:
        """What opens the attention of each forward."""
        module, _, name = self.home.partition(":")
        opener: OpenAttention = getattr(import_module(module), name)
        return opener


TRITON = Needs("triton", "or interpreter", ("float32", "bfloat16", "float16"))
FLASHINFER = Needs("flashinfer", "always", ("bfloat16", "float16"), (64, 128, 256), own_types=True)

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("torch", "spec_engine.attention.torch_backend:TorchAttention", True, False, True),
        Backend("paged", "spec_engine.attention.paged:PagedAttention", True, True, False),
        Backend("block-table", "spec_engine.attention.paged:BlockTableAttention", False, True, False),
        Backend("dense", "spec_engine.attention.dense:DenseAttention", True, False, True),
        Backend("triton", "spec_engine.attention.triton_backend:TritonAttention", True, False, True, TRITON),
        Backend("triton-paged", "spec_engine.attention.triton_backend:TritonPages", True, True, False, TRITON),
        Backend(
            "flashinfer",
            "spec_engine.attention.flashinfer_backend:FlashInferAttention",
            *(True, False, False),
            FLASHINFER,
        ),
    )
}
TREE_BACKENDS = tuple(name for name, backend in BACKENDS.items() if backend.supports_tree_pages)
WINDOW_BACKENDS = tuple(name for name, backend in BACKENDS.items() if backend.supports_windows)
