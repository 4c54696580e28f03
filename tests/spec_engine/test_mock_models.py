"""The oracle knows every token; the mock target follows it unless attention errs; the mock draft errs on demand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_engine.mock import MockDraft, MockModel, MockTokenizer, TokenOracle, random_model
from spec_engine.models import CheckpointError

ORACLE = TokenOracle(7, 211)
PROMPT = [17, 5, 99]


def splitmix64(x: int) -> int:
    """The finaliser in plain whole numbers modulo 2**64."""
    word = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & word
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
    return x ^ (x >> 31)


def test_tokens_are_the_published_hash() -> None:
    """SplitMix64 of the request, then of the position, read as a signed number, modulo the vocabulary."""
    for request, position in ((0, 0), (17, 3), (210, 4095)):
        mixed = splitmix64(splitmix64(request + splitmix64(7)) + position)
        wanted = (mixed - (1 << 64) if mixed >> 63 else mixed) % 211
        assert ORACLE.tokens(torch.tensor(request), torch.tensor(position)).item() == wanted


def test_requests_positions_and_seeds_all_count() -> None:
    """Over 2,000 positions every token occurs, and another request or seed agrees about once in 211."""
    positions = torch.arange(2000)
    one = ORACLE.tokens(torch.full((2000,), 3), positions)
    assert one.unique().numel() == 211
    for other in (ORACLE.tokens(torch.full((2000,), 4), positions), TokenOracle(8, 211).tokens(one * 0 + 3, positions)):
        assert (one == other).sum() < 40


def test_wrong_tokens_are_named_by_position() -> None:
    """A forward's input is compared with prompt and oracle, wherever it begins."""
    truth = PROMPT + ORACLE.continuation(PROMPT, 4)
    assert ORACLE.wrong(PROMPT, 1, truth[1:6]) == []
    assert ORACLE.wrong(PROMPT, 1, [truth[1], 0, truth[3], (truth[4] + 1) % 211]) == [2, 4]
    with pytest.raises(ValueError, match="vocab_size must be at least 2, got 1"):
        TokenOracle(0, 1)


class DenseKV:
    """One sequence, kept whole; `spoil` may change what is read of a layer: keys and values [rows, 4]."""

    def __init__(self, spoil=None) -> None:
        self.rows: list[list[Tensor]] = []
        self.spoil = spoil or (lambda layer, k, v: (k, v))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == len(self.rows):
            self.rows.append([k[:0, 0], v[:0, 0]])
        before = len(self.rows[layer][0])
        self.rows[layer] = [torch.cat((old, new[:, 0])) for old, new in zip(self.rows[layer], (k, v), strict=True)]
        out = []
        for token in range(len(q)):
            keys, values = self.spoil(layer, *(part[: before + token + 1] for part in self.rows[layer]))
            out.append((q[token] @ keys.T / 2).softmax(-1) @ values)
        return torch.stack(out)


def choices(kv: DenseKV, dtype=torch.float64, length: int = 40) -> list[int]:
    """What the mock target chooses after each token of a true sequence, in two forwards."""
    model, tokens = MockModel(ORACLE, dtype=dtype), torch.tensor(PROMPT + ORACLE.continuation(PROMPT, length - 3))
    half = length // 2
    hidden = [
        model(part, at, kv).hidden
        for part, at in zip(tokens.split(half), torch.arange(length).split(half), strict=True)
    ]
    return model.logits(torch.cat(hidden)).argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_target_chooses_what_the_oracle_says(dtype: torch.dtype) -> None:
    """After every token past the prompt the choice is the oracle's, with next to all of the probability."""
    assert choices(DenseKV(), dtype)[2:] == ORACLE.continuation(PROMPT, 38)


