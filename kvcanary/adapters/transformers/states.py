"""Recurrent states in dense caches: compared where a forward begins with what the last one has left.

Layers of linear attention and Mamba keep one state a row, which changes with every token. What is kept of each is how
many tokens it has absorbed, and fingerprints of its rows: whole ones under `full`, of one word in 64 under `rolling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.transformers.judging import DenseCanary, Sides, Site, dense_violation
from kvcanary.calls.violation import Violation
from kvcanary.records.fingerprints import fingerprints_of_words
from kvcanary_kernels.record.rows import WORD_BYTES

#: Layers that have a state; those whose names go on have K and V besides.
STATEFUL = (
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
)
PARTS = ("conv_states", "recurrent_states")
OF_CACHES = "linear_cache"  # a list of a cache itself, by layer, as MiniMax has it
SAMPLED = 64  # under `rolling`, one word in so many
NOT_WORDS = "recurrent states that are no whole 32-bit words"
UNFOLLOWED = "recurrent states taken as they lay"
Place = tuple[int, str]  # layer and part


def states_of(cache: Any) -> dict[Place, Tensor]:
    """By layer and part, [batch, ...]; where a layer has several of a part, each under a name of its own."""
    own = {place: tensor for number, layer in enumerate(cache.layers) for place, tensor in _states_in(number, layer)}
    of_cache = enumerate(getattr(cache, OF_CACHES, ()))
    return own | {(number, OF_CACHES): state for number, state in of_cache if isinstance(state, Tensor)}


def _states_in(number: int, layer: Any) -> Iterator[tuple[Place, Tensor]]:
    if type(layer).__name__ not in STATEFUL:
        return
    for part in PARTS:
        own = getattr(layer, part, None)
        named = own if isinstance(own, dict) else {0: own}
        for which, tensor in named.items():
            if isinstance(tensor, Tensor):
                yield (number, part if not which else f"{part}[{which}]"), tensor


class StateRows:
    """The states of one cache, as the last forward, or the last move of rows, has left them.

    absorbed: tokens that each has absorbed;  batch: rows
    is_trusted: they were there when the cache began to be watched
    """

    def __init__(self, canary: DenseCanary) -> None:
        self._canary = canary
        self._kept: dict[Place, Tensor] = {}  # [2, batch] int64
        self._phase = self.batch = 0
        self.absorbed, self.is_trusted = 0, False

    def __bool__(self) -> bool:
        return self.absorbed > 0

    @torch.no_grad()
    def keep(self, states: dict[Place, Tensor], absorbed: int) -> None:
        """They have absorbed so many tokens, and lie there until a forward begins."""
        self.absorbed, self.batch = absorbed if states else 0, max(map(len, states.values()), default=0)
        if self._canary.config.content == "write":
            return
        self._phase = (self._phase + 1) % SAMPLED
        self._kept = {place: sums for place, state in states.items() if (sums := self._sums(place, state)) is not None}
        if len(self._kept) < len(states):
            self._canary.coverage.skip(NOT_WORDS, len(states) - len(self._kept))

    def forget(self) -> None:
        self._kept, self.absorbed, self.is_trusted = {}, 0, False

    def begun(self, states: dict[Place, Tensor], length: int | None, site: Site) -> list[Violation]:
        """A forward begins: R9 of bytes that are not what was left, R4 where K and V have another ``length``."""
        self._canary.coverage.states_checked += len(states) * self.batch
        violations = self.changed(states, "R9", site)
        if length is not None and self.absorbed and length != self.absorbed:
            sides = {"absorbed": length}, {"absorbed": self.absorbed}
            layers = tuple(sorted({layer for layer, _ in states}))
            message = "recurrent states and the rows of K and V go on from different lengths"
            violations.append(dense_violation("R4", layers, 0, length, site, sides, message=message))
        return violations

    def selected(self, rows: Tensor, states: dict[Place, Tensor]) -> list[Violation]:
        """Row i is what row ``rows[i]`` was: T1 of states that were not moved with the others."""
        self._kept = {place: kept.index_select(1, rows.to(kept.device)) for place, kept in self._kept.items()}
        self.batch = len(rows)
        return self.changed(states, "T1", ("move", 0))

    def are_changed(self, states: dict[Place, Tensor]) -> bool:
        """Whether other bytes lie there than were left."""
        return bool(self.changed(states, "R9", ("move", 0)))

    @torch.no_grad()
    def changed(self, states: dict[Place, Tensor], code: str, site: Site) -> list[Violation]:
        """The first wrong row of each state."""
        violations = []
        for place, kept in self._kept.items():
            found = self._sums(place, states[place]) if place in states else None
            if found is not None and torch.equal(found, kept):
                continue
            violations.append(self._violation(place, kept, found, code, site))
        return violations

    def _violation(self, place: Place, kept: Tensor, found: Tensor | None, code: str, site: Site) -> Violation:
        layer, part = place
        if found is None or found.shape != kept.shape:
            sides: Sides = {"rows": kept.shape[1]}, {"rows": 0 if found is None else found.shape[1]}
            return dense_violation(code, (layer,), 0, self.absorbed, site, sides, message=f"{part} of layer {layer}")
        row = int((found != kept).any(0).nonzero()[0])
        same = (kept == found[:, row : row + 1]).all(0).nonzero().flatten().tolist()
        sides = (
            {"row": row, "part": part},
            {"row": same[0] if same else None, "wrong_rows": int((found != kept).any(0).sum())},
        )
        return dense_violation(code, (layer,), row, self.absorbed, site, sides, message=f"{part} of layer {layer}")

    def _sums(self, place: Place, state: Tensor) -> Tensor | None:
        """Both fingerprints [2, batch]; None where a row is no whole words."""
        rows = state.detach().reshape(len(state), -1)
        if rows.shape[1] * rows.element_size() % WORD_BYTES:
            return None
        words = rows.contiguous().view(torch.int32)
        self._canary.coverage.bytes_checked += words.nbytes
        if self._canary.config.content == "rolling":
            words = words[:, self._phase % max(1, min(SAMPLED, words.shape[1])) :: SAMPLED].contiguous()
        keys = self._canary.keys(place[0], words.shape[1], words.device)
        return torch.stack(fingerprints_of_words(keys, place[0], words))
