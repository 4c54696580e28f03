"""A run of the engine whose window map is compared with its books as it goes, kept as data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcanary import KVCorruptionError
from kvcanary.invariants import InvariantError

if TYPE_CHECKING:
    from spec_engine import Engine, EngineConfig, SamplingParams
    from spec_engine.memory.pools.window_report import RowDivergence

RANDOM_LAYERS = 4
VOCABULARY = 97


@dataclass
class WindowRun:
    """What the reports said; of each request the first one in which it diverged, else the last, with its step.

    window, page_size, layers: of the model; layers with a window, then all
    num_steps, num_reports:    of the engine, and those of them after which rows were compared
    stopped:                   the sentence of the error that ended the run; None: all prompts were completed
    """

    window: int
    page_size: int
    layers: tuple[int, int]
    num_steps: int = 0
    num_reports: int = 0
    rows: dict[str, tuple[int, RowDivergence]] = field(default_factory=dict)
    stopped: str | None = None
    certificate: dict[str, Any] | None = None

    @property
    def divergences(self) -> list[RowDivergence]:
        return [row for _, row in self.rows.values() if not row.is_clean]

    @property
    def is_clean(self) -> bool:
        found = self.certificate["findings"] if self.certificate else []
        return not (self.divergences or self.stopped or found)

    def take(self, report: Sequence[RowDivergence]) -> None:
        self.num_reports += 1
        for row in report:
            known = self.rows.get(row.request_id)
            if known is None or known[1].is_clean:
                self.rows[row.request_id] = self.num_steps, row

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "window": self.window,
            "page_size": self.page_size,
            "window_layers": self.layers[0],
            "num_layers": self.layers[1],
            "steps": self.num_steps,
            "reports": self.num_reports,
            "rows": [{"step": step, "is_clean": row.is_clean} | row.to_json() for step, row in self.rows.values()],
            "divergences": len(self.divergences),
            "stopped": self.stopped,
            "canary": self.certificate,
        }


def random_engine(config: EngineConfig, window: int) -> Engine:
    """Four random layers, every other with a window, drafted for by a random head; text is token ids."""
    from spec_engine import Engine
    from spec_engine.loading import dtype_of
    from spec_engine.mock import MockTokenizer, random_model, with_random_weights
    from spec_engine.models.eagle import Eagle

    target = random_model(
        dtype=dtype_of(config),
        architectures=["MistralForCausalLM"],
        num_hidden_layers=RANDOM_LAYERS,
        vocab_size=VOCABULARY,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * (RANDOM_LAYERS // 2),
    )
    head = random_model(num_hidden_layers=1, vocab_size=VOCABULARY).config
    draft = None if config.draft == "none" else with_random_weights(Eagle(head, target), 1, dtype_of(config))
    return Engine(config, model=target, draft=draft, tokenizer=MockTokenizer())


def random_prompts(window: int) -> list[str]:
    """Three: shorter than the window, a little longer, three times as long."""
    draw = random.Random(0)
    return [" ".join(str(draw.randrange(VOCABULARY)) for _ in range(n)) for n in (window // 2, window + 3, 3 * window)]


def watch(engine: Engine, prompts: Sequence[str], params: SamplingParams, every: int) -> WindowRun:
    """Complete the prompts and compare after every so many steps; ConfigError for a model without a window.

    What ends the run, a finding or a failed check, is a last report, not the end of the program.
    """
    engine.window_report()
    model = engine.model.config
    run = WindowRun(model.sliding_window or 0, engine.config.page_size, (len(model.window_layers), model.num_layers))
    for prompt in prompts:
        engine.submit(prompt, params)
    try:
        while engine.has_work:
            run.num_steps += 1
            engine.step()
            if run.num_steps % every == 0 and (report := engine.window_report()):
                run.take(report)
    except (KVCorruptionError, InvariantError) as error:
        run.stopped = error.report.text() if isinstance(error, KVCorruptionError) else str(error)
        run.take(engine.window_report())
    run.certificate = None if engine.canary is None else engine.canary.certificate()
    return run
