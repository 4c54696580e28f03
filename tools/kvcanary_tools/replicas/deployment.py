"""Two deployments of Ray Serve: `Replica`, the server's application with an engine; `Door`, which takes HTTP.

A replica whose canary says that memory fails is unhealthy: Serve starts another one, sends nothing more to this one,
and lets what it answers come to its end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvcanary_tools.campaign.fault_target import target_of
from kvcanary_tools.campaign.on_ray import HERE, start
from kvcanary_tools.replicas.asgi import Asked, answer
from kvcanary_tools.replicas.routing import PrefixRouter, prefix_of
from spec_engine import Engine, EngineConfig
from spec_engine.server.app import create_app
from spec_engine.server.options import ServerOptions
from spec_engine.server.worker import ServerStoppedError

NAME = "kvcanary"
HEALTH_SECONDS = 1.0
MOST_REQUESTS = 1024  # at a time, of one replica: its own limits refuse before
CPUS = 0.5  # of a replica's share, where it has no GPU


class HardwareVerdictError(RuntimeError):
    """Words change here that nobody writes: this replica must go."""


class Replica:
    """One engine and its application."""

    def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        self._app, self._worker = create_app(Engine(config), options, target_of=target_of)
        self._lifespan = AsyncExitStack()
        self._is_started = False

    async def answer(self, asked: Asked) -> AsyncIterator[Any]:
        await self._start()
        async for piece in answer(self._app, asked):
            yield piece

    async def check_health(self) -> None:
        """HardwareVerdictError, or the engine's own end."""
        await self._start()
        try:
            errors = await self._worker.call(_bit_errors)
        except ServerStoppedError as error:
            raise HardwareVerdictError(f"the engine has stopped: {self._worker.failure!r}") from error
        if errors:
            raise HardwareVerdictError(f"{errors} incidents of one changed word that nobody wrote")

    async def _start(self) -> None:
        """The engine's thread belongs to the loop that answers."""
        if not self._is_started:
            self._is_started = True
            await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))


class Door:
    """Takes HTTP, reads the body, and asks the replica that the router chooses."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")

    async def __call__(self, request: Request) -> Response:
        body, client = await request.body(), request.client
        asked = Asked(
            request.method, request.url.path, request.url.query.encode(), tuple(request.headers.raw),
            None if client is None else (client.host, client.port), body, prefix_of(body),
        )  # fmt: skip
        pieces = self._replicas.remote(asked)
        status, headers = await anext(pieces)
        response = StreamingResponse(pieces, status)
        response.raw_headers = headers
        return response


def _bit_errors(engine: Engine) -> int:
    return 0 if engine.canary is None else int(engine.canary.certificate()["bit_errors"])


def deploy(config: EngineConfig, options: ServerOptions, replicas: int, address: str = HERE, **settings: Any) -> None:
    """Serve that many replicas; returns when they answer. `settings`: of `ray.init`."""
    start(address, **settings)
    serve.start(http_options=HTTPOptions(host=options.host, port=options.port))
    has_gpu = config.device.startswith("cuda")
    actor = {"num_gpus": 1} if has_gpu else {"num_cpus": CPUS}
    engines = serve.deployment(
        Replica, num_replicas=replicas, ray_actor_options=actor, max_ongoing_requests=MOST_REQUESTS,
        health_check_period_s=HEALTH_SECONDS, graceful_shutdown_timeout_s=options.grace_seconds,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    ).bind(config, options)  # fmt: skip
    door = serve.deployment(Door, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=MOST_REQUESTS)
    serve.run(door.bind(engines), name=NAME, route_prefix="/")


def until_stopped() -> None:
    """Wait for Ctrl-C or SIGTERM, then end replicas, each after what it answers."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    serve.shutdown()
