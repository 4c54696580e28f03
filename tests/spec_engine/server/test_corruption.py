"""A bit flipped in a running server's pool: what `abort`, `raise` and `log` make of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest
import torch

from kvcanary import KVCorruptionError
from spec_engine import Engine, SamplingParams

from .conftest import KEY, Running, wait_for

PROMPTS = [[number + shift for number in range(5, 25)] for shift in (0, 20, 40)]
TOKENS = 40


def flip_bit(engine: Engine, prompt_start: int) -> str | None:
    """Flip one bit of V in the middle of the request whose prompt begins so; its name, None until it has tokens."""
    for request in engine.running:
        if request.prompt_ids[0] == prompt_start and len(request.output_ids) > 4:
            slot = int(engine.request_table.table[request.row, request.committed_len // 2])
            engine.pools["target"].kv[3, slot, 1].view(torch.uint8)[0, 5] ^= 4
            return request.request_id
    return None


class Client(threading.Thread):
    """One streaming client: ``text`` as it came, and how it ended."""

    def __init__(self, server: Running, prompt: list[int], max_tokens: int = TOKENS) -> None:
        super().__init__(daemon=True)
        self.server, self.text, self.reason = server, "", None
        self.body = {
            "model": "toy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        self.start()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream(
            "POST", f"{self.server.url}/v1/completions", json=self.body, headers=headers, timeout=600
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    self.text += choice["text"]
                    self.reason = choice["finish_reason"]


def strike(server: Running) -> tuple[list[Client], str]:
    """Three clients who are served together, one of whom loses a bit; the name of its request."""
    worker = server.server.worker
    everybody = worker.call(lambda _: wait_for(lambda: worker.num_live == len(PROMPTS)))
    asyncio.run_coroutine_threadsafe(everybody, worker._loop)
    with server.held(steps=0):
        clients = [Client(server, prompt) for prompt in PROMPTS]
        name = wait_for(lambda: server.between_steps(lambda engine: flip_bit(engine, PROMPTS[1][0])))
    for client in clients:
        client.join(60)
    return clients, name


def clean_texts(engine: Engine) -> list[str]:
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    return [output.text for output in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_abort_ends_the_one_and_serves_the_others(start, schedule: str) -> None:
    """The corrupted request ends with kv_corruption, after right text only; the others' texts are the fault-free."""
    server = start(canary="abort", schedule=schedule)
    clients, _ = strike(server)
    texts = server.between_steps(clean_texts)
    assert [client.reason for client in clients] == ["length", "kv_corruption", "length"]
    assert [clients[0].text, clients[2].text] == [texts[0], texts[2]]
    assert texts[1].startswith(clients[1].text)
    assert len(clients[1].text) < len(texts[1])
    health = server.get("/health")
    assert health.status_code == 200
    reported = health.json()["canary"]
    assert reported.pop("findings") > 1  # the forward that read it, and the last re-read at the request's bytes
    assert reported == {"status": "findings", "mode": "abort", "content": "full", "incidents": 1, "codes": ["R9"]}
    assert server.between_steps(lambda engine: engine.memory.num_available == engine.allocator.num_pages)


def test_raise_stops_the_server(start) -> None:
    """Everybody's stream ends with a reason and no wrong text; the server returns what stopped it."""
    server = start(canary="raise")
    clients, name = strike(server)
    server.thread.join(30)
    assert isinstance(server.failure, KVCorruptionError)
    assert name in server.failure.findings[0].readers
    assert [client.reason for client in clients] == ["server_error", "kv_corruption", "server_error"]
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


def test_log_serves_on_and_says_so(start) -> None:
    """All requests end as they would; health and metrics count the finding by code and site, and name nobody."""
    server = start(canary="log")
    clients, name = strike(server)
    assert [client.reason for client in clients] == ["length"] * 3
    assert server.get("/health").json()["canary"]["status"] == "findings"
    metrics = server.get("/metrics").text
    assert 'kvcanary_fired_total{code="R9",' in metrics
    assert 'kvcanary_findings_total{code="R9",' in metrics
    assert name not in metrics
    assert "req-" not in metrics


def test_a_client_that_goes_away_frees_its_pages(start) -> None:
    """Streaming or waiting, alone or several sequences: what nobody reads is not computed on."""
    server = start(canary="abort", prefix_cache=False)
    worker = server.server.worker
    body = {"model": "toy", "prompt": PROMPTS[0], "max_tokens": 450, "n": 2, "ignore_eos": True}
    headers, url = {"Authorization": f"Bearer {KEY}"}, f"{server.url}/v1/completions"
    with server.held(steps=3):
        with httpx.stream("POST", url, json=body | {"stream": True}, headers=headers, timeout=60) as answer:
            next(answer.iter_lines())
            assert worker.num_live == 2
        wait_for(lambda: worker.num_live == 0)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=0.5)
        wait_for(lambda: worker.num_live == 0)
    assert worker.ended == {"cancelled": 4}
    assert server.between_steps(lambda engine: engine.allocator.num_free == engine.allocator.num_pages)


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("grace", "reason"), [(60.0, "length"), (0.0, "shutdown")])
def test_shutdown_finishes_or_aborts_with_a_reason(start, grace: float, reason: str, schedule: str) -> None:
    """Within the grace time what runs is finished; after it streams end as "shutdown"."""
    server = start(canary="raise", grace_seconds=grace, schedule=schedule)
    with server.held(steps=3):
        client = Client(server, PROMPTS[0], max_tokens=60)
        wait_for(lambda: client.text)
        server.server.should_exit = True
        wait_for(lambda: server.server.worker.is_draining)
    server.stop()
    client.join(10)
    assert client.reason == reason
    assert server.failure is None
    assert server.engine.memory.num_available == server.engine.allocator.num_pages


def damage_cached_page(engine: Engine) -> int:
    """Flip one bit of a page that only the prefix cache holds, and let an hour pass; its first slot."""
    pages = engine.canary.session.ledger.pages
    page = int((pages.published & (pages.refcounts == 0)).nonzero()[0][0])
    scrubber, clock = engine.canary.session.checks.cached, time.monotonic
    scrubber.clock = lambda: clock() + 3600
    engine.pools["target"].kv[3, page * engine.config.page_size, 1].view(torch.uint8)[0, 5] ^= 4
    return page * engine.config.page_size


def test_a_server_with_nothing_to_do_looks_after_its_cache(start) -> None:
    """No request comes: a damaged page of the prefix cache is found all the same, by the clock."""
    server = start(canary="log", content="rolling")
    Client(server, PROMPTS[0]).join(60)
    slot = server.between_steps(damage_cached_page)
    (finding,) = wait_for(lambda: server.between_steps(lambda engine: list(engine.canary.findings)))
    assert (finding.code, finding.slot) == ("R9", slot)


def run_out(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_long_steps_leave_the_cache_to_the_clock(start) -> None:
    """Between two steps of a request the page is found, long before a rotation of steps is over."""
    server = start(canary="raise", content="rolling")
    Client(server, PROMPTS[0]).join(60)

    def go_on(engine: Engine) -> tuple[int, int, int]:
        engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=100, ignore_eos=True))
        engine.step()
        slot, first = damage_cached_page(engine), engine.canary.step
        with pytest.raises(KVCorruptionError) as caught:
            run_out(engine)
        return slot, caught.value.findings[0].slot, engine.canary.step - first

    slot, found, steps = server.between_steps(go_on)
    assert found == slot
    assert steps <= 3
