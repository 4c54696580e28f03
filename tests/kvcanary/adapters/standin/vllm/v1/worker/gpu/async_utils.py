"""The output of a step that is on its way."""

from __future__ import annotations


class AsyncOutput:
    def __init__(self, tokens: dict[str, list[int]]) -> None:
        self.tokens = tokens

    def get_output(self) -> dict[str, list[int]]:
        return self.tokens
