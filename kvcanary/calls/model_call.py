"""ModelCall: a forward as the rules of its write plan take it, whether the host saw it run or the device reported
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvcanary.calls.forward import Ints, Planned, Refused
from kvcanary.ledger.ledger import Request
from kvcanary.records.state import PoolState


class ModelCall(Protocol):
    """What `Forward` and `DecodedForward` have in common; their docstrings say what each of these is."""

    @property
    def kind(self) -> str: ...

    @property
    def site(self) -> tuple[str, int]: ...

    @property
    def pool(self) -> PoolState: ...

    @property
    def step(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def planned(self) -> Planned: ...

    @property
    def refused(self) -> Refused | None: ...

    @property
    def slot_names(self) -> Ints: ...

    @property
    def written(self) -> list[int]: ...

    @property
    def begins(self) -> list[int]: ...

    @property
    def parents(self) -> list[int] | None: ...

    @property
    def tree_mask(self) -> Tensor | None: ...

    def request_of(self, row: int) -> Request: ...
