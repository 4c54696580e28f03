"""Where an output ends, against a plain oracle that sees the whole output at once."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_engine import SamplingParams
from spec_engine.acceptance.stops import Kept, StopScan
from spec_engine.models.embedded import EMBEDDED_MODEL
from spec_engine.models.tokenizer import Tokenizer

WORDS = ["a", "b", "ab", "ba", "aab", "c", "", "bb"]  # of token 0, 1, ...
EOS = 90


class Words:
    """A decoder of tokens that are words; ``slow`` holds the last token's text back until more comes."""

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow
        self.late = ""

    def push(self, token_ids, final: bool = False) -> str:
        text = self.late + "".join(WORDS[token] for token in token_ids)
        self.late = text[-1:] if self.slow and not final else ""
        return text[: len(text) - len(self.late)]


def scan(tokens, sizes, slow=False, **settings) -> tuple[list[int], str, str | None]:
    """Tokens kept, text shown and finish reason, of tokens offered in groups."""
    scan = StopScan(SamplingParams(**settings), (EOS,), Words(slow))
    kept, text, at = [], "", 0
    for size in [*sizes, len(tokens)]:
        offered = tokens[at : at + size]
        result = scan.push(offered)
        kept, text, at = kept + offered[: result.num_tokens], text + result.text, at + size
        if result.finish_reason:
            return kept, text, result.finish_reason
    return kept, text + scan.close(), None


def expected(tokens, stop=(), max_new_tokens=64, stop_token_ids=(), ignore_eos=False):
    """The same from the whole output: its end by ids and number, then the earliest end of a stop string in it."""
    ends = {*stop_token_ids} | (set() if ignore_eos else {EOS})
    kept, reason = [], None
    for token in tokens:
        if token in ends or len(kept) == max_new_tokens:
            break
        kept.append(token)
    if len(kept) == max_new_tokens:
        reason = "length"
    elif len(kept) < len(tokens):
        reason = "stop"
    text = "".join(WORDS[token] for token in kept)
    for end in range(len(text) + 1):
        starts = [end - len(word) for word in stop if text[:end].endswith(word)]
        if starts:
            while len("".join(WORDS[token] for token in kept[:-1])) >= end:
                kept.pop()
            return kept, text[: min(starts)], "stop"
    return kept, text, reason


@settings(deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.sampled_from([*range(len(WORDS)), EOS, 91]), max_size=12),
    sizes=st.lists(st.integers(0, 4), max_size=6),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
    max_new_tokens=st.integers(1, 12),
    stop_token_ids=st.sampled_from([(), (91,)]),
    ignore_eos=st.booleans(),
)
def test_the_cut_is_that_of_the_whole_output(tokens, sizes, **settings):
    """However the tokens are grouped: the same tokens are kept, the same text is shown, for the same reason."""
    tokens = [token for token in tokens if token < len(WORDS) or token in (EOS, *settings["stop_token_ids"])]
    if settings["ignore_eos"]:
        tokens = [token for token in tokens if token != EOS]
    assert scan(tokens, sizes, **settings) == expected(tokens, **settings)


@settings(deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.sampled_from(range(len(WORDS))), max_size=12),
    sizes=st.lists(st.integers(0, 4), max_size=6),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
    max_new_tokens=st.integers(1, 12),
)
def test_a_decoder_that_holds_text_back_changes_no_text(tokens, sizes, **settings):
    """Late text costs at most further tokens: what is shown, and why it ends, stays the same."""
    _, text, reason = scan(tokens, sizes, slow=True, **settings)
    _, own_text, own_reason = expected(tokens, **settings)
    assert text == own_text
    assert reason in (own_reason, None) or own_reason is None


def push(*groups, **settings) -> list[Kept]:
    scan = StopScan(SamplingParams(**settings), (EOS,), Words())
    return [scan.push(group) for group in groups]


def test_text_waits_while_it_could_begin_a_stop_string():
    """ "a" may become "abc"; "b" behind it is no stop yet, "a" again shows that it was none."""
    assert push([0], [1], [0], stop="abc") == [Kept(1, ""), Kept(1, ""), Kept(1, "ab")]
    assert push([0], [1, 5, 0], stop="abc") == [Kept(1, ""), Kept(2, "", "stop")]


def test_a_stop_inside_an_accepted_chain_keeps_the_tokens_through_it():
    """What was accepted behind the stop belongs to nobody."""
    assert push([0, 1, 5, 3, 3], stop=("bc",)) == [Kept(3, "a", "stop")]
    assert push([0, EOS, 3]) == [Kept(1, "a", "stop")]
    assert push([0, 0, 3], max_new_tokens=2) == [Kept(2, "aa", "length")]


def test_the_stop_string_that_ends_first_counts():
    """Also where one token completes both: how text was cut into tokens does not matter."""
    assert push([4], stop=("aab", "a")) == [Kept(1, "", "stop")]
    assert push([0, 0, 1], stop=("aab", "ab")) == [Kept(3, "", "stop")]


def test_text_held_back_is_shown_at_the_end():
    """An output that ends before the stop string does not lose its last characters."""
    assert push([0], [EOS], stop="abc") == [Kept(1, ""), Kept(0, "a", "stop")]
    assert push([0], [1], stop="abc", max_new_tokens=2) == [Kept(1, ""), Kept(1, "ab", "length")]


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_stop_string_is_found_in_real_tokens(size):
    """Over the tokenizer of the embedded model, through a character of several tokens, in groups of any size."""
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    ids = tokenizer.encode("def f(x):\n    return '\u4e16\u754c'\n\ndef g(x):\n    pass\n")
    scan = StopScan(SamplingParams(stop="\n\ndef", ignore_eos=True), (), tokenizer.stream())
    text, reason = "", None
    for at in range(0, len(ids), size):
        if reason is None:
            kept = scan.push(ids[at : at + size])
            text, reason = text + kept.text, kept.finish_reason
    assert (text, reason) == ("def f(x):\n    return '\u4e16\u754c'", "stop")


@pytest.mark.parametrize("stop", [(), ("abc",)])
def test_a_step_without_tokens_does_not_touch_the_decoder(stop):
    """A decoder may forget the words before when nothing is pushed; an output that goes on must not."""
    decoder = mock.Mock(push=mock.Mock(return_value="a"))
    scan = StopScan(SamplingParams(stop=stop), (), decoder)
    assert scan.push([]) == Kept(0, "")
    assert not decoder.push.called
