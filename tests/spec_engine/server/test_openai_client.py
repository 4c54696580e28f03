"""The official client against a real server: completions, chat, streams, seeds, log-probabilities, usage, errors."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from spec_engine import SamplingParams
from spec_engine.models.config import CheckpointError
from spec_engine.server.chat import ChatTemplate
from spec_engine.server.errors import RefusedError

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture
def client(shared) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="a-secret", max_retries=0) as client:
        yield client


def test_completions_are_the_engine_s(shared, client) -> None:
    """Greedy text, finish reason and usage are what the engine itself gives."""
    settings = {"model": "toy", "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    answer = client.completions.create(**settings, extra_body={"ignore_eos": True})
    [output] = shared.between_steps(
        lambda engine: engine.generate([PROMPT], SamplingParams(max_new_tokens=9, ignore_eos=True))
    )
    assert answer.choices[0].text == output.text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 9, 16)
    assert answer.model == "toy"


def test_streamed_pieces_join_to_the_whole(client) -> None:
    """Every choice of a stream adds up to the text of the same seed without one; the last chunk has the usage."""
    settings = {"model": "toy", "prompt": [PROMPT, [3, 4]], "max_tokens": 8, "seed": 7, "n": 2}
    whole = client.completions.create(**settings)
    texts, reasons, usage = {}, {}, None
    for chunk in client.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    assert [texts[index] for index in range(4)] == [choice.text for choice in whole.choices]
    assert [reasons[index] for index in range(4)] == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert whole.usage.prompt_tokens == 9


def test_seeds_decide(client) -> None:
    """One seed always draws the same, sequence i of it is that of seed + i, and another seed draws another."""
    settings = {"model": "toy", "prompt": PROMPT, "max_tokens": 12}

    def texts(seed: int, n: int) -> list[str]:
        return [choice.text for choice in client.completions.create(**settings, seed=seed, n=n).choices]

    both = texts(11, 2)
    assert both == texts(11, 2) == [*texts(11, 1), *texts(12, 1)]
    assert both[0] != both[1]


def test_stop_strings_end_a_text(client) -> None:
    """The text ends before the stop string, and says so."""
    settings = {"model": "toy", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**settings).choices[0].text
    stopped = client.completions.create(**settings, stop=[text[4:6]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[4:6])], "stop")


def test_log_probabilities_of_completions(client) -> None:
    """Tokens, their log-probabilities, the likeliest beside them, and where each begins in the text, streamed too."""
    answer = client.completions.create(model="toy", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3).choices[0]
    listed = answer.logprobs
    assert "".join(listed.tokens) == answer.text
    assert listed.text_offset == [len("".join(listed.tokens[:place])) for place in range(5)]
    for token, value, top in zip(listed.tokens, listed.token_logprobs, listed.top_logprobs, strict=True):
        assert len(top) == 3
        assert value == max(top.values()) == top[token]
    settings = {"model": "toy", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 3}
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**settings, stream=True)]
    assert [offset for chunk in chunks for offset in chunk.text_offset] == listed.text_offset


def test_a_model_without_a_template_has_no_chat(client) -> None:
    """It says where to go instead."""
    with pytest.raises(openai.BadRequestError, match="use /v1/completions") as refused:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x"}])
    assert refused.value.code == "no_chat_template"


def test_chat_of_a_model_with_a_template(start, tmp_path, toy_model) -> None:
    """Messages go through the checkpoint's template; deltas join to the whole; tokens come with their bytes."""
    for path in toy_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    server = start(model=str(tmp_path))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-secret", max_retries=0)
    with client:
        _check_chat(client)


def _check_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "AB"}, {"role": "user", "content": [{"type": "text", "text": "CD"}]}]
    settings = {"model": "toy", "messages": messages, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    plain = client.completions.create(model="toy", prompt="sABuCD", max_tokens=6, temperature=0)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", plain.choices[0].text)
    tokens = whole.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == message.content
    assert [bytes(token.bytes).decode() for token in tokens] == [token.token for token in tokens]
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**settings, stream=True)]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_template_may_refuse_and_must_be_one() -> None:
    """What it raises is the client's 400; a template that cannot be read is the checkpoint's fault."""
    template = ChatTemplate("{{ raise_exception('no system turns') }}", {})
    with pytest.raises(RefusedError, match="no system turns"):
        template.render([])
    with pytest.raises(RefusedError, match="the chat template refuses"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render([])
    with pytest.raises(CheckpointError, match="the chat template must be one of jinja2"):
        ChatTemplate("{% for %}", {})


def test_models_are_listed(client) -> None:
    """The one model, by its served name."""
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "kvcanary"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_wrong_key_is_refused(shared) -> None:
    """OpenAI's error for a wrong key, and for none."""
    client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refused:
        client.models.list()
    assert refused.value.code == "invalid_api_key"
    assert shared.get("/v1/models", key=None).status_code == 401
    assert shared.get("/health", key=None).status_code == 200
    client.close()
