"""``/debug/kvcanary``: certificate, findings, page map, requests and draft trees, as JSON and as one live page.

Off unless asked for. Every request must show the API key and name a host that is this server's own, so that no page of
another site can read it; what changes something takes the key as a bearer token only, which no browser adds by itself.
"""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from jinja2 import Template
from pydantic import BaseModel, ConfigDict
from starlette.responses import HTMLResponse, JSONResponse, Response

from kvcanary.faults.catalogue import UnknownFaultError
from spec_engine.server.errors import RefusedError
from spec_engine.server.gate import shows_key
from spec_engine.server.inspection import drawing, drilling, observing
from spec_engine.server.inspection.drafts import DraftWatch
from spec_engine.server.inspection.faulting import FaultPanel
from spec_engine.server.options import ServerOptions, is_loopback
from spec_engine.server.routes import Serving

PREFIX = "/debug/kvcanary"
NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class FaultBody(BaseModel):
    """``POST /debug/kvcanary/faults``: arm a fault of the catalogue, or disarm it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    armed: bool = True


def router(serving: Serving, panel: FaultPanel) -> APIRouter:
    """The pages of a server, and a watch over its engine's drafter."""
    options, worker = serving.options, serving.worker
    drafter = worker.engine.drafter
    watch = None if drafter is None else DraftWatch(drafter)
    routes = APIRouter(prefix=PREFIX, dependencies=[Depends(_guard(options))])
    templates = drawing.templates()
    page = templates.get_template("canary.html")

    @routes.get("")
    async def live() -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = page.render(nonce=nonce, prefix=PREFIX, model=serving.model_name, mode=worker.engine.config.canary.mode)
        return HTMLResponse(text, headers=NO_STORE | {"Content-Security-Policy": policy})

    _add_report(routes, serving, templates.get_template("report.html"))
    for name, read in (
        ("state", observing.state_of),
        ("certificate", observing.certificate_of),
        ("findings", observing.findings_of),
        ("incidents", observing.incidents_of),
        ("pages", observing.pages_of),
        ("requests", observing.requests_of),
    ):
        routes.add_api_route(f"/{name}", _asking(serving, read), methods=["GET"], name=name)

    @routes.get("/dump")
    async def dump() -> Response:
        written = await worker.call(observing.dump_of)
        if written is None:
            raise RefusedError(404, "nothing is recorded here: serve with --kv-canary, and leave its ring")
        return Response(written, media_type="application/zip", headers=NO_STORE)

    @routes.get("/requests/{request_id}/tree")
    async def tree(request_id: str) -> Response:
        drawn = None if watch is None else await worker.call(lambda engine: watch.tree_of(engine, request_id))
        if drawn is None:
            raise RefusedError(404, "no tree was drafted for a request of that name, or it is long over")
        return _json(drawn)

    if options.allow_faults:
        _add_faults(routes, serving, panel)
        _add_drill(routes, serving, panel)
    return routes


def _add_report(routes: APIRouter, serving: Serving, template: Template) -> None:
    has_dump = serving.worker.engine.config.canary.ring > 0

    @routes.get("/report")
    async def report(request: Request) -> Response:
        found = await serving.worker.call(observing.reported_of)
        drawn = drawing.incidents(found, str(request.base_url).rstrip("/"))
        return HTMLResponse(template.render(drawn, prefix=PREFIX, has_dump=has_dump), headers=NO_STORE)


def _add_faults(routes: APIRouter, serving: Serving, panel: FaultPanel) -> None:
    worker = serving.worker

    @routes.get("/faults")
    async def faults() -> Response:
        return _json(await worker.call(lambda engine: panel.status()))

    @routes.post("/faults")
    async def arm(body: FaultBody, request: Request) -> Response:
        _expect_own_machine(serving, request)
        act = panel.arm if body.armed else panel.disarm
        try:
            await worker.call(lambda engine: act(body.name))
        except UnknownFaultError as error:
            raise RefusedError(400, f"{error}; {error.hint}", param="name") from error
        return await faults()


def _add_drill(routes: APIRouter, serving: Serving, panel: FaultPanel) -> None:
    @routes.post("/drill")
    async def drilled(request: Request) -> Response:
        _expect_own_machine(serving, request)
        return _json(await drilling.drill(serving.worker, panel))


def _expect_own_machine(serving: Serving, request: Request) -> None:
    """RefusedError for whoever may not make a fault."""
    if request.client is None or not is_loopback(request.client.host):
        raise RefusedError(403, "faults are armed from this machine alone")
    if not shows_key(request.headers, serving.options.api_key or ""):
        raise RefusedError(403, "faults take the API key as a bearer token only")


def _asking(serving: Serving, read: Any) -> Any:
    async def ask() -> Response:
        return _json(await serving.worker.call(read))

    return ask


def _guard(options: ServerOptions) -> Any:
    async def guard(request: Request) -> None:
        host = _name(request.headers.get("host", ""))
        if host not in options.known_hosts:
            raise RefusedError(403, "the Host header names no host of this server", code="wrong_host")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != request.headers["host"].lower():
            raise RefusedError(403, "the Origin header names another site", code="wrong_origin")
        if not shows_key(request.headers, options.api_key or "", basic=True):
            raise RefusedError(401, "the debug pages need the API key", code="invalid_api_key")

    return guard


def _name(host: str) -> str:
    """A Host header without its port."""
    return host.lower() if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()


def _json(value: Any) -> Response:
    return JSONResponse(value, headers=NO_STORE)
