"""The attention backends by name, and what each can read. Loading one imports torch; asking about one does not.

Three index styles: token indices name every entry's slot; page tables name whole pages; the dense reference gathers
what it is told to, slowly and plainly, for the others to be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_engine.attention.base import OpenAttention


@dataclass(frozen=True)
class Backend:
    """One entry of the table.

    home:                module and class that `load` gives
    supports_tree_pages: reads the branches of a draft tree that own whole pages (topk > 1 with page_size > 1)
    reads_pages:         reads by page tables: entry p of a row must lie at offset p % P of its page, so the pages of a
                         branch must hold its ancestors and the prefix tail before they are read
    supports_windows:    reads rows that begin behind position 0, each token within its window
    """

    name: str
    home: str
    supports_tree_pages: bool
    reads_pages: bool
    supports_windows: bool

    def load(self) -> OpenAttention:
        """What opens the attention of each forward."""
        module, _, name = self.home.partition(":")
        opener: OpenAttention = getattr(import_module(module), name)
        return opener


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("torch", "spec_engine.attention.torch_backend:TorchAttention", True, False, True),
        Backend("paged", "spec_engine.attention.paged:PagedAttention", True, True, False),
        Backend("block-table", "spec_engine.attention.paged:BlockTableAttention", False, True, False),
        Backend("dense", "spec_engine.attention.dense:DenseAttention", True, False, True),
    )
}
TREE_BACKENDS = tuple(name for name, backend in BACKENDS.items() if backend.supports_tree_pages)
WINDOW_BACKENDS = tuple(name for name, backend in BACKENDS.items() if backend.supports_windows)
