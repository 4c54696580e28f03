"""Text to token ids and back, over a Hugging Face tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from spec_engine.errors import ConfigError
from spec_engine.models.config import CheckpointError, load_config, read_json

UNFINISHED = "\ufffd"  # what a decoder shows for the first bytes of a character whose rest has not come yet


class Tokenizer:
    """Encodes prompts, decodes outputs; ``eos_ids`` are the tokens that end a text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``; the ids that end a text come from the model's configuration."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"a checkpoint folder must hold tokenizer.json, {folder} does not")
        read_json(path)
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers package raises bare Exceptions
            raise CheckpointError(f"{path} must describe a tokenizer ({error}): fetch it again") from None
        return cls(tokenizer, load_config(folder).eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """ConfigError for half of a surrogate pair, as an argument that is no UTF-8 has it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"a text must be Unicode, got {text[error.start]!r} as character {error.start}", "pass UTF-8 text"
            ) from None
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text

    def stream(self) -> DecodedStream:
        """A fresh decoder of one output, token by token."""
        return DecodedStream(self._tokenizer)


class DecodedStream:
    """`TextStream` by the tokenizers package itself, whose decoder keeps no more than the tokens of the last piece."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_shown = 0

    def push(self, token_ids: Sequence[int], final: bool = False) -> str:
        """The text that these tokens add; an unfinished character waits, unless they are the last."""
        self._ids += token_ids
        text = (self._stream.step(self._tokenizer, list(token_ids)) if token_ids else None) or ""
        if final:
            text = self._tokenizer.decode(self._ids)[self._num_shown :]
        self._num_shown += len(text)
        return text


class TextStream:
    """Turns tokens into text as they come: the pieces add up to the decoded whole, and no character comes in halves.

    Decoding starts at the tokens of the piece before, since a tokenizer may write a word's space with its neighbour.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context, self._shown = 0, 0  # tokens [context, shown) were the last piece

    def push(self, token_ids: Sequence[int], final: bool = False) -> str:
        """The text that these tokens add; an unfinished character waits, unless they are the last."""
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        text = self._tokenizer.decode(self._ids[self._context :])
        if text.endswith(UNFINISHED) and not final:
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(before) :]
