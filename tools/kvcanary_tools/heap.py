"""Heap: what a process has made by now stays, where it is to take steps for long.

Between two steps the host waits for a device, and what others compute there meanwhile takes its caches. Where objects,
those of Python and what libraries keep on the heap, lie in small pages, a step then asks the tables of the memory for
thousands of them anew.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

HUGE_PAGE = 1 << 21  # bytes
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS = Path("/proc/self/maps")
_COLLAPSE = 25  # MADV_COLLAPSE of madvise(2)


def settle() -> int:
    """No later search for garbage looks at what there is by now, and it lies in huge pages; bytes that do.

    0 where the system has none to give: another than Linux 6.1 and above, or one that is set to `never`.
    """
    gc.collect()
    moved, places = 0, {id(one) // HUGE_PAGE for one in gc.get_objects()}
    gc.freeze()
    if (advise := _madvise()) is not None:
        for place in sorted(places.union(_heap())):  # refused where a part belongs to something else, or is pinned
            moved += advise(place * HUGE_PAGE, HUGE_PAGE, _COLLAPSE) == 0
    return moved * HUGE_PAGE


def _heap() -> range:
    """Huge pages that lie in what `malloc` has for all that is small."""
    for line in MAPS.read_text().splitlines():
        if line.endswith("[heap]"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            return range(-(-start // HUGE_PAGE), end // HUGE_PAGE)
    return range(0)


def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux" or not SETTING.exists() or "[never]" in SETTING.read_text():
        return None
    found: Callable[[int, int, int], int] = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]  # type: ignore[attr-defined]
    return found
