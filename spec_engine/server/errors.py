"""Refusals as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from spec_engine.errors import ConfigError
from spec_engine.server.worker import BusyError, ServerStoppedError

RETRY_SECONDS = "1"


class RefusedError(Exception):
    """A request that is answered with an error body; ``param`` names the field at fault."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.kind = kind or _kind(status)


def error_response(refused: RefusedError) -> JSONResponse:
    headers = {"Retry-After": RETRY_SECONDS} if refused.status == 429 else {}
    if refused.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="kvcanary"'
    return JSONResponse(error_body(refused), refused.status, headers)


def error_body(refused: RefusedError) -> dict[str, Any]:
    return {
        "error": {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code},
    }


def handle_errors(app: FastAPI) -> None:
    """Every way in which a request can fail becomes an error body; what the client sent is not repeated in it."""
    for kind, handler in (
        (RefusedError, _refused),
        (RequestValidationError, _invalid),
        (HTTPException, _http),
        (ConfigError, _config),
        (BusyError, _busy),
        (ServerStoppedError, _stopped),
    ):
        app.add_exception_handler(kind, handler)


async def _refused(request: Request, error: RefusedError) -> JSONResponse:
    return error_response(error)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return error_response(RefusedError(400, "the body must be JSON, and it is not"))
    if first["type"] == "extra_forbidden":
        message = f"this server knows no parameter {'.'.join(place)!r}"
        return error_response(RefusedError(400, message, param=place[0], code="unknown_parameter"))
    name = ".".join(place)
    message = f"{name}: {first['msg']}" if name else str(first["msg"])
    return error_response(RefusedError(400, _printable(message), param=_printable(place[0]) if place else None))


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    return error_response(RefusedError(error.status_code, str(error.detail)))


async def _config(request: Request, error: ConfigError) -> JSONResponse:
    hint = f"; {error.hint}" if error.hint else ""
    return error_response(RefusedError(400, f"{error}{hint}"))


async def _busy(request: Request, error: BusyError) -> JSONResponse:
    return error_response(RefusedError(429, str(error), code="rate_limit_exceeded"))


async def _stopped(request: Request, error: ServerStoppedError) -> JSONResponse:
    return error_response(RefusedError(503, str(error), code="server_stopped"))


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
