"""Compiled loops over host memory. Each gives bit for bit what a torch reference or a rule next door gives.

Loaded when a manager is built: compiling takes some seconds once, afterwards the loops come from the disk.
"""

from typing import TYPE_CHECKING, Any

from kvcanary.native import device_results, fingerprints, forwards, page_states, pool_bytes  # noqa: F401
from kvcanary.native.jit import LOOPS, entry

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


globals().update({name: entry(made) for name, made in LOOPS.items()})
