"""Heap: objects that a process has made by now stay, where it is to take steps for long.

Between two steps the host waits for a device, and what others compute there meanwhile takes its caches. Where each
object lies in a small page of its own, a step then asks the tables of the memory for thousands of them anew.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

HUGE_PAGE = 1 << 21  # bytes
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COLLAPSE = 25  # MADV_COLLAPSE of madvise(2)


def settle() -> int:
    """No later search for garbage looks at what there is by now, and it lies in huge pages; bytes that do.

    0 where the system has none to give: another than Linux 6.1 and above, or one that is set to `never`.
    """
    gc.collect()
    moved, places = 0, sorted({id(one) // HUGE_PAGE for one in gc.get_objects()})
    gc.freeze()
    if (advise := _madvise()) is not None:
        for place in places:  # refused where a part belongs to something else, or is pinned: it stays as it is
            moved += advise(place * HUGE_PAGE, HUGE_PAGE, _COLLAPSE) == 0
    return moved * HUGE_PAGE


def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux" or not SETTING.exists() or "[never]" in SETTING.read_text():
        return None
    found: Callable[[int, int, int], int] = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]  # type: ignore[attr-defined]
    return found
