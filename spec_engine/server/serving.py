"""Serving: a socket, uvicorn around the application, signals, and how it all ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from sse_starlette.sse import AppStatus

from spec_engine.engine import Engine
from spec_engine.errors import ConfigError
from spec_engine.server.app import create_app, model_name_of
from spec_engine.server.inspection.faulting import TargetOf
from spec_engine.server.options import ServerOptions, in_url

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(options: ServerOptions) -> socket.socket:
    """A listening socket, before anything is loaded; ConfigError when the port is taken or the host is not ours."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host.strip("[]"), options.port))
        listening.listen(256)
    except OSError as error:
        listening.close()
        place = f"{in_url(options.host)}:{options.port}"
        hint = "choose another --host or --port; port 0 is any free one"
        raise ConfigError(f"cannot listen on {place}: {error.strerror}", hint) from None
    return listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{in_url(host)}:{port}"


class Server(uvicorn.Server):
    """uvicorn that lets running requests finish when it is told to stop, and returns instead of dying by the signal.

    A second signal ends them at once.
    """

    def __init__(self, engine: Engine, options: ServerOptions, target_of: TargetOf | None = None) -> None:
        self.options = options
        self.model_name = model_name_of(engine, options)
        app, self.worker = create_app(engine, options, self.stop, target_of)
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", server_header=False))

    def stop(self) -> None:
        """Take no more connections; `run` returns when what runs has ended. Told twice it waits for nothing."""
        self.worker.hurries = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self.worker.drain(self.options.grace_seconds))
        await super().shutdown(sockets)
        await draining

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def reported(number: int, frame: FrameType | None) -> None:
            self.stop()

        before = {number: signal.signal(number, reported) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(server: Server, listening: socket.socket) -> BaseException | None:
    """Serve until a signal or a failure; what stopped the engine, None where nothing did."""
    AppStatus.disable_automatic_graceful_drain()  # streams end by themselves: the worker drains
    server.run(sockets=[listening])
    return server.worker.failure
