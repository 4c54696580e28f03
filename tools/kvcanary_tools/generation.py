"""One run of the engine over some prompts, kept as data: outputs, speed, certificate, and what stopped it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcanary import KVCorruptionError

if TYPE_CHECKING:
    from kvcanary import Report
    from spec_engine import Engine, SamplingParams, TokenEvent

#: Why a request ended that a finding stopped.
CORRUPTION = "kv_corruption"


@dataclass
class Completion:
    """What left the engine for one prompt; `finish_reason` is None while it runs."""

    request_id: str
    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: TokenEvent) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason

    def as_dict(self) -> dict[str, Any]:
        return {"text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason}


@dataclass
class Generation:
    """Everything that one run produced; `report` is set when a finding stopped it.

    tokens_emitted, verify_forwards, decode_seconds: of this run alone, prefill excluded.
    num_retractions: times that a request gave up its pages for want of others, and resumed.
    """

    completions: list[Completion]
    tokens_emitted: int
    verify_forwards: int
    decode_seconds: float
    num_retractions: int
    certificate: dict[str, Any] | None
    report: Report | None

    @property
    def accepted_length(self) -> float:
        """Tokens a target forward, the bonus token included."""
        return self.tokens_emitted / max(self.verify_forwards, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_emitted / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def findings(self) -> list[dict[str, Any]]:
        return self.certificate["findings"] if self.certificate else []

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "outputs": [completion.as_dict() for completion in self.completions],
            "accepted_length": self.accepted_length,
            "tokens_per_second": self.tokens_per_second,
            "num_retractions": self.num_retractions,
            "canary": self.certificate,
        }


def generate(
    engine: Engine,
    prompts: Sequence[str],
    params: SamplingParams,
    listener: Callable[[Completion, TokenEvent], None] | None = None,
) -> Generation:
    """Complete the prompts; `listener` sees every event as it comes. A finding ends the run, not the program."""
    before = replace(engine.metrics)
    completions = {}
    for prompt in prompts:
        request_id = engine.submit(prompt, params)
        completions[request_id] = Completion(request_id, prompt)
    report = None
    try:
        while engine.has_work:
            for event in engine.step():
                completion = completions[event.request_id]
                completion.add(event)
                if listener is not None:
                    listener(completion, event)
    except KVCorruptionError as error:
        report = error.report
        for completion in completions.values():
            completion.finish_reason = completion.finish_reason or CORRUPTION
    return Generation(
        completions=list(completions.values()),
        tokens_emitted=engine.metrics.tokens_emitted - before.tokens_emitted,
        verify_forwards=engine.metrics.verify_forwards - before.verify_forwards,
        decode_seconds=engine.metrics.decode_seconds - before.decode_seconds,
        num_retractions=engine.metrics.num_retractions - before.num_retractions,
        certificate=None if engine.canary is None else engine.canary.certificate(),
        report=report,
    )
