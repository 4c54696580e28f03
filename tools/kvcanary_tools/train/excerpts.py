"""Held-out prompts that ship with the package: they end after a complete line inside a function or class."""

from __future__ import annotations

import io
import random
import re
import tokenize
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvcanary_tools.train.corpus import SourceFile, read_archive

NUM_EXCERPTS = 120
NUM_SHOWN = 20
PROMPT_TOKENS = (150, 400)
CONTINUATION_TOKENS = 256

# Tables and samples of text rather than code.
_DATA = re.compile(
    r"(^|/)(encodings/|pydoc_data/|test/cjkencodings|lib2to3/tests/data|.*topics\.py|.*(_data|_tests?cases)\.py)"
)
_LIBRARY = re.compile(r"^(?!test/|.*/tests?/|idlelib/|lib2to3/|turtledemo/)")


def choose_excerpts(archive: Path, tokenizer: Tokenizer, count: int = NUM_EXCERPTS) -> list[dict[str, Any]]:
    """`count` prompts with their true continuation.

    The first NUM_SHOWN come from library modules, for demos and benchmarks; the rest from all held-out code.
    No file gives a second prompt to a part before every other gave its first.
    """
    files = [file for file in read_archive(archive) if file.held_out and file.text and not _DATA.search(file.path)]
    files.sort(key=lambda file: file.sha256)
    queues = {file.path: list(_file_excerpts(file, tokenizer)) for file in files}
    shown = _round_robin([queues[file.path] for file in files if _LIBRARY.match(file.path)])[:NUM_SHOWN]
    rest = _round_robin([[excerpt for excerpt in queue if excerpt not in shown] for queue in queues.values()])
    return (shown + rest)[:count]


def top_level_starts(text: str) -> list[int]:
    """Offsets of the lines at which a top-level def or class (with its decorators) begins."""
    return [match.start() for match in re.finditer(r"^(?:@.*\n)*(?:async def|def|class)\b", text, re.MULTILINE)]


def complete_line_ends(code: str) -> list[int]:
    """Offsets after each line at which a logical line ends, as Python's own tokenizer sees it."""
    lines = code.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    ends = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.NEWLINE and token.string:
                ends.append(offsets[token.end[0]])
    except (tokenize.TokenError, SyntaxError):
        pass  # the code stops in the middle of something; what came before still counts
    return ends


def _file_excerpts(file: SourceFile, tokenizer: Tokenizer):
    text = file.text or ""
    pick = random.Random(file.sha256)
    starts = top_level_starts(text)
    pick.shuffle(starts)
    for start in starts:
        piece = text[start : start + 6000]
        wanted = pick.randint(*PROMPT_TOKENS)
        for end in complete_line_ends(piece):
            following = piece[end:].lstrip("\n")
            inside = following[:1] in (" ", "\t")
            num_tokens = len(tokenizer.encode(piece[:end], add_special_tokens=False).ids) if inside else 0
            if num_tokens > PROMPT_TOKENS[1]:
                break
            if num_tokens >= wanted:
                ids = tokenizer.encode(piece[end:], add_special_tokens=False).ids[:CONTINUATION_TOKENS]
                if len(ids) == CONTINUATION_TOKENS:
                    yield {
                        "file": file.path,
                        "sha256": file.sha256,
                        "prompt": piece[:end],
                        "continuation": tokenizer.decode(ids),
                    }
                break


def _round_robin(queues: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    longest = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]
