"""What an engine counts while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from spec_engine.drafting.adaptive import AdaptiveMetrics


@dataclass
class Metrics:
    """Counters since this object was made; seconds are wall time of whole steps, canary included.

    adaptive: what adaptive steps chose since the engine was made, None without them.
    """

    num_steps: int = 0
    verify_forwards: int = 0  # target forwards past the prefill, counted once a request
    tokens_emitted: int = 0  # by those forwards
    prefill_tokens: int = 0
    num_retractions: int = 0  # times that a running request gave up its pages and resumed later
    num_heals: int = 0  # times that a damaged request gave up its pages and was computed again (mode heal)
    restored_tokens: int = 0  # that came back from the host instead of being prefilled again
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    adaptive: AdaptiveMetrics | None = None

    @property
    def accepted_length(self) -> float:
        """Tokens emitted a target verify forward, bonus included, prefill excluded."""
        return self.tokens_emitted / self.verify_forwards if self.verify_forwards else 0.0

    def add_seconds(self, seconds: float, is_prefill: bool) -> None:
        if is_prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_emitted / self.decode_seconds if self.decode_seconds else 0.0
