"""Traffic for broken engines: requests of known continuations, some at once and some later, some with one head."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvcanary import CanaryConfig

if TYPE_CHECKING:
    from spec_engine import Engine
    from spec_engine.mock import KnownText
    from spec_engine.models.decoder import Decoder

NUM_TEXTS, MOST_STEPS, LATER_FROM = 6, 400, 4
POSITIONS = 1024
SURE = 20.0  # logit scale at which the greedy choice of a random model is never close


@dataclass(frozen=True)
class Case:
    """One engine and its traffic.

    draft:   "known" (told how much to get right), "self" (the target as a draft of its own), "stranger" (another random
             model) or "none";  topk, num_steps, nodes: of its trees
    prompt, shared, new: tokens of a prompt, of these in common, and to be generated
    first, later: requests at once, and one by one behind them;  repeats: every second request has the first prompt
    pages:   of the pool; None: plenty
    engine:  more settings of the engine, by name
    """

    draft: str = "known"
    page_size: int = 4
    topk: int = 2
    num_steps: int = 3
    nodes: int | None = None
    prompt: int = 21
    shared: int = 9
    new: int = 24
    first: int = 4
    later: int = 3
    repeats: bool = False
    pages: int | None = None
    window: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        tree = "plain" if self.draft == "none" else f"{self.draft} K{self.topk} T{self.num_steps}"
        return " ".join([f"P{self.page_size}", tree, *(f"{name}={value}" for name, value in self.engine.items())])


@dataclass
class Outcome:
    """How the traffic went: what ended it and in which step, and the tokens that had left, by request."""

    error: BaseException | None = None
    step: int = 0
    left: dict[str, list[int]] = field(default_factory=dict)
    accepted_len: float = 0.0


def play(case: Case, canary: CanaryConfig, seed: int = 0) -> Outcome:
    """Serve the case's traffic until all requests have ended or something stops the engine."""
    outcome, engine = Outcome(), None
    try:
        engine, texts = build(case, canary)
        _serve(case, engine, texts, random.Random(seed), outcome)
    except Exception as error:
        outcome.error = error
    if engine is not None:
        outcome.step, outcome.accepted_len = engine.metrics.num_steps, engine.metrics.accepted_length
    return outcome


def _serve(case: Case, engine: Engine, texts: list[KnownText], rng: random.Random, outcome: Outcome) -> None:
    from spec_engine import SamplingParams

    total = case.first + case.later
    chosen = [0 if case.repeats and number % 2 == 0 else rng.randrange(NUM_TEXTS) for number in range(total)]
    lens, step = [case.new - rng.randrange(6) for _ in chosen], 0
    submitted = 0

    def submit() -> None:
        nonlocal submitted
        params = SamplingParams(max_new_tokens=lens[submitted], ignore_eos=True, seed=submitted)
        engine.submit(list(texts[chosen[submitted]].prompt), params)
        submitted += 1

    while submitted < case.first:
        submit()
    while engine.has_work or submitted < total:
        step += 1
        if step > MOST_STEPS:
            raise RuntimeError(f"requests must end within {MOST_STEPS} steps, {len(engine.running)} still run")
        if submitted < total and (not engine.has_work or (step >= LATER_FROM and step % 3 == 0)):
            submit()
        for event in engine.step():
            outcome.left.setdefault(event.request_id, []).extend(event.token_ids)


def build(case: Case, canary: CanaryConfig) -> tuple[Engine, list[KnownText]]:
    """A fresh engine, and the texts whose heads are its prompts."""
    from spec_engine import Engine, EngineConfig
    from spec_engine.mock import KnownDraft, MockTokenizer
    from spec_engine.models import Standalone

    model = _model(0, case.window)
    texts = _texts(case, model)
    settings: dict[str, Any] = {"draft": "none"}
    draft: KnownDraft | Standalone | None = None
    if case.draft != "none":
        settings = {"topk": case.topk, "num_steps": case.num_steps, "num_draft_tokens": case.nodes}
    if case.draft == "known":
        draft = KnownDraft(model, texts, _accept_len(case.num_steps), is_second=case.topk > 1)
    elif case.draft != "none":
        draft, settings["draft"] = Standalone(model if case.draft == "self" else _model(4), model), "standalone"
    running = case.first + case.later
    config = EngineConfig(
        **settings
        | {
            "dtype": "float64",
            "page_size": case.page_size,
            "max_running_requests": running,
            "max_total_tokens": case.page_size * (case.pages or running * _most_pages(case)),
            "canary": canary,
        }
        | case.engine
    )
    return Engine(config, model=model, draft=draft, tokenizer=MockTokenizer()), texts


def _model(seed: int, window: int | None = None) -> Decoder:
    from spec_engine.mock import random_model

    windowed = {} if window is None else {"sliding_window": window, "use_sliding_window": True}
    return random_model(seed, logit_scale=SURE, max_position_embeddings=POSITIONS, **windowed)


def _texts(case: Case, model: Decoder) -> list[KnownText]:
    from spec_engine.mock import known_text

    generator, vocab_size = torch.Generator().manual_seed(7 * case.prompt + case.shared), model.config.vocab_size
    draw = lambda count: torch.randint(vocab_size, (count,), generator=generator).tolist()  # noqa: E731
    head = draw(case.shared)
    prompts = [head + draw(case.prompt + 3 * number - case.shared) for number in range(NUM_TEXTS)]
    return [known_text(model, prompt, case.new + 40) for prompt in prompts]


def _accept_len(num_steps: int):
    """Tokens of a step: every length that there is."""
    return lambda text, committed: 1 + (7 * text + 13 * committed) % (num_steps + 1)


def _most_pages(case: Case) -> int:
    """Pages with which one request waits for nobody."""
    branches = 0 if case.draft == "none" else case.topk * (case.num_steps + 2 * case.page_size)
    longest = case.prompt + 3 * NUM_TEXTS + case.new + 2 * branches + 2 * case.page_size
    return longest // case.page_size + 3
