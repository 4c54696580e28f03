"""A small incident in the stand-in for vLLM: a block that changes hands, and another request's bytes in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcanary import KVCorruptionError

from .served import Served, go_on

SHORT, LONG = [(3 * n) % 97 for n in range(20)], [(7 * n + 5) % 97 for n in range(18)]


def overwrite(served: Served, target: tuple[str, int], source: tuple[str, int], layers: tuple[str, ...]) -> None:
    """The entry of a request holds what that of another holds, in these layers."""
    (block, offset), (other, behind) = served.place(*target), served.place(*source)
    for name in layers:
        served.caches[name][block, :, offset] = served.caches[name][other, :, behind]


def running(serve: Callable[..., Served], num_blocks: int = 7, **settings: Any) -> Served:
    """Request 'first' has ended, 'late' has its blocks, and 'beside' runs."""
    served = serve(num_blocks=num_blocks, **settings)
    served.ask("first", SHORT, 3)
    served.ask("beside", LONG, 30)
    while "first" not in served.finished:
        served.step()
    served.ask("late", [(5 * n + 1) % 97 for n in range(14)], 30)
    go_on(served, 4)
    return served


def dumped(served: Served, harm: Callable[[Served], Any], steps: int = 3) -> Path:
    """The dump that a finding leaves in mode raise."""
    harm(served)
    with pytest.raises(KVCorruptionError) as raised:
        go_on(served, steps)
    assert raised.value.report is not None
    return Path(str(raised.value.report.dump))


def incident(serve: Callable[..., Served]) -> Path:
    """The dump of bytes of 'beside' that lie in a block which 'late' has from 'first'."""
    harm = lambda served: overwrite(served, ("late", 10), ("beside", 6), ("l0", "l1"))  # noqa: E731
    return dumped(running(serve), harm)
