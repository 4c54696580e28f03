"""Malformed, oversized and untimely requests: OpenAI-style error bodies, never a 5xx."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import wait_for

GOOD = {"model": "toy", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "A"}]}


@pytest.mark.parametrize(
    ("changes", "status", "param", "code", "words"),
    [
        ({"model": "gpt-4"}, 404, "model", "model_not_found", "'toy' is served here"),
        ({"model": None}, 400, "model", None, "model: "),
        ({"prompt": []}, 400, "prompt", None, "prompt"),
        ({"prompt": [500]}, 400, None, None, "prompt token 500 is out of the vocabulary of 97 tokens"),
        ({"prompt": [1] * 512}, 400, "prompt", "context_length_exceeded", "the prompt has 512 tokens"),
        ({"prompt": [1] * 500, "max_tokens": 100}, 400, None, None, "exceeds the context length 512"),
        ({"prompt": ""}, 400, None, None, "a prompt needs at least one token"),
        ({"prompt": "\ud800"}, 400, "prompt", None, "prompt"),
        ({"max_tokens": 0}, 400, "max_tokens", None, "greater than or equal to 1"),
        ({"max_tokens": 10**30}, 400, None, None, "exceeds the context length"),
        ({"temperature": -1}, 400, "temperature", None, "temperature: "),
        ({"temperature": "hot"}, 400, "temperature", None, "temperature: "),
        ({"top_p": 0}, 400, "top_p", None, "top_p: "),
        ({"n": 0}, 400, "n", None, "n: "),
        ({"n": 100}, 400, "n", None, "one request may have 72 sequences"),
        ({"prompt": [[1]] * 10**5, "n": 128}, 400, "n", None, "sequences here, got 12800000"),
        ({"seed": 2**63}, 400, "seed", None, "seed: "),
        ({"stop": [""]}, 400, "stop", None, "stop"),
        ({"stop": list("abcde")}, 400, "stop", None, "stop"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", None, "token ids"),
        ({"logit_bias": {"97": 1}}, 400, None, None, "logit_bias names token 97"),
        ({"logprobs": 21}, 400, "logprobs", None, "logprobs: "),
        ({"best_of": 3}, 400, "best_of", None, "best_of must be n = 1, got 3"),
        ({"suffix": "x"}, 400, "suffix", None, "suffix"),
        ({"echo": True, "logprobs": 1}, 400, "echo", None, "echo comes without logprobs"),
        ({"colour": "red"}, 400, "colour", "unknown_parameter", "this server knows no parameter 'colour'"),
    ],
)
def test_bad_parameters_of_completions(shared, changes, status, param, code, words) -> None:
    """Each is refused with a sentence that names the parameter."""
    answer = shared.post("/v1/completions", GOOD | changes)
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": []}, "tools"),
    ],
)
def test_bad_parameters_of_chats(shared, changes, param) -> None:
    """What this server cannot do is refused, not ignored."""
    answer = shared.post("/v1/chat/completions", CHAT | changes)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100000, b'{"model": NaN}'])
def test_bodies_that_are_no_request(shared, content: bytes) -> None:
    """No JSON, or not an object: 400 and an error body."""
    answer = shared.ask("POST", "/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_paths_and_methods_that_are_not_there(shared) -> None:
    """404 and 405 are error bodies too; the debug pages are not there unless asked for."""
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/debug/kvcanary", 404),
        ("POST", "/debug/kvcanary/faults", 404),
        ("GET", "/docs", 404),
    ):
        answer = shared.ask(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_long_bodies_are_refused(start) -> None:
    """413 by the announced length, and by what comes where none is announced."""
    server = start(max_body_bytes=1000)
    body = b'{"model": "toy", "prompt": "' + b"x" * 2000 + b'"}'
    headers = {"Content-Type": "application/json"}
    for content in (body, iter([body[:1500], body[1500:]])):
        answer = server.ask("POST", "/v1/completions", content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")


def test_too_many_at_a_time_are_told_to_wait(start) -> None:
    """429 with Retry-After: for requests beyond max_concurrent, and for sequences beyond rows and queue."""
    server = start(max_concurrent=2, max_running_requests=1, max_waiting=1)
    long = GOOD | {"max_tokens": 50, "ignore_eos": True}
    answers: list[httpx.Response] = []
    running = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", long | {"n": 2})))
    running.start()
    wait_for(lambda: server.server.worker.num_live == 2)
    refused = server.post("/v1/completions", GOOD)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"
    assert "the limit is 2" in refused.json()["error"]["message"]
    running.join()
    assert answers[0].status_code == 200
    assert server.post("/v1/completions", GOOD).status_code == 200


def test_too_many_requests_at_a_time(start) -> None:
    """The request beyond max_concurrent is refused, others are not touched."""
    server = start(max_concurrent=1)
    long = GOOD | {"max_tokens": 100, "ignore_eos": True}
    running = threading.Thread(target=lambda: server.post("/v1/completions", long))
    running.start()
    wait_for(lambda: server.server.worker.num_live == 1)
    refused = server.post("/v1/completions", GOOD)
    assert refused.status_code == 429
    assert "1 requests are answered" in refused.json()["error"]["message"]
    running.join()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn, schema: dict, good: dict) -> dict:
    """A good body, some of whose fields hold what the schema never promised, or what is near to it."""
    near = st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, 1e-300, 0.5, "", "a", [], [0], [[0]], {}, {"0": -100}, True])
    names = draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=4, unique=True))
    return good | {name: draw(JSON | near) for name in names}


@pytest.mark.parametrize(("path", "good"), [("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)])
def test_no_body_makes_a_server_error(shared, path: str, good: dict) -> None:
    """Whatever stands in the fields of the OpenAPI document, the answer is no 5xx, and the engine lives on."""
    document = shared.get("/openapi.json").json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]

    with httpx.Client(base_url=shared.url, headers={"Authorization": "Bearer a-secret"}, timeout=60) as client:

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(bodies(schema, good))
        def fuzz(body: dict) -> None:
            answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, answer.text
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        fuzz()
    assert shared.get("/health").status_code == 200
