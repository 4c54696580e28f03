"""The engine on mock models: every token of every forward has a truth, and each accepted length can be forced."""

from __future__ import annotations

import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine.mock import MockDraft, MockModel, MockTokenizer, TokenOracle
from spec_engine.step.hooks import Forwards

ORACLE = TokenOracle(3, 997)
PROMPTS = [[11, 4, 8, 15, 16, 23, 42], [12, 4], [13, *range(50, 83)]]  # first tokens tell the requests apart
SETTINGS = {"dtype": "float64", "max_total_tokens": 4096, "context_length": 256, "prefill_chunk_tokens": 16}


def mock_engine(accept_len=None, **settings) -> Engine:
    """An engine on a MockModel, with a MockDraft where `accept_len` says how right it is."""
    target = MockModel(ORACLE)
    config = EngineConfig(draft="none" if accept_len is None else "auto", **(SETTINGS | settings))
    draft = None if accept_len is None else MockDraft(target, accept_len)
    return Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())


def generate(engine: Engine, count: int) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(PROMPTS, SamplingParams(max_new_tokens=count))]


def truth(count: int) -> list[list[int]]:
    return [ORACLE.continuation(prompt, count) for prompt in PROMPTS]


def test_without_drafting_the_oracle_speaks() -> None:
    """Chunked prefill and plain decoding emit exactly the oracle's tokens."""
    assert generate(mock_engine(), 20) == truth(20)


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 1), (1, 4), (3, 3), (4, 4)])
@pytest.mark.parametrize("page_size", [1, 8])
def test_every_accepted_length_can_be_forced(page_size: int, topk: int, num_steps: int) -> None:
    """With accept_len 1 to T + 1 every verify emits just so many tokens, and the tokens are the oracle's."""
    for accept_len in range(1, num_steps + 2):
        engine = mock_engine(
            accept_len,
            page_size=page_size,
            topk=topk,
            num_steps=num_steps,
            num_draft_tokens=num_steps + 1,
            canary=CanaryConfig(mode="raise"),
        )
        count = 1 + 4 * accept_len  # the prefill's token, then four whole steps
        assert generate(engine, count) == truth(count)
        assert engine.metrics.accepted_length == accept_len
        assert engine.canary.certificate()["findings"] == []


def test_each_request_and_step_has_its_own_length() -> None:
    """accept_len may be a function: one request takes 1 token a step, one 4, one now this and now that."""
    lens = {11: lambda at: 1, 12: lambda at: 4, 13: lambda at: 1 + at % 3}
    engine = mock_engine(lambda request, at: lens.get(request, lens[11])(at), topk=2, num_steps=3)
    steps: dict[str, list[int]] = {}
    for event in engine.stream(PROMPTS, SamplingParams(max_new_tokens=13)):
        steps.setdefault(event.request_id, []).append(len(event.token_ids))
    assert steps["req-0"] == [1] * 13
    assert steps["req-1"] == [1, 4, 4, 4]
    at, wanted = 34, [1]
    while sum(wanted) < 13:
        wanted.append(min(1 + at % 3, 13 - sum(wanted)))
        at += 1 + at % 3
    assert steps["req-2"] == wanted


def test_every_forward_is_fed_the_truth(monkeypatch) -> None:
    """With a draft that is always right, K = 1, each token of each forward of both pools is the oracle's."""
    engine = mock_engine(5, page_size=4, topk=1, num_steps=4)
    seen, inner = {"target": 0, "draft": 0}, Forwards.open

    def open_and_judge(forwards: Forwards, batch):
        pool, first = forwards.pool, 0
        width = batch.rows_per_request
        for row, count in enumerate(batch.new_lens):
            prompt = PROMPTS[int(batch.requests[row // width].removeprefix("req-"))]
            positions, tokens = (part[first : first + count].tolist() for part in (batch.positions, batch.tokens))
            assert positions == list(range(positions[0], positions[0] + count))
            assert ORACLE.wrong(prompt, positions[0] + pool.token_offset, tokens) == []
            first += count
            seen[pool.name] += count
        return inner(forwards, batch)

    monkeypatch.setattr(Forwards, "open", open_and_judge)
    assert generate(engine, 21) == truth(21)
    assert seen["target"] >= 43 + 3 * 4 * 5
    assert seen["draft"] >= 43 + 3 * 4 * 5


def test_a_wrong_slot_in_a_read_plan_changes_the_output(monkeypatch) -> None:
    """One index that points at the null slot is enough to make a token other than the oracle's."""
    engine, inner = mock_engine(), Forwards.open

    def open_spoilt(forwards: Forwards, batch):
        if batch.kind == "decode" and batch.kv_lens[0] == 12:
            batch.kv_indices[5] = 0
        return inner(forwards, batch)

    monkeypatch.setattr(Forwards, "open", open_spoilt)
    outputs, wanted = generate(engine, 10), truth(10)
    assert outputs[0][:5] == wanted[0][:5]
    assert outputs[0][5] != wanted[0][5]
    assert outputs[1:] == wanted[1:]
