"""Where an output ends inside the tokens that a step accepted: EOS, stop ids, stop strings, the longest output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from spec_engine.sampling import SamplingParams


class TextDecoder(Protocol):
    """Turns tokens into text as they come, as `spec_engine.models.tokenizer.TextStream` does."""

    def push(self, token_ids: Sequence[int], final: bool = False) -> str: ...


@dataclass(frozen=True)
class Kept:
    """How many of the tokens offered belong to the output, which text may be shown now, and why it ends, if it does.

    A token of EOS or of the stop ids is not kept; those of a stop string are, and its text is not.
    """

    num_tokens: int
    text: str
    finish_reason: str | None = None  # "stop" or "length"


class StopScan:
    """Reads one request's output as it is accepted; nothing may be offered once it has ended.

    How the output is cut does not depend on how many tokens come at a time. Text that could be the beginning of a
    stop string is held back until it is known not to be; where stop strings overlap, the first to end counts.
    """

    def __init__(self, params: SamplingParams, eos_ids: Sequence[int], decoder: TextDecoder) -> None:
        self._stop_ids = {*params.stop_token_ids} | (set() if params.ignore_eos else {*eos_ids})
        self._stops = params.stop
        self._left = params.max_new_tokens
        self._decoder = decoder
        self._held = ""
        self.num_shown = 0  # characters of text so far

    def push(self, token_ids: Sequence[int]) -> Kept:
        """Offer the tokens that one step accepted, in order."""
        kept = self._keep(token_ids)
        self.num_shown += len(kept.text)
        return kept

    def close(self) -> str:
        """The text still held back, for an output that is ended from outside."""
        return self._end()[0]

    def _keep(self, token_ids: Sequence[int]) -> Kept:
        kept, reason = self._cut(token_ids)
        text, at_once = "", 1 if self._stops else max(1, len(kept))
        for start in range(0, len(kept), at_once):
            shown, stopped = self._show(self._decoder.push(kept[start : start + at_once]))
            text += shown
            if stopped:
                return Kept(start + 1, text, "stop")
        if reason is None:
            return Kept(len(kept), text)
        shown, stopped = self._end()
        return Kept(len(kept), text + shown, "stop" if stopped else reason)

    def _end(self) -> tuple[str, bool]:
        shown, stopped = self._show(self._decoder.push([], final=True))
        held, self._held = self._held, ""
        return shown + held, stopped

    def _cut(self, token_ids: Sequence[int]) -> tuple[list[int], str | None]:
        """Tokens up to the first that ends the output by its id or its number."""
        kept: list[int] = []
        for token in token_ids:
            if token in self._stop_ids:
                return kept, "stop"
            kept.append(token)
            self._left -= 1
            if not self._left:
                return kept, "length"
        return kept, None

    def _show(self, piece: str) -> tuple[str, bool]:
        """What may be shown after ``piece``, and whether a stop string ended it."""
        text, self._held = self._held + piece, ""
        start = _first_stop(text, self._stops)
        if start is not None:
            return text[:start], True
        shown = len(text) - _held_len(text, self._stops)
        self._held = text[shown:]
        return text[:shown], False


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that ends first; the longest of those that end together."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _held_len(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which a stop string begins."""
    longest = max((len(stop) for stop in stops), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
