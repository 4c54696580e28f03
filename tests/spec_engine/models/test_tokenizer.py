"""Text survives the tokenizer, and streamed text never shows half a character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_engine.errors import ConfigError
from spec_engine.models import CheckpointError
from spec_engine.models.embedded import EMBEDDED_MODEL
from spec_engine.models.tokenizer import Tokenizer

TEXTS = [
    "",
    "def f(x):\n    return x\n",
    "\n\n\t mixed \r\n  indents   \n",
    "naïve = 'h\u00e9llo \u4e16\u754c \U0001f40d' # \u2713\n",
    "x" * 300,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(EMBEDDED_MODEL)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Decoding what was encoded gives the text back, whitespace and all."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_character_is_refused(tokenizer: Tokenizer) -> None:
    """The sentence names it, its place and the remedy; the tokenizers package would not."""
    with pytest.raises(ConfigError, match=r"a text must be Unicode, got '\\udcff' as character 1") as refused:
        tokenizer.encode("x\udcff")
    assert refused.value.hint == "pass UTF-8 text"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_streaming_adds_up(tokenizer: Tokenizer, text: str, size: int) -> None:
    """Pieces streamed token by token join to the whole, and none ends in half a character."""
    ids, stream = tokenizer.encode(text), tokenizer.stream()
    pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_shown_when_the_text_ends(tokenizer: Tokenizer) -> None:
    """What is left of a character at the end of the output appears as its replacement mark, once."""
    ids = tokenizer.encode("a\u4e16")[:-1]
    stream = tokenizer.stream()
    shown = [stream.push([token]) for token in ids]
    assert "".join(shown) == "a"
    assert stream.push([], final=True) == "\ufffd"


def test_a_newline_is_always_its_own_token(tokenizer: Tokenizer) -> None:
    """A prompt may end after any line: its tokens begin those of every text that goes on from there."""
    head, tail = "if x:\n", "\n\n        y = 1\n"
    ids = tokenizer.encode(head)
    assert tokenizer.encode(head + tail)[: len(ids)] == ids


def test_end_of_text(tokenizer: Tokenizer) -> None:
    """The end-of-text token is one token, and the one that ends a text."""
    assert tokenizer.encode("<|endoftext|>") == list(tokenizer.eos_ids) == [0]


def test_chat_template_is_there() -> None:
    """tokenizer_config.json carries a chat template and the special tokens."""
    config = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    assert "messages" in config["chat_template"]
    assert config["eos_token"] == "<|endoftext|>"


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """The missing file is named."""
    with pytest.raises(CheckpointError, match=r"must hold tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"model": ', r"tokenizer\.json must be JSON"),
        ('{"model": {"type": "BPE"}}', r"tokenizer\.json must describe a tokenizer \(.*\): fetch it again$"),
    ],
)
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: str, words: str) -> None:
    """A tokenizer.json that is cut off, or is no tokenizer, ends in a sentence."""
    (tmp_path / "config.json").write_bytes((EMBEDDED_MODEL / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_folder(tmp_path)
