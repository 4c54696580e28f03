"""`kvcanary serve --role`: a prefill server, a decode server, and the proxy of docs/handover.md before them."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig
from spec_engine.disagg.handover import Handover
from spec_engine.errors import ConfigError
from spec_engine.server.options import ServerOptions
from spec_engine.server.serving import Server, bind, serve, url_of

PAGE = Path(__file__).parents[3] / "docs" / "handover.md"
KEY = {"Authorization": "Bearer k"}
BODY = {"model": "toy", "prompt": list(range(2, 40)), "max_tokens": 12, "temperature": 0.8, "seed": 5}


def start(model: Path, seed: int, **options: Any) -> tuple[Server, str, threading.Thread]:
    canary = CanaryConfig(mode="abort", content="full", seed=seed, dump_dir=None)
    shape = {"page_size": 4, "topk": 2, "num_steps": 3, "max_total_tokens": 1024, "host_pages": 32}
    config = EngineConfig(str(model), dtype="float64", canary=canary, **shape)
    settings = {"port": 0, "api_key": "k", "model_name": "toy", "transport": "torch", "max_body_bytes": 1 << 24}
    server = Server(Engine(config), ServerOptions(**settings | options))
    listening = bind(server.options)
    thread = threading.Thread(target=serve, args=(server, listening), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    return server, url_of(listening), thread


@pytest.fixture(scope="module")
def servers(toy_model: Path) -> Iterator[SimpleNamespace]:
    """A prefill server, one that decodes, one of another seed that cannot, and the proxy before the first two."""
    prefill, url, thread = start(toy_model, 7, role="prefill", peer_name="prefill-1", lease_seconds=60)
    decode = start(toy_model, 7, role="decode", peers=(url,))
    stranger = start(toy_model, 8, role="decode", peers=("http://127.0.0.1:9", url))
    found: dict[str, Any] = {}
    code = re.search(r"```python proxy\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]
    exec(compile(code, "handover.md: proxy", "exec"), found)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = found["proxy"](url, decode[1])
    before = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    proxying = threading.Thread(target=before.run, daemon=True)
    proxying.start()
    while not before.started:
        proxying.join(0.01)
    yield SimpleNamespace(prefill=url, decode=decode[1], stranger=stranger[1], proxy=f"http://127.0.0.1:{port}")
    before.should_exit = True
    proxying.join(10)
    for server, _, running in ((prefill, url, thread), decode, stranger):
        server.should_exit = True
        running.join(30)


def ask(url: str, body: dict[str, Any], **how: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=60, **how)


def test_an_answer_by_two_servers_is_that_of_one(servers):
    """Text, usage and finish reason, whole and as a stream; one prompt token is computed by the server that decodes."""
    alone, both = ask(servers.prefill, BODY).json(), ask(servers.proxy, BODY).json()
    assert both["choices"] == alone["choices"]
    assert both["usage"] == alone["usage"]
    streamed = ask(servers.proxy, BODY | {"stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    texts = re.findall(r'"text": "((?:[^"\\]|\\.)*)"', streamed.text)
    assert "".join(texts).encode().decode("unicode_escape") == alone["choices"][0]["text"]
    assert '"completion_tokens": 12' in streamed.text
    metrics = httpx.get(f"{servers.decode}/metrics").text
    assert 'spec_engine_handovers_total{result="arrived"} 2.0' in metrics
    assert "spec_engine_prefill_tokens_total 2.0" in metrics
    assert "spec_engine_late_transfers 0.0" in metrics


def test_servers_of_other_seeds_do_not_exchange_a_byte(servers):
    """409, with both seed ids; and a peer that does not answer does not matter."""
    handover = httpx.post(f"{servers.prefill}/v1/handover", json=BODY, headers=KEY).content
    answer = httpx.post(f"{servers.stranger}/v1/handover/completions", content=handover, headers=KEY)
    assert answer.status_code == 409
    assert re.search("one seed id, got [0-9a-f]{16} here and [0-9a-f]{16} there", answer.json()["error"]["message"])


def test_what_is_no_handover_is_refused(servers):
    """Other bytes, another sender, more than one prompt, another model, no key."""
    decode = f"{servers.decode}/v1/handover/completions"
    assert "are no handover" in httpx.post(decode, content=b"x" * 99, headers=KEY).json()["error"]["message"]
    wire = httpx.post(f"{servers.prefill}/v1/handover", json=BODY, headers=KEY).content
    own = Handover.from_bytes(wire)
    object.__setattr__(own, "origin", own.origin._replace(uuid="another"))
    refused = httpx.post(decode, content=own.to_bytes(), headers=KEY)
    assert refused.status_code == 400
    assert "shake hands first" in refused.json()["error"]["message"]
    for changes in ({"n": 2}, {"prompt": ["a", "b"]}):
        assert httpx.post(f"{servers.prefill}/v1/handover", json=BODY | changes, headers=KEY).status_code == 400
    assert ask(servers.proxy, BODY | {"model": "other"}).status_code == 404
    assert httpx.post(decode, content=wire).status_code == 401


def test_a_lease_that_nobody_takes_runs_out(toy_model):
    """Whoever asks for something or not; it is counted, and its pages are free again."""
    server, url, thread = start(toy_model, 7, role="prefill", lease_seconds=0.05)
    assert httpx.post(f"{url}/v1/handover", json=BODY, headers=KEY).status_code == 200
    deadline = time.monotonic() + 30
    while "spec_engine_leases_expired_total 1.0" not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    tier = server.worker.engine.memory.tier
    assert tier.num_free == tier.num_pages
    server.should_exit = True
    thread.join(30)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"role": "both"}, "role must be prefill or decode, got 'both'"),
        ({"role": "decode"}, "role decode and 0 peers"),
        ({"role": "prefill", "peers": ("http://x",)}, "role prefill and 1 peers"),
        ({"transport": "tcp"}, "transport must be one of nixl, torch, got 'tcp'"),
        ({"lease_seconds": 0.0}, "lease_seconds must be finite and above 0, got 0.0"),
        ({"handover_timeout": float("inf")}, "handover_timeout must be finite and above 0"),
    ],
)
def test_roles_that_cannot_be_are_refused(options, sentence):
    """In a sentence, before anything is loaded."""
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        ServerOptions(**options)
