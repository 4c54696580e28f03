"""Token ids as text: `5 17 3`."""

from __future__ import annotations

from collections.abc import Sequence

from spec_engine.models.tokenizer import TextStream


class MockTokenizer:
    """The interface of a Tokenizer; nothing ends a text."""

    eos_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in token_ids)

    def stream(self) -> TextStream:
        return TextStream(self)
