"""The application: gate, routes, health and metrics around one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from spec_engine.engine import Engine
from spec_engine.server import handovers, routes
from spec_engine.server.chat import ChatTemplate
from spec_engine.server.errors import handle_errors
from spec_engine.server.exposition import Timings, exposition
from spec_engine.server.gate import Gate
from spec_engine.server.health import health
from spec_engine.server.inspection.faulting import FaultPanel, TargetOf
from spec_engine.server.options import ServerOptions
from spec_engine.server.routes import Serving
from spec_engine.server.worker import EngineWorker

if TYPE_CHECKING:
    from kvcanary import CanaryManager, HookClock


def create_app(
    engine: Engine,
    options: ServerOptions,
    on_failure: Callable[[], None] = lambda: None,
    target_of: TargetOf | None = None,
) -> tuple[FastAPI, EngineWorker]:
    """An ASGI application whose lifespan starts and ends the engine's thread, and that thread's worker.

    on_failure: called on the event loop when the engine stops by itself; ``worker.failure`` says why.
    target_of: how a fault sees an engine, for faults in its state.
    """
    worker, timings, panel = EngineWorker(engine, options.max_waiting), Timings(), FaultPanel(engine, target_of)
    if options.allow_faults:
        worker.before_step = panel.strike
    side = handovers.make_side(engine, options)
    clock = None if engine.canary is None else _clock(engine.canary)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start(on_failure)
        tending = None if side is None else asyncio.create_task(handovers.tend(worker, side))
        try:
            yield
        finally:
            if tending is not None:
                tending.cancel()
            await worker.stop()
            panel.disarm_all()

    template = ChatTemplate.of(engine.config.model)
    serving = Serving(worker, model_name_of(engine, options), template, options, timings, started=int(time.time()))
    app = FastAPI(title="kvcanary", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, options=options)
    handle_errors(app)
    app.include_router(routes.router(serving))
    if side is not None:
        app.include_router(handovers.router(serving, side))

    @app.get("/health")
    async def report_health() -> Response:
        status, body = await health(worker)
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def report_metrics() -> Response:
        return Response(
            await exposition(
                worker, timings, clock, serving.model_name, lambda: () if side is None else handovers.metrics(side)
            ),
            media_type=CONTENT_TYPE_LATEST,
        )

    if options.has_debug:
        from spec_engine.server.inspection import pages as debug

        app.include_router(debug.router(serving, panel), include_in_schema=False)
    return app, worker


def _clock(canary: CanaryManager) -> HookClock:
    from kvcanary import HookClock

    return HookClock(canary)


def model_name_of(engine: Engine, options: ServerOptions) -> str:
    """What clients call the model: as they were told to, "embedded", or the name of its folder."""
    return options.model_name or Path(engine.config.model).resolve().name
