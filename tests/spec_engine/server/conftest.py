"""A real uvicorn on a free port, in a thread, over an engine with the toy model."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig
from spec_engine.server.options import ServerOptions
from spec_engine.server.serving import Server, bind, serve, url_of

KEY = "a-secret"


@dataclass
class Running:
    """A server under test; ``failure`` is what stopped its engine, once it has ended."""

    server: Server
    url: str
    engine: Engine
    thread: threading.Thread
    failure: BaseException | None = None

    def get(self, path: str, key: str | None = KEY, **settings: Any) -> httpx.Response:
        return self.ask("GET", path, key, **settings)

    def post(self, path: str, body: Any, key: str | None = KEY, **settings: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json"} | settings.pop("headers", {})
        return self.ask("POST", path, key, content=json.dumps(body), headers=headers, **settings)

    def ask(self, method: str, path: str, key: str | None = KEY, **settings: Any) -> httpx.Response:
        headers = settings.pop("headers", {})
        if key is not None and "Authorization" not in headers:
            headers = headers | {"Authorization": f"Bearer {key}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **settings)

    def between_steps(self, act: Callable[[Engine], Any], seconds: float = 60) -> Any:
        """Do something to the engine in its own thread."""
        worker = self.server.worker
        return asyncio.run_coroutine_threadsafe(worker.call(act), worker._loop).result(seconds)

    @contextmanager
    def held(self, steps: int) -> Iterator[None]:
        """Behind so many steps the engine waits for a command before each: nothing ends before a test has looked."""
        worker, taken, is_over = self.server.worker, itertools.count(), threading.Event()
        before_step = worker.before_step  # faults of a server that allows them strike there

        def wait() -> None:
            if next(taken) >= steps:
                wait_for(lambda: is_over.is_set() or not worker._commands.empty())
            before_step()

        worker.before_step = wait
        try:
            yield
        finally:
            worker.before_step = before_step
            is_over.set()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """The first true value of a condition; TimeoutError when it stays false."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.01)
    return value


class Starter:
    """Starts servers over engines with the toy model, and ends them."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.started: list[Running] = []

    def __call__(self, canary: str = "off", content: str = "full", **settings: Any) -> Running:
        """canary, content: its mode and content; settings: options of the server, the rest are the engine's."""
        known = ServerOptions.__dataclass_fields__
        options = {name: settings.pop(name) for name in list(settings) if name in known}
        target_of = settings.pop("target_of", None)
        config = {"model": self.model, "page_size": 4, "topk": 2, "num_steps": 3, "max_total_tokens": 2048}
        config |= {"dtype": "float64"} | settings
        share = config.pop("share", 1.0)
        engine = Engine(EngineConfig(**config, canary=CanaryConfig(mode=canary, content=content, share=share)))
        server = Server(engine, ServerOptions(**{"port": 0, "api_key": KEY, "model_name": "toy"} | options), target_of)
        listening = bind(server.options)
        running = Running(server, url_of(listening), engine, threading.Thread())

        def target() -> None:
            running.failure = serve(server, listening)

        running.thread = threading.Thread(target=target, daemon=True)
        running.thread.start()
        self.started.append(running)
        wait_for(lambda: server.started)
        return running

    def stop(self) -> None:
        for running in self.started:
            running.stop()


@pytest.fixture
def start(toy_model: Path) -> Iterator[Starter]:
    starter = Starter(str(toy_model))
    yield starter
    starter.stop()


@pytest.fixture(scope="module")
def shared(toy_model: Path) -> Iterator[Running]:
    """One server without a canary for all tests of a file that leave it as it is."""
    starter = Starter(str(toy_model))
    yield starter()
    starter.stop()
