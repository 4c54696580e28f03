"""One run of the engine over some prompts, kept as data: outputs, speed, certificate, and what stopped it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcanary import KVCorruptionError

if TYPE_CHECKING:
    from kvcanary import Report
    from spec_engine import ConfigError, Engine, SamplingParams, TokenEvent
    from spec_engine.acceptance.logprobs import TokenLogProb
    from spec_engine.drafting.adaptive import AdaptiveMetrics

#: Why a request ended that a finding stopped.
CORRUPTION = "kv_corruption"
#: Why a prompt never ran.
REFUSED = "refused"


@dataclass
class Completion:
    """What left the engine for one prompt; `finish_reason` is None while it runs.

    logprobs: one entry a token, where asked for; error: why the prompt was refused.
    """

    request_id: str
    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogProb] | None = None
    error: str | None = None

    def add(self, event: TokenEvent) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason
        if self.logprobs is not None:
            self.logprobs += event.logprobs or ()

    def as_dict(self) -> dict[str, Any]:
        reported = {"text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason}
        if self.logprobs is not None:
            reported["logprobs"] = [asdict(entry) for entry in self.logprobs]
        return reported if self.error is None else reported | {"error": self.error}


@dataclass
class Generation:
    """Everything that one run produced; `report` is set when a finding stopped it.

    refusals: of prompts that could never run; their completions are there too.
    tokens_emitted, verify_forwards, decode_seconds: of this run alone, prefill excluded.
    num_retractions: times that a request gave up its pages for want of others, and resumed.
    restored_tokens: that then came back from the host, and were not computed again.
    adaptive: which numbers of steps the engine chose since it was made, None where it may not choose.
    """

    completions: list[Completion]
    tokens_emitted: int
    verify_forwards: int
    decode_seconds: float
    num_retractions: int
    restored_tokens: int
    certificate: dict[str, Any] | None
    report: Report | None
    refusals: list[ConfigError] = field(default_factory=list)
    adaptive: AdaptiveMetrics | None = None

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
            "adaptive": None if self.adaptive is None else self.adaptive.as_dict(),
            "num_retractions": self.num_retractions,
            "restored_tokens": self.restored_tokens,
            "canary": self.certificate,
        }


def generate(
    engine: Engine,
    prompts: Sequence[str],
    params: SamplingParams,
    listener: Callable[[Completion, TokenEvent], None] | None = None,
) -> Generation:
    """Complete the prompts; `listener` sees every event as it comes. A finding ends the run, not the program.

    A prompt that is refused does not stop the others. ConfigError where ``params`` are no good for any prompt.
    """
    params.check_vocabulary(engine.model.config.vocab_size)
    before = replace(engine.metrics)
    all_completions, refusals = _submit(engine, prompts, params)
    completions = {completion.request_id: completion for completion in all_completions}
    report = None
    try:
        while engine.has_work:
            for event in engine.step():
                completion = completions.get(event.request_id)
                if completion is None:
                    continue  # a request that a re-enacted fault has brought
                completion.add(event)
                if listener is not None:
                    listener(completion, event)
    except KVCorruptionError as error:
        report = error.report
        for completion in all_completions:
            completion.finish_reason = completion.finish_reason or CORRUPTION
    return Generation(
        completions=all_completions,
        tokens_emitted=engine.metrics.tokens_emitted - before.tokens_emitted,
        verify_forwards=engine.metrics.verify_forwards - before.verify_forwards,
        decode_seconds=engine.metrics.decode_seconds - before.decode_seconds,
        num_retractions=engine.metrics.num_retractions - before.num_retractions,
        restored_tokens=engine.metrics.restored_tokens - before.restored_tokens,
        certificate=None if engine.canary is None else engine.canary.certificate(),
        report=report,
        refusals=refusals,
        adaptive=engine.metrics.adaptive,
    )


def _submit(
    engine: Engine, prompts: Sequence[str], params: SamplingParams
) -> tuple[list[Completion], list[ConfigError]]:
    from spec_engine import ConfigError

    completions, refusals = [], []
    for prompt in prompts:
        logprobs: list[TokenLogProb] | None = None if params.logprobs is None else []
        try:
            completions.append(Completion(engine.submit(prompt, params), prompt, logprobs=logprobs))
        except ConfigError as error:
            refusals.append(error)
            completions.append(Completion("", prompt, finish_reason=REFUSED, error=str(error)))
    return completions, refusals
