"""A server whose pool cannot hold everybody: requests are retracted and restored, answers stay, metrics count both."""

from __future__ import annotations

import re

from kvcanary_tools.commands.serve import command
from kvcanary_tools.engine_options import engine_config

BODY = {
    "model": "toy",
    "prompt": [[number % 97 for number in range(start, start + 24)] for start in range(3)],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


def counted(text: str, name: str) -> float:
    return float(re.search(rf"^{name}_total (\S+)$", text, re.MULTILINE)[1])


def test_a_pressed_server_answers_as_a_wide_one(start) -> None:
    """The same texts; /metrics counts retractions and tokens that came back from the host, none without pressure."""
    wide, tight = start(), start(canary="raise", max_total_tokens=144, new_token_ratio=0.0, host_pages=64)
    texts = [
        [choice["text"] for choice in one.post("/v1/completions", BODY).json()["choices"]] for one in (wide, tight)
    ]
    assert texts[0] == texts[1]
    for name in ("spec_engine_retractions", "spec_engine_restored_tokens"):
        assert counted(wide.get("/metrics").text, name) == 0
        assert counted(tight.get("/metrics").text, name) > 0


def test_serve_takes_pressure_as_options(monkeypatch) -> None:
    """`kvcanary serve` has the options of generate, typed or in the environment."""
    typed = command.make_context("serve", ["--new-token-ratio", "0.25", "--host-pages", "12"])
    assert (engine_config(typed.params).new_token_ratio, engine_config(typed.params).host_pages) == (0.25, 12)
    monkeypatch.setenv("SPEC_ENGINE_NEW_TOKEN_RATIO", "0.5")
    assert engine_config(command.make_context("serve", []).params).new_token_ratio == 0.5
