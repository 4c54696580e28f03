"""On Ray: a campaign's record is the local one's; a replica whose memory fails is replaced, and no request lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from kvcanary_tools.replicas.asgi import Asked, answer

RAY = pytest.mark.package("ray")
REPLACED_WITHIN = 30


def _environment() -> dict[str, str]:
    return {**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@RAY
@pytest.mark.slow
def test_a_campaigns_record_is_that_of_this_machine(tmp_path) -> None:
    """Every row and total, for the same seeds; only seconds differ."""
    records = []
    for name, where in (("local", ["--workers", "1"]), ("ray", ["--ray"])):
        file = tmp_path / f"{name}.json"
        command = [sys.executable, "-m", "kvcanary_tools", "inject", "bits.flip", "--runs", "3", "--seed", "3"]
        subprocess.run([*command, "--json", str(file), *where], env=_environment(), check=True, timeout=600)
        records.append(json.loads(file.read_text()))
    assert records[0]["rows"] == records[1]["rows"]
    assert records[0]["totals"] == records[1]["totals"]


@RAY
@pytest.mark.slow
def test_a_replica_whose_memory_fails_is_replaced(replicated: tuple[str, int]) -> None:
    """Clients go on all the time: every one gets its answer, and 30 s after the finding another process answers."""
    url, asked = replicated[0], []
    stops = threading.Event()
    clients = [threading.Thread(target=_client, args=(url, number, asked, stops)) for number in range(2)]
    for client in clients:
        client.start()
    before = _processes(url)
    assert len(before) == 2
    armed = httpx.post(f"{url}/debug/kvcanary/faults", json={"name": "bits.flip"}, headers=KEY, timeout=60)
    assert armed.status_code == 200, armed.text
    began = time.monotonic()
    while not (after := _processes(url)) - before or len(after) < 2:
        assert time.monotonic() - began < 180
    seconds = time.monotonic() - began
    stops.set()
    for client in clients:
        client.join(60)
    print(f"replaced after {seconds:.1f} s, {len(asked)} requests")
    assert seconds < REPLACED_WITHIN
    assert len(asked) > 10
    assert {status for status, _ in asked} == {200}
    ended = [reason for _, reason in asked if reason != "length"]
    assert ended in ([], ["kv_corruption"])  # of the one that was struck


@pytest.fixture
def replicated() -> Iterator[tuple[str, int]]:
    """Two replicas on this machine."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    options = [
        "--api-key",
        "k",
        "--allow-faults",
        "--kv-canary",
        "abort",
        "--kv-canary-content",
        "full",
        "--max-total-tokens",
        "2048",
    ]
    command = [sys.executable, "-m", "kvcanary_tools", "serve", "--replicas", "2", "--port", str(port), *options]
    child = subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline().startswith("url ")
        yield f"http://127.0.0.1:{port}", port
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=120)


KEY = {"Authorization": "Bearer k"}


def _client(url: str, number: int, asked: list[tuple[int, str]], stops: threading.Event) -> None:
    turn = 0
    while not stops.is_set():
        body = {"model": "embedded", "prompt": f"def f{number}_{turn}(x):\n", "max_tokens": 16, "ignore_eos": True}
        told = httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=120)
        asked.append((told.status_code, told.json()["choices"][0]["finish_reason"] if told.is_success else told.text))
        turn += 1


def _processes(url: str) -> set[int]:
    """Processes that answer for the debug page."""
    found = set()
    for _ in range(8):
        told = httpx.get(f"{url}/debug/kvcanary/certificate", headers=KEY, timeout=60)
        found |= {told.json()["hardware"]["pid"]} if told.is_success else set()
    return found


@RAY
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments:DeprecationWarning")  # of Ray's own fields
def test_a_prompt_goes_where_its_beginning_was() -> None:
    """The longest beginning that a living replica had wins; all others go by the length of queues."""
    from types import SimpleNamespace

    from kvcanary_tools.replicas.routing import (
        CHUNK,
        PowerOfTwoChoicesRequestRouter,
        PrefixRouter,
        beginnings,
        prefix_of,
    )

    assert [len(own) for own in beginnings("x" * (3 * CHUNK + 5))] == [CHUNK, 2 * CHUNK, 3 * CHUNK]
    assert prefix_of(b'{"prompt": "abc"}') == "abc"
    assert prefix_of(b'{"messages": [{"role": "user"}]}') == '[{"role": "user"}]'
    assert (prefix_of(b""), prefix_of(b"[1]"), prefix_of(b'{"prompt": [1, 2]}')) == ("", "", "[1, 2]")
    router = object.__new__(PrefixRouter)
    router._places = __import__("collections").OrderedDict()
    replicas = [SimpleNamespace(replica_id=name) for name in "ab"]
    long, short = "x" * (2 * CHUNK), "x" * CHUNK + "y" * CHUNK

    def routed(prefix: str) -> list[Any]:
        pending = SimpleNamespace(args=[SimpleNamespace(prefix=prefix)])
        return asyncio.run(router.choose_replicas(replicas, pending))

    async def by_queues(self, candidates, pending) -> list[list[Any]]:
        return [list(candidates)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PowerOfTwoChoicesRequestRouter, "choose_replicas", by_queues)
        assert routed(long) == [replicas]
        for prefix, name in ((short, "a"), (long, "b")):
            router.on_request_routed(SimpleNamespace(args=[SimpleNamespace(prefix=prefix)]), name, None)
        assert routed(long + "z") == [[replicas[1]], replicas]
        assert routed(short) == [[replicas[0]], replicas]
        assert routed("z" * CHUNK) == [replicas]
        replicas.pop()  # b has been replaced
        assert routed(long) == [replicas]


def test_an_application_answers_piece_by_piece_and_hears_who_leaves() -> None:
    """Status and headers first, then the body as it comes; a client that goes ends what streams."""
    app, seen = FastAPI(), []

    @app.post("/echo")
    async def echo(request: Request) -> StreamingResponse:
        body = await request.body()

        async def pieces():
            try:
                for number in range(1000):
                    yield body + str(number).encode()
                    await asyncio.sleep(0.001)
            finally:
                seen.append("ended")

        return StreamingResponse(pieces(), 201, headers={"X-Own": request.query_params["q"]})

    async def ask() -> list[Any]:
        own = answer(app, Asked("POST", "/echo", b"q=7", (), None, b"n"))
        told = [await anext(own) for _ in range(4)]
        await own.aclose()
        return told

    (status, headers), *body = asyncio.run(asyncio.wait_for(ask(), 10))
    assert (status, dict(headers)[b"x-own"], body) == (201, b"7", [b"n0", b"n1", b"n2"])
    assert seen == ["ended"]


def test_without_ray_the_sentence_says_what_to_install(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2."""
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in (["inject", "bits.flip", "--runs", "1", "--ray"], ["serve", "--replicas", "2"]):
        result = kvcanary(*command)
        assert result.exit_code == 2
        assert "ray is not installed" in result.stderr
        assert "pip install 'kvcanary[ray]'" in result.stderr
