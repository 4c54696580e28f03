"""``/v1/handover``: prompts that are prefilled here and decoded by another server, or prefilled there and decoded here.

GET   /v1/handover                on a prefill server: its card, for the handshake of those that decode
POST  /v1/handover                on a prefill server: a body of /v1/completions; gives a handover, as bytes
POST  /v1/handover/completions    on a decode server: such bytes; answers as /v1/completions does
"""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
import uuid
from collections.abc import Iterator
from urllib.error import URLError

from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

from kvcanary import SealError
from kvcanary.transfers import Peer
from spec_engine.disagg.card import EngineCard
from spec_engine.disagg.decode_side import Arrival, DecodeSide
from spec_engine.disagg.errors import HandoverError, HandshakeError
from spec_engine.disagg.handover import Handover
from spec_engine.disagg.links import make_link
from spec_engine.disagg.prefill_side import PrefillSide
from spec_engine.engine import Engine
from spec_engine.request import HANDED_OVER
from spec_engine.server.answers import Completions
from spec_engine.server.errors import RefusedError
from spec_engine.server.options import ServerOptions
from spec_engine.server.protocol import CompletionBody
from spec_engine.server.routes import Answer, Serving, answer, check_model, encode
from spec_engine.server.worker import EngineWorker

BYTES = "application/octet-stream"
POLL_SECONDS = 0.002  # between two looks whether bytes have come
TEND_SECONDS = 1.0  # between two looks at leases and late transfers
FETCH_SECONDS = 5.0  # that a peer's card is waited for
MOST_CARD_BYTES = 1 << 20

Side = PrefillSide | DecodeSide


def make_side(engine: Engine, options: ServerOptions) -> Side | None:
    """What the engine adds for its role; None: it has none. ConfigError where it has no host tier, or no transport."""
    if options.role is None:
        return None
    own = uuid.uuid4().hex
    peer = Peer(options.peer_name or f"{options.role} {socket.gethostname()}", 0, _device_of(engine) or own)
    link = make_link(options.transport, f"{peer.engine} {own}", options.host.strip("[]"))
    if options.role == "prefill":
        return PrefillSide(engine, link, peer, options.lease_seconds)
    return DecodeSide(engine, link, peer, options.handover_timeout)


def router(serving: Serving, side: Side) -> APIRouter:
    routes = APIRouter(prefix="/v1/handover")
    if isinstance(side, PrefillSide):
        _add_prefill(routes, serving, side)
    else:
        _add_decode(routes, serving, side)
    return routes


async def tend(worker: EngineWorker, side: Side) -> None:
    """For ever: leases that are over and transfers that came late are let go of, whoever asks for something or not."""
    while True:
        await asyncio.sleep(TEND_SECONDS)
        await worker.call(lambda engine: side.tend())


def metrics(side: Side) -> Iterator[Metric]:
    """Of a prefill server its leases, of a decode server what has come and what has not."""
    if isinstance(side, PrefillSide):
        yield GaugeMetricFamily("spec_engine_leases", "Requests whose bytes nobody has taken yet.", len(side.leases))
        about = "Requests whose bytes nobody has taken in time."
        yield CounterMetricFamily("spec_engine_leases_expired", about, side.num_expired)
        return
    family = CounterMetricFamily("spec_engine_handovers", "Requests that were prefilled elsewhere.", labels=["result"])
    for result, count in {"arrived": side.num_arrived, **side.misses}.items():
        family.add_metric([result], count)
    yield family
    about = "Transfers that nobody waits for, and that are not over."
    yield GaugeMetricFamily("spec_engine_late_transfers", about, side.num_late)


# prefill


def _add_prefill(routes: APIRouter, serving: Serving, side: PrefillSide) -> None:
    worker = serving.worker

    @routes.get("")
    async def card() -> Response:
        return Response(side.card.to_bytes(), media_type=BYTES)

    @routes.post("")
    async def prefill(body: CompletionBody) -> Response:
        check_model(serving, body.model)
        body.check()
        prompts = await encode(serving, body.prompts)
        if len(prompts) != 1 or body.num_choices != 1:
            raise RefusedError(400, f"one prompt is handed over at a time, got {len(prompts)} of {body.num_choices}")
        params = body.sampling(body.max_tokens or 16, body.logprobs)
        job = await worker.submit(prompts, params, hands_over=True)
        name, reason = [(event.request_id, event.finish_reason) async for _, event in job][-1]
        if reason != HANDED_OVER:
            raise RefusedError(500, f"the prompt was not prefilled: it ended as {reason}", code="not_prefilled")
        handover = await worker.call(lambda engine: side.hand_over(name))
        return Response(handover.to_bytes(), media_type=BYTES)


# decode


def _add_decode(routes: APIRouter, serving: Serving, side: DecodeSide) -> None:
    @routes.post("/completions")
    async def decode(request: Request, stream: bool = False, include_usage: bool = False) -> Response:
        try:
            handover = Handover.from_bytes(await request.body())
            arrival = await _arrived(serving, side, handover)
        except (SealError, HandoverError) as error:
            raise RefusedError(400, str(error), code="bad_handover") from error
        except HandshakeError as error:
            raise RefusedError(409, str(error), code="engines_do_not_fit") from error
        shapes = Completions(serving.model_name, serving.worker.engine.tokenizer)
        began = time.perf_counter()
        job = await serving.worker.submit_by([lambda engine: side.submit(arrival)])
        asked = Answer(shapes, [handover.params], len(handover.tokens), stream, include_usage)
        return await answer(serving, request, asked, job, began)


async def _arrived(serving: Serving, side: DecodeSide, handover: Handover) -> Arrival:
    """When there is nothing more to wait for. Who goes away meanwhile leaves nothing behind."""
    worker = serving.worker
    await _meet(serving, side, handover.origin)
    arrival = await worker.call(lambda engine: side.begin(handover))
    try:
        while not await worker.call(lambda engine: arrival.is_over(time.monotonic())):
            await asyncio.sleep(POLL_SECONDS)
    except BaseException:
        worker.post(lambda: side.cancel(arrival))
        raise
    return arrival


async def _meet(serving: Serving, side: DecodeSide, origin: Peer) -> None:
    """Shake hands with whoever has sent a handover, if it is one of the peers that this server was told of."""
    if side.knows(origin):
        return
    for url in serving.options.peers:
        card = await asyncio.to_thread(_card_of, url, serving.options.api_key)
        if card is not None and card.peer == origin:
            await serving.worker.call(lambda engine, card=card: side.meet(card))  # type: ignore[misc]


def _card_of(url: str, api_key: str | None) -> EngineCard | None:
    """None where nobody answers there."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/handover", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=FETCH_SECONDS) as answered:
            return EngineCard.from_bytes(answered.read(MOST_CARD_BYTES))
    except (URLError, OSError):
        return None


def _device_of(engine: Engine) -> str:
    """Id of its GPU; empty on a CPU, where the process stands for itself."""
    if engine.device.type != "cuda":
        return ""
    import torch

    return str(torch.cuda.get_device_properties(engine.device).uuid)
