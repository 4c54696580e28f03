"""One HTTP request through an ASGI application of this process: what `Replica` answers, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ASGI = {"version": "3.0", "spec_version": "2.4"}


@dataclass(frozen=True)
class Asked:
    """A request, as one value that travels between processes. `prefix`: what its prompt begins with, for the router."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    prefix: str = ""

    def scope(self) -> dict[str, Any]:
        return {
            "type": "http", "asgi": ASGI, "http_version": "1.1", "scheme": "http", "method": self.method,
            "path": self.path, "raw_path": self.path.encode(), "query_string": self.query, "root_path": "",
            "headers": list(self.headers), "client": self.client, "server": None,
        }  # fmt: skip


async def answer(app: Any, asked: Asked) -> AsyncIterator[Any]:
    """First (status, headers), then pieces of the body. Whoever stops to listen disconnects."""
    sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    is_left = asyncio.Event()
    bodies = [{"type": "http.request", "body": asked.body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if bodies:
            return bodies.pop()
        await is_left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(asked.scope(), receive, sent.put)
        finally:
            await sent.put(None)

    running = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
            elif message.get("body"):
                yield message["body"]
        await running
    finally:
        is_left.set()
        if not running.done():
            with suppress(asyncio.CancelledError):
                await running