def swapped(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = v.clone()
    v[20, 0] += 1
    return k, v


SPOILT = {
    "a row is left out": lambda k, v: (torch.cat((k[:20], k[21:])), torch.cat((v[:20], v[21:]))),
    "a row is read twice": lambda k, v: (torch.cat((k, k[20:21])), torch.cat((v, v[20:21]))),
    "the null slot is read": lambda k, v: (torch.cat((k, k[:1] * 0)), torch.cat((v, v[:1] * 0))),
    "the first row is left out": lambda k, v: (k[1:], v[1:]),
    "a row holds another token": swapped,
    "a row is poisoned": lambda k, v: (k, torch.cat((v[:20], v[20:21] * torch.nan, v[21:]))),
    "the rows are another layer's": lambda k, v: (k, v + torch.eye(8)[3]),
}


COARSE = "a row holds another token"  # a mean of token ids is too coarse for it in float32


@pytest.mark.parametrize(
    ("what", "dtype"),
    [(what, torch.float64) for what in SPOILT] + [(what, torch.float32) for what in SPOILT if what != COARSE],
)
def test_one_wrong_row_changes_the_choice(what: str, dtype: torch.dtype) -> None:
    """When one row of the second layer is wrong, every choice from there on is another token than the oracle's."""

    def spoil(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return SPOILT[what](k, v) if layer == 1 and len(k) > 30 else (k, v)

    spoilt, truth = choices(DenseKV(spoil), dtype), choices(DenseKV(), dtype)
    assert spoilt[:30] == truth[:30]
    assert all(one != other for one, other in zip(spoilt[30:], truth[30:], strict=True))


def test_half_precision_is_refused() -> None:
    """Token ids above 256 are no bfloat16 numbers."""
    with pytest.raises(CheckpointError, match=r"dtype must be float32 or float64, got torch\.bfloat16: token ids"):
        MockModel(ORACLE, dtype=torch.bfloat16)


def draft_levels(
    draft: MockDraft, target: MockModel, levels: int, stray: int | None = None
) -> tuple[list[list[int]], list[float]]:
    """The two likeliest candidates of each level and the likeliest's probability, on the truth up to level `stray`."""
    tokens, kv = torch.tensor(PROMPT), DenseKV()
    features = draft.features(target(tokens, torch.arange(3), DenseKV()))
    bonus, *truth = ORACLE.continuation(PROMPT, levels + 1)
    hidden = draft(torch.tensor([*PROMPT[1:], bonus]), features, torch.arange(3), kv)[-1:]
    proposed, tops = [], []
    for level in range(levels):
        probs, ids = draft.logits(hidden).softmax(-1).topk(2)
        proposed.append(ids[0].tolist())
        tops.append(probs[0, 0].item())
        token = torch.tensor([truth[level] if level != stray else (truth[level] + 1) % 211])
        hidden = draft(token, hidden, torch.tensor([3 + level]), kv)
    return proposed, tops


@pytest.mark.parametrize("accept_len", [1, 2, 3, 5])
@pytest.mark.parametrize("by_function", [False, True])
def test_the_draft_is_right_for_as_many_levels_as_it_is_told(accept_len: int, by_function: bool) -> None:
    """The true token leads the first accept_len - 1 levels with over 0.999, and is no candidate afterwards."""
    asked = []
    given = (lambda *place: asked.append(place) or accept_len) if by_function else accept_len
    target = MockModel(ORACLE)
    levels, tops = draft_levels(MockDraft(target, given), target, 4)
    truth = ORACLE.continuation(PROMPT, 5)[1:]
    right = min(accept_len - 1, 4)
    assert [ids[0] for ids in levels[:right]] == truth[:right]
    assert all(top > 0.999 for top in tops[:right])
    assert not any(truth[level] in levels[level] for level in range(right, 4))
    assert set(asked) == ({(17, 3)} if by_function else set())


def test_a_branch_that_left_the_truth_stays_wrong() -> None:
    """Below a wrong token no candidate is the true one."""
    target = MockModel(ORACLE)
    levels, _ = draft_levels(MockDraft(target, 9), target, 5, stray=1)
    truth = ORACLE.continuation(PROMPT, 6)[1:]
    assert [truth[i] in levels[i] for i in range(5)] == [True, True, False, False, False]


def test_features_of_another_position_are_noticed() -> None:
    """A draft fed hidden states that are one position off proposes nothing true."""
    target, tokens = MockModel(ORACLE), torch.tensor(PROMPT)
    draft, features = MockDraft(target, 9), target(torch.tensor(PROMPT), torch.arange(3), DenseKV()).hidden
    hidden = draft(tokens, features.roll(1, 0), torch.arange(3), DenseKV())
    truth = ORACLE.tokens(torch.full((3,), 17), torch.arange(2, 5))
    assert not (draft.logits(hidden).argmax(-1) == truth).any()


def test_a_draft_that_reads_a_wrong_row_proposes_nothing_true() -> None:
    """When the draft's own attention leaves out a row, its proposals miss, and so do those of its descendants."""
    target = MockModel(ORACLE)
    draft, kv = MockDraft(target, 9), DenseKV(lambda layer, k, v: (k[:-1], v[:-1]) if len(k) == 4 else (k, v))
    bonus, *truth = ORACLE.continuation(PROMPT, 4)
    features = target(torch.tensor(PROMPT), torch.arange(3), DenseKV()).hidden
    hidden = draft(torch.tensor([*PROMPT[1:], bonus]), features, torch.arange(3), kv)[-1:]
    right = []
    for level in range(3):
        right.append(draft.logits(hidden).argmax().item() == truth[level])
        hidden = draft(torch.tensor([truth[level]]), hidden, torch.tensor([3 + level]), kv)
    assert right == [True, False, False]


def test_an_impossible_accept_len_is_refused() -> None:
    """A verify emits at least one token."""
    with pytest.raises(ValueError, match="accept_len must be at least 1, got 0: a verify always emits"):
        MockDraft(MockModel(ORACLE), 0)


def test_tokens_as_text() -> None:
    """The mock tokenizer writes ids and reads them back, piece by piece too."""
    tokenizer = MockTokenizer()
    stream = tokenizer.stream()
    text = stream.push([5, 17]) + stream.push([3], final=True)
    assert text == "5 17 3 "
    assert tokenizer.encode(text) == [5, 17, 3]


@torch.no_grad()
def test_a_random_model_is_what_its_seed_says() -> None:
    """Same seed, same weights; another seed, others; scaled logits make it sure of its choice."""
    one, same, other = random_model(1), random_model(1), random_model(2)
    assert all(a.equal(b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not one.embed_weight.equal(other.embed_weight)
    assert (one.embed_weight.dtype, len(one.layers)) == (torch.float64, 2)
    hidden = torch.randn(500, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    top = random_model(1, logit_scale=20.0).logits(hidden).softmax(-1).max(-1).values
    assert top.median() > 0.9
