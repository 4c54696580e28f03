"""Models without weights, for tests: what follows is known beforehand, and acceptance is whatever is asked for."""

from spec_engine.mock.draft import MockDraft
from spec_engine.mock.known import KnownDraft, KnownText, known_text
from spec_engine.mock.oracle import TokenOracle
from spec_engine.mock.random_model import random_model, with_random_weights
from spec_engine.mock.target import MockModel
from spec_engine.mock.tokenizer import MockTokenizer

__all__ = [
    "KnownDraft",
    "KnownText",
    "MockDraft",
    "MockModel",
    "MockTokenizer",
    "TokenOracle",
    "known_text",
    "random_model",
    "with_random_weights",
]
