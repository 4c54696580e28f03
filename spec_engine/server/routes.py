"""``/v1``: completions, chat, models. A request becomes a job of the engine's thread, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse
from starlette.responses import JSONResponse, Response

from spec_engine.request import TokenEvent
from spec_engine.sampling import SamplingParams
from spec_engine.server.answers import Chats, Choice, Completions, Usage
from spec_engine.server.chat import ChatTemplate
from spec_engine.server.errors import RefusedError
from spec_engine.server.exposition import Timings
from spec_engine.server.options import ServerOptions
from spec_engine.server.protocol import ChatBody, CompletionBody, Sampled
from spec_engine.server.worker import EngineWorker, Job

POLL_SECONDS = 0.1  # between two looks whether a client that waits for a whole answer is still there


@dataclass(frozen=True)
class Serving:
    """What answers requests: the worker, and what the model is called and talks like."""

    worker: EngineWorker
    model_name: str
    template: ChatTemplate
    options: ServerOptions
    timings: Timings
    started: int


@dataclass(frozen=True)
class Answer:
    """In which shape the sequences of a request are told, by their parameters.

    echoes: texts that come before those of the choices
    """

    shapes: Completions
    params: Sequence[SamplingParams]
    prompt_tokens: int
    stream: bool
    wants_usage: bool
    echoes: Sequence[str] | None = None

    @classmethod
    def of(
        cls,
        body: Sampled,
        shapes: Completions,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        echoes: Sequence[str] | None = None,
    ) -> Answer:
        """What a body asks for."""
        return cls(shapes, params, sum(map(len, prompts)), bool(body.stream), body.wants_usage, echoes)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(serving)]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(serving, name)
        return _model(serving)

    @routes.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        check_model(serving, body.model)
        body.check()
        _check_count(serving, len(body.prompts) * body.num_choices)
        prompts = await encode(serving, body.prompts)
        params = [own for _ in prompts for own in body.sampling(body.max_tokens or 16, body.logprobs)]
        shapes = Completions(serving.model_name, serving.worker.engine.tokenizer)
        echoes = _echoes(serving, body) if body.echo else None
        asked = Answer.of(body, shapes, prompts, params, echoes)
        return await _run(serving, request, body, asked, prompts)

    @routes.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        check_model(serving, body.model)
        body.check()
        _check_count(serving, body.num_choices)
        text = serving.template.render([message.for_template() for message in body.messages])
        prompts = await encode(serving, [text])
        room = serving.worker.engine.sizes.context_length - len(prompts[0])
        max_tokens = body.most_tokens or max(1, min(serving.options.max_tokens, room))
        shapes = Chats(serving.model_name, serving.worker.engine.tokenizer)
        asked = Answer.of(body, shapes, prompts, body.sampling(max_tokens, body.num_logprobs))
        return await _run(serving, request, body, asked, prompts)

    return routes


def _model(serving: Serving) -> dict[str, Any]:
    sizes = serving.worker.engine.sizes
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.started,
        "owned_by": "kvcanary",
        "max_model_len": sizes.context_length,
    }


def check_model(serving: Serving, name: str) -> None:
    if name != serving.model_name:
        message = f"the model {serving.model_name!r} is served here, and no other"
        raise RefusedError(404, message, param="model", code="model_not_found")


def _check_count(serving: Serving, num_sequences: int) -> None:
    """RefusedError where one request asks for more sequences than may ever wait and run: before any is made."""
    most = serving.worker.capacity
    if num_sequences > most:
        raise RefusedError(400, f"one request may have {most} sequences here, got {num_sequences}", param="n")


async def encode(serving: Serving, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Token ids of every prompt; RefusedError for one that leaves no room for a token."""
    encode = serving.worker.engine.tokenizer.encode
    ids = [await asyncio.to_thread(encode, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    most = serving.worker.engine.sizes.context_length
    for own in ids:
        if len(own) >= most:
            message = f"the prompt has {len(own)} tokens, and the context of {most} has no room for an answer"
            raise RefusedError(400, message, param="prompt", code="context_length_exceeded")
    return ids


def _echoes(serving: Serving, body: CompletionBody) -> list[str]:
    """The prompts as an echo shows them, one for each choice."""
    engine = serving.worker.engine
    tokenizer, known = engine.tokenizer, range(engine.model.config.vocab_size)
    texts = [
        own if isinstance(own, str) else tokenizer.decode([token for token in own if token in known])
        for own in body.prompts
    ]
    return [text for text in texts for _ in range(body.num_choices)]


async def _run(
    serving: Serving, request: Request, body: Sampled, asked: Answer, prompts: Sequence[Sequence[int]]
) -> Response:
    began = time.perf_counter()
    job = await serving.worker.submit([prompt for prompt in prompts for _ in range(body.num_choices)], asked.params)
    return await answer(serving, request, asked, job, began)


async def answer(serving: Serving, request: Request, asked: Answer, job: Job, began: float) -> Response:
    """What becomes of a job, as the client wants it; ``began``: when its request came, by `time.perf_counter`."""
    usage, shapes = Usage(asked.prompt_tokens), asked.shapes
    texts = asked.echoes or [""] * len(asked.params)
    choices = [
        Choice(text, logprobs=None if own.logprobs is None else [])
        for text, own in zip(texts, asked.params, strict=True)
    ]
    events = _timed(serving, job, choices, usage, began)
    if asked.stream:
        stream = _stream(serving.worker, job, events, shapes, choices, usage, asked.wants_usage)
        return EventSourceResponse(stream, headers={"Cache-Control": "no-store"}, sep="\n")
    if not await _collect(request, serving.worker, job, events):
        return Response(status_code=499)  # nobody is there to read it
    return JSONResponse(shapes.whole(choices, usage))


async def _timed(
    serving: Serving, job: Job, choices: Sequence[Choice], usage: Usage, began: float
) -> AsyncIterator[tuple[int, Any, int]]:
    """Each event of a job with its choice's length before it, while choices, usage and timings grow."""
    async for index, event in job:
        if not usage.completion_tokens and event.token_ids:
            serving.timings.first_token.observe(time.perf_counter() - began)
        offset = len(choices[index].text)
        choices[index].add(event)
        usage.completion_tokens += len(event.token_ids)
        yield index, event, offset
    serving.timings.request.observe(time.perf_counter() - began)


async def _collect(request: Request, worker: EngineWorker, job: Job, events: AsyncIterator[Any]) -> bool:
    """Wait for the end of a job; False when the client went away first, whose sequences then end too."""
    ended = asyncio.create_task(_exhaust(events))
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=POLL_SECONDS)
            if not ended.done() and await request.is_disconnected():
                return False
        await ended
        return True
    finally:
        worker.cancel(job)
        ended.cancel()
        with suppress(asyncio.CancelledError):
            await ended


async def _exhaust(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def _stream(
    worker: EngineWorker,
    job: Job,
    events: AsyncIterator[tuple[int, Any, int]],
    shapes: Completions,
    choices: Sequence[Choice],
    usage: Usage,
    wants_usage: bool,
) -> AsyncIterator[dict[str, str]]:
    """Server-sent events; closing it, as happens when the client has gone, ends what still runs."""
    try:
        for chunk in shapes.opening(len(choices)):
            yield _sse(chunk)
        for index, choice in enumerate(choices):
            if choice.text:  # an echo
                yield _sse(shapes.chunk(index, TokenEvent("", (), choice.text), 0))
        async for index, event, offset in events:
            yield _sse(shapes.chunk(index, event, offset))
        if wants_usage:
            yield _sse(shapes.closing(usage))
        yield {"data": "[DONE]"}
    finally:
        worker.cancel(job)


def _sse(chunk: dict[str, Any]) -> dict[str, str]:
    return {"data": json.dumps(chunk, ensure_ascii=False, allow_nan=False)}
