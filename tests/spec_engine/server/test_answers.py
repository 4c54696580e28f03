"""Shapes that a running server rarely makes: log-probabilities of minus infinity, halves of characters, trees."""

from __future__ import annotations

import json
import math

from spec_engine.acceptance.logprobs import TokenLogProb
from spec_engine.models.embedded import EMBEDDED_MODEL
from spec_engine.models.tokenizer import Tokenizer
from spec_engine.request import TokenEvent
from spec_engine.server.answers import LEAST_LOGPROB, Chats, Completions
from spec_engine.server.inspection.drafts import _accepted


def test_log_probabilities_are_json() -> None:
    """Minus infinity becomes the number that OpenAI has for it; half a character has no bytes."""
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    half = tokenizer.encode("\u4e16")[0]
    entry = TokenLogProb(half, -math.inf, ((half, -math.inf),))
    event = TokenEvent("req-0", (half,), "", None, (entry,))
    for shapes in (Completions("m", tokenizer), Chats("m", tokenizer)):
        text = json.dumps(shapes.chunk(0, event, 0), allow_nan=False)
        assert str(LEAST_LOGPROB) in text
    chat = Chats("m", tokenizer).chunk(0, event, 0)["choices"][0]
    assert chat["logprobs"]["content"][0]["bytes"] is None
    assert chat["delta"] == {"content": ""}


def test_the_path_that_was_taken() -> None:
    """Nodes whose tokens the request went on with, from the root; a right token below a wrong one is not on it."""
    #         0
    #       1   2
    #      3   4 5      tokens by node
    tokens, parents, depths = [7, 8, 9, 5, 5, 6], [-1, 0, 0, 1, 2, 2], [0, 1, 1, 2, 2, 2]
    assert _accepted(tokens, parents, depths, [7, 9, 5, 1]) == {0, 2, 4}
    assert _accepted(tokens, parents, depths, [7, 9]) == {0, 2}
    assert _accepted(tokens, parents, depths, [7, 1, 5]) == {0}
