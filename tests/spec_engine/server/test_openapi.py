"""The OpenAPI document against the server that it describes, by schemathesis: whatever follows from it is no 5xx."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

KEY = "a-secret"
OPERATIONS = (
    "GET /health",
    "GET /metrics",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /v1/chat/completions",
    "POST /v1/completions",
)
AS_SAID, OTHERWISE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [*((name, AS_SAID) for name in OPERATIONS), *((name, OTHERWISE) for name in OPERATIONS if "POST" in name)]
QUICK, LONG = 10, 400  # requests of each operation and mode
MOST_TOKENS = 8  # of an answer: it is the surface that is looked at
SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}


@pytest.fixture(scope="module")
def document(shared) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{shared.url}/openapi.json")


def ask(document: schemathesis.BaseSchema, name: str, mode: GenerationMode, examples: int) -> None:
    """So many requests: no 5xx, and a refusal is a body of OpenAI's form; the server lives on."""
    [operation] = [found.ok() for found in document.get_all_operations() if found.ok().label == name]

    @settings(max_examples=examples, derandomize=True, **SETTINGS)
    @given(operation.as_strategy(generation_mode=mode))
    def fuzz(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str):
                case.body["model"] = "toy"  # another is refused before anybody looks further
            for field in ("max_tokens", "max_completion_tokens"):
                if isinstance(case.body.get(field), int):
                    case.body[field] = min(case.body[field], MOST_TOKENS)
        answer = case.call(headers={"Authorization": f"Bearer {KEY}"})
        case.validate_response(answer, checks=[not_a_server_error])
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    fuzz()


def test_the_document_has_these_operations(document) -> None:
    """What is asked below is all that there is; debug pages are not described."""
    assert sorted(found.ok().label for found in document.get_all_operations()) == sorted(OPERATIONS)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_no_request_makes_a_server_error(document, name: str, mode: GenerationMode) -> None:
    """A bounded sample, the same every time."""
    ask(document, name, mode, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_no_request_of_many_makes_a_server_error(document, name: str, mode: GenerationMode) -> None:
    """The same with many."""
    ask(document, name, mode, LONG)
