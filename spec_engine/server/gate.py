"""What stands before every route: how long a body may be, how many requests at a time, and who may ask."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_engine.server.errors import RefusedError, error_response
from spec_engine.server.options import ServerOptions


class Gate:
    """ASGI middleware: 401 for /v1 without the key, 413 for long bodies, 429 for too many requests at a time."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options
        self._num_served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_counted = scope["path"].startswith("/v1")
        try:
            if is_counted:
                self._check(Headers(scope=scope))
            receive = await self._read(receive)
        except RefusedError as refused:
            await error_response(refused)(scope, receive, send)
            return
        self._num_served += is_counted
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_served -= is_counted

    def _check(self, headers: Headers) -> None:
        options = self._options
        if options.api_key is not None and not shows_key(headers, options.api_key):
            raise RefusedError(401, "the API key is missing or wrong", code="invalid_api_key")
        if self._num_served >= options.max_concurrent:
            message = f"{self._num_served} requests are answered at the moment, which is the limit: try again later"
            raise RefusedError(429, message, code="rate_limit_exceeded")

    async def _read(self, receive: Receive) -> Receive:
        """The whole body, then whatever comes behind it; RefusedError as soon as it is too long."""
        body, most = bytearray(), self._options.max_body_bytes
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > most:
                raise RefusedError(413, f"the body must have at most {most} bytes", code="body_too_long")
            if not message.get("more_body"):
                break
        pending = [message | {"body": bytes(body)} if message["type"] == "http.request" else message]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


def shows_key(headers: Mapping[str, str], api_key: str, basic: bool = False) -> bool:
    """Whether an Authorization header has the key; ``basic``: also as the password that a browser asks for."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return _is_equal(value.strip(), api_key)
    if scheme.lower() == "basic" and basic:
        return _is_equal(_password(value), api_key)
    return False


def _is_equal(shown: str, api_key: str) -> bool:
    return secrets.compare_digest(shown.encode("utf-8", "replace"), api_key.encode())


def _password(value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
