"""The page map says of every page what ledger and read queues say of it, slot by slot."""

from __future__ import annotations

import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"


@pytest.mark.parametrize("content", ["rolling", "full"])
def test_page_map_of_a_running_engine(content: str) -> None:
    """States, owners, references, generations and the oldest re-read, with two requests that share their head."""
    canary = CanaryConfig(mode="raise", content=content, seed=1, budget=4096)
    engine = Engine(EngineConfig(page_size=4, max_total_tokens=1024, canary=canary))
    engine.generate([PROMPT], SamplingParams(max_new_tokens=4, ignore_eos=True))
    for tail in ("def mul(", "def div("):
        engine.submit(PROMPT + tail, SamplingParams(max_new_tokens=40, ignore_eos=True))
    for _ in range(6):
        engine.step()
    shown, ledger = engine.canary.page_map(), engine.canary.session.ledger
    assert shown["step"] == engine.metrics.num_steps
    assert shown["owners"] == ["(shared)", *(request.request_id for request in engine.running)]
    oldest: dict[int, int] = {}
    for request in ledger.requests.values():
        for queue in request.reads:
            for start, end, step in queue.oldest_first():
                for position in range(start, end):
                    page = request.pages[position // 4]
                    oldest[page] = min(oldest.get(page, step), step)
    shared = set(engine.running[0].pages) & set(engine.running[1].pages)
    assert shared
    for page in range(1, engine.sizes.num_pages + 1):
        own = [number for number, request in enumerate(engine.running, 1) if page in request.pages]
        assert shown["references"][page] == len(own)
        if page in oldest:
            assert shown["checked"][page] == oldest[page]
        if page in shared:
            assert (shown["owner"][page], shown["states"][shown["state"][page]]) == (0, "SHARED")
        elif own and shown["owner"][page]:
            assert shown["owner"][page] == own[0]
        assert shown["generation"][page] == ledger.generations[page]
    assert max(shown["checked"]) > 0
    assert min(shown["checked"]) == -1
