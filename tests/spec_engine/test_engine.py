"""The engine on a toy checkpoint: drafting changes speed, never output; memory always adds up."""

import pytest
import torch

from kvcanary import CanaryConfig
from spec_engine import ConfigError, Engine, EngineConfig, SamplingParams
from spec_engine.metrics import Metrics

PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 17, 30, 64)
]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def make_engine(folder, **settings) -> Engine:
    settings = {"dtype": "float64", "max_total_tokens": 4096} | settings
    return Engine(EngineConfig(model=str(folder), **settings))


def tokens_of(engine: Engine, params: SamplingParams = GREEDY, prompts=PROMPTS) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(toy_model) -> list[tuple[int, ...]]:
    """Greedy output without drafting, one request at a time, prompts in one chunk."""
    return [tokens_of(make_engine(toy_model, draft="none", page_size=1), prompts=[prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("draft", ["eagle", "eagle3"])
@pytest.mark.parametrize(("page_size", "topk", "num_steps"), [(1, 4, 3), (4, 1, 5), (16, 2, 1), (64, 8, 2)])
def test_drafting_does_not_change_greedy_output(toy_model, expected, draft, page_size, topk, num_steps):
    """Batched, chunked and drafted output equals the plain one, token for token."""
    engine = make_engine(
        toy_model, draft=draft, page_size=page_size, topk=topk, num_steps=num_steps, prefill_chunk_tokens=23
    )
    assert tokens_of(engine) == expected
    assert engine.metrics.verify_forwards > 0


def test_drafting_does_not_change_sampled_output(toy_model):
    """Coins belong to positions, so a seeded run draws the same tokens with and without drafting."""
    params = SamplingParams(max_new_tokens=24, temperature=0.7, top_k=20, top_p=0.9, seed=5)
    assert tokens_of(make_engine(toy_model), params) == tokens_of(make_engine(toy_model, draft="none"), params)


def test_more_prompts_than_rows_wait_their_turn(toy_model, expected):
    """Two rows serve four prompts, outputs in the order of the prompts."""
    engine = make_engine(toy_model, max_running_requests=2)
    assert tokens_of(engine) == expected
    assert not engine.has_work


def test_a_pool_for_one_request_serves_many_in_turn(toy_model, expected):
    """Admission waits for pages instead of overcommitting them."""
    config = EngineConfig(model=str(toy_model), dtype="float64", page_size=4, topk=2, num_steps=2, max_total_tokens=112)
    assert tokens_of(Engine(config)) == expected


def test_streamed_text_adds_up_to_the_output(toy_model):
    """The events of a request carry its tokens and its text, the last of them the end."""
    output = make_engine(toy_model).generate(PROMPTS[:1], GREEDY)[0]
    events = list(make_engine(toy_model).stream(PROMPTS[:1], GREEDY))
    assert sum((event.token_ids for event in events), ()) == output.token_ids
    assert "".join(event.text for event in events) == output.text
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]


def test_a_stop_token_ends_a_request_inside_an_accepted_chain(toy_model, expected):
    """Tokens up to the stop are kept, the stop itself and what follows are not."""
    stop = expected[2][7]
    end = expected[2].index(stop)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    output = make_engine(toy_model).generate(PROMPTS[2:3], params)[0]
    assert (output.token_ids, output.finish_reason) == (expected[2][:end], "stop")


def test_metrics_may_be_replaced_between_runs(toy_model, expected):
    """Fresh counters start from zero and change nothing else, also with a canary that counts steps upwards."""
    engine = make_engine(toy_model, canary=CanaryConfig(mode="raise"))
    tokens_of(engine)
    engine.metrics = Metrics()
    assert tokens_of(engine) == expected
    assert engine.metrics.accepted_length >= 1.0


def test_all_pages_come_back(toy_model):
    """After the last request every page is free or cached, and the request table is empty."""
    engine = make_engine(toy_model, page_size=4)
    tokens_of(engine)
    cached = engine.memory.cache.tree.num_evictable
    assert engine.allocator.num_free + cached == engine.allocator.num_pages
    assert cached
    assert not engine.request_table.table.any()


def test_the_request_table_has_room_at_the_end_of_the_context(toy_model):
    """A request that fills the context drafts up to its last token, for dense and for paged branches."""
    for page_size in (1, 16):
        engine = make_engine(toy_model, page_size=page_size, topk=8, context_length=64)
        output = engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=34, ignore_eos=True))[0]
        assert len(output.token_ids) == 34


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], GREEDY, "a prompt needs at least one token"),
        ([97], GREEDY, "prompt token 97 is out of the vocabulary of 97 tokens"),
        ([1] * 500, GREEDY, r"prompt of 500 tokens \+ max_new_tokens 24 = 524 exceeds the context length 512"),
    ],
)
def test_impossible_requests_are_refused_with_a_sentence(toy_model, prompt, params, words):
    """The message names the request's numbers and the limit; nothing is queued."""
    engine = make_engine(toy_model)
    with pytest.raises(ConfigError, match=words):
        engine.submit(prompt, params)
    assert not engine.has_work


def test_a_request_larger_than_the_pool_is_refused(toy_model):
    """A request that could never be admitted is refused at once instead of waiting for ever."""
    engine = Engine(EngineConfig(model=str(toy_model), max_total_tokens=192))
    with pytest.raises(ConfigError, match=r"may need \d+ pages of 16 slots, the pool has 12"):
        engine.submit(PROMPTS[3], GREEDY)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_total_tokens": 64}, "a reserve of 128 slots take 9 pages of 16, the pool has 4"),
        ({"max_total_tokens": 143, "schedule": "overlap"}, "a reserve of 134 slots take 9 pages of 16, the pool has 8"),
        (
            {"max_total_tokens": 1, "draft": "none", "page_size": 1},
            "1 slots take 2 pages of 1, the pool has 1",
        ),
    ],
)
def test_a_pool_below_one_reserve_does_not_start(toy_model, settings, words):
    """A pool in which no request could take a step is refused with what one step needs."""
    with pytest.raises(ConfigError, match="max_total_tokens must hold one request's reserve") as caught:
        make_engine(toy_model, **settings)
    assert words in str(caught.value)
    assert "raise max_total_tokens to" in caught.value.hint


def test_a_missing_head_is_named(toy_model, tmp_path):
    """Asking for a head that the model does not have says where it was looked for."""
    for file in toy_model.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="holds no eagle head"):
        Engine(EngineConfig(model=str(tmp_path), draft="eagle"))


@pytest.mark.parametrize("device", ["cuda:99", "tpu", ""])
def test_a_device_that_is_not_there_is_named(toy_model, device):
    """The message lists the devices that are."""
    with pytest.raises(ConfigError, match=f"device '{device}' is not present, there is: cpu"):
        Engine(EngineConfig(model=str(toy_model), device=device))
