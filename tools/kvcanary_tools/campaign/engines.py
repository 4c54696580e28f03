"""Engines for a Setup: a random checkpoint of two layers whose continuations are known, or the embedded model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from kvcanary import CanaryConfig
from kvcanary.faults.target import Setup
from kvcanary_kernels.engine.delta_shape import DeltaShape
from spec_engine import Engine, EngineConfig
from spec_engine.loading import Models, load_models
from spec_engine.mock import KnownDraft, KnownText, MockTokenizer, known_text, random_model, with_random_weights
from spec_engine.models.decoder import Decoder
from spec_engine.models.embedded import load_excerpts
from spec_engine.models.hybrid import HybridDecoder

NUM_TEXTS = 6
DELTA = DeltaShape(k_heads=1, v_heads=2, k_dim=3, v_dim=4, width=3)
SPREAD = 8  # tokens by which prompts of one setup may be longer
SURE = 20.0  # logit scale at which the random model's greedy choice is never close
DRAFTING = ("topk", "num_steps", "num_draft_tokens", "attend")
SPARE_REQUESTS = 3  # that may run beside the batch
DEVICE_TURN = 2  # steps, where not all that run have room on the device


@dataclass(frozen=True)
class Bench:
    """An engine, and texts whose heads are its prompts."""

    engine: Engine
    texts: Sequence[Sequence[int]]

    def prompt(self, rng: random.Random, setup: Setup) -> list[int]:
        """The head of a text, between prompt_len and a little more."""
        return list(rng.choice(self.texts)[: setup.prompt_len + rng.randrange(SPREAD)])


def build(setup: Setup, canary: CanaryConfig) -> Bench:
    """A fresh engine; its models are made once a process."""
    config = engine_config(setup, canary)
    if setup.model == "embedded":
        target, draft, tokenizer = _embedded(setup.drafts)
        return Bench(Engine(config, model=target, draft=draft, tokenizer=tokenizer), _excerpts())
    is_hybrid = setup.model == "hybrid"
    target, texts = _known(setup.prompt_len, setup.new_tokens, setup.shared, setup.window, is_hybrid)
    draft = KnownDraft(target, texts, _accept_len(setup.num_steps), is_second=setup.topk > 1) if setup.drafts else None
    engine = Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())
    return Bench(engine, [text.tokens for text in texts])


def setup_of(engine: Engine) -> Setup:
    """The setup of an engine that somebody else has made, as far as it can be told."""
    config, drafts = engine.config, engine.drafter is not None
    drafting = {name: getattr(config, name) for name in DRAFTING} | {"adaptive": config.adaptive_steps}
    return Setup(
        **(drafting if drafts else {}),
        model="embedded",
        drafts=drafts,
        page_size=config.page_size,
        backend=config.attention_backend,
        schedule=config.schedule,
        graphs=config.graphs == "on",
        prefix_cache=config.prefix_cache,
        chunk=config.prefill_chunk_tokens,
        window=engine.model.config.sliding_window,
        content=config.canary.content,
    )


def engine_config(setup: Setup, canary: CanaryConfig) -> EngineConfig:
    """The engine's own settings."""
    drafting: dict[str, Any] = {"draft": "none"}
    if setup.drafts:
        drafting = {name: getattr(setup, name) for name in DRAFTING} | {"adaptive_steps": setup.adaptive}
    return EngineConfig(
        **drafting,
        dtype="float32" if setup.model == "embedded" else "float64",
        page_size=setup.page_size,
        attention_backend=setup.backend,
        schedule=setup.schedule,
        graphs="on" if setup.graphs else "off",
        prefix_cache=setup.prefix_cache,
        prefill_chunk_tokens=setup.chunk,
        host_pages=setup.host_pages,
        context_length=setup.context,
        new_token_ratio=setup.new_token_ratio,
        max_running_requests=setup.batch + SPARE_REQUESTS,
        max_total_tokens=setup.page_size * (setup.pages or (setup.batch + SPARE_REQUESTS) * _most_pages(setup)),
        max_device_tokens=None if setup.on_device is None else setup.page_size * setup.on_device * _most_pages(setup),
        device_turn=DEVICE_TURN,
        canary=canary,
    )


def _most_pages(setup: Setup) -> int:
    """Pages with which one request waits for nobody."""
    branches = setup.topk * (setup.num_steps + 2 * setup.page_size) if setup.drafts else 0
    tokens = setup.prompt_len + SPREAD + setup.new_tokens + 2 * branches + 2 * setup.page_size
    return tokens // setup.page_size + 2


def _accept_len(num_steps: int):
    """Tokens of a step: every length that there is, in an order that nobody would guess."""
    return lambda text, committed: 1 + (7 * text + 13 * committed) % (num_steps + 1)


@cache
def _known(
    prompt_len: int, new_tokens: int, shared: int, window: int | None, is_hybrid: bool
) -> tuple[Decoder, list[KnownText]]:
    windowed = {} if window is None else {"sliding_window": window, "use_sliding_window": True}
    model = random_model(0, logit_scale=SURE, max_position_embeddings=2048, **windowed)
    if is_hybrid:
        model = with_random_weights(HybridDecoder(replace(model.config, delta=DELTA, delta_layers=(0,))), seed=5)
        model.lm_head_weight.data *= SURE
    generator = torch.Generator().manual_seed(prompt_len)
    vocab_size = model.config.vocab_size
    head = torch.randint(vocab_size, (shared,), generator=generator).tolist()
    texts = []
    for _ in range(NUM_TEXTS):
        tail = torch.randint(vocab_size, (prompt_len - shared,), generator=generator).tolist()
        texts.append(known_text(model, head + tail, SPREAD + new_tokens + 1))
    return model, texts


@cache
def _embedded(drafts: bool) -> Models:
    return load_models(EngineConfig(draft="auto" if drafts else "none"), torch.device("cpu"))


@cache
def _excerpts() -> list[list[int]]:
    tokenizer = _embedded(True).tokenizer
    return [tokenizer.encode(excerpt.prompt) for excerpt in load_excerpts()]
