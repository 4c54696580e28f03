"""How many steps to draft: fewer where drafts are refused, more where they are accepted, none in large batches.

Chains only: a tree's shape depends on T in more ways than its length. Whatever T may become at run time, rows, pools
and buffers are sized by the largest candidate, so that a switch needs no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spec_engine.errors import ConfigError

DEFAULT_CANDIDATES = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}


@dataclass(frozen=True)
class AdaptiveConfig:
    """What the policy may choose, and how fast.

    candidates: smallest batch size -> numbers of steps, ascending; 0 verifies the root alone.
    alpha: weight of the last batch in the moving average of accepted drafts a request.
    warmup, interval: batches before the first decision, and from one decision to the next.
    probe_interval: batches without drafts, which teach nothing, before one step is tried again.
    down_hysteresis, up_hysteresis: T falls to a candidate t when the average is at most t - 0.5 + down_hysteresis, and
        rises from t when it is above t - 0.5 + up_hysteresis; the further apart the two, the longer T stays.
    zero_threshold: average at or below which T falls to 0.
    """

    candidates: Mapping[int, Sequence[int]] = field(default_factory=lambda: dict(DEFAULT_CANDIDATES))
    alpha: float = 0.2
    warmup: int = 10
    interval: int = 5
    probe_interval: int = 50
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0
    zero_threshold: float = 0.25

    def __post_init__(self) -> None:
        _check_candidates(self.candidates)
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha must lie in (0, 1], got {self.alpha}: it is the weight of the last batch")
        for name, least in (("warmup", 0), ("interval", 1), ("probe_interval", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least} batches, got {getattr(self, name)}")
        if self.down_hysteresis > self.up_hysteresis:
            raise ConfigError(
                f"down_hysteresis {self.down_hysteresis} must not exceed up_hysteresis {self.up_hysteresis}: "
                "num_steps would fall and rise at one average"
            )


@dataclass
class AdaptiveMetrics:
    """Counters since the policy was made."""

    switches: int = 0  # batches drafted with another T than the batch before
    batches: Counter[int] = field(default_factory=Counter)  # by their T
    ema: float = 0.0  # accepted drafts a request, of the batch sizes seen last

    def as_dict(self) -> dict[str, int | float | dict[str, int]]:
        """Plain JSON: ``batches`` by T, ascending."""
        batches = {str(num_steps): count for num_steps, count in sorted(self.batches.items())}
        return {"switches": self.switches, "batches": batches, "ema": self.ema}


class AdaptivePolicy:
    """Chooses T for each batch from what earlier batches of about that size accepted; only for topk 1."""

    def __init__(self, config: AdaptiveConfig, *, topk: int, num_steps: int) -> None:
        """``num_steps`` is where every batch size begins, or the next lower candidate, or its lowest."""
        if topk != 1:
            raise ConfigError(f"adaptive num_steps needs topk 1, got {topk}", "lower topk, or fix num_steps")
        self.metrics = AdaptiveMetrics()
        self._tiers = {bs: _Tier(config, steps, num_steps) for bs, steps in sorted(config.candidates.items())}
        self._last: int | None = None

    def choose(self, bs: int) -> int:
        """T for the next batch, which has ``bs`` requests."""
        chosen = self._tier(bs).num_steps
        self.metrics.switches += self._last not in (None, chosen)
        self.metrics.batches[chosen] += 1
        self._last = chosen
        return chosen

    def observe(self, num_steps: int, accepted_drafts: Sequence[int]) -> None:
        """Learn from a batch that drafted ``num_steps``: how many drafts of each request the target accepted.

        A batch of before the last switch, as it arrives when the host lags, teaches nothing.
        """
        if not accepted_drafts:
            return
        tier = self._tier(len(accepted_drafts))
        if num_steps == tier.num_steps:
            tier.observe(sum(accepted_drafts) / len(accepted_drafts))
            self.metrics.ema = tier.ema or 0.0

    def _tier(self, bs: int) -> _Tier:
        return self._tiers[max(smallest for smallest in self._tiers if smallest <= bs)]


class _Tier:
    """The candidates of one range of batch sizes, which of them is chosen, and what it has seen."""

    def __init__(self, config: AdaptiveConfig, candidates: Sequence[int], start: int) -> None:
        self.config, self.candidates = config, candidates
        self.place = max(sum(candidate <= start for candidate in candidates) - 1, 0)
        self.ema: float | None = None
        self.due = config.warmup  # batches until the next decision

    @property
    def num_steps(self) -> int:
        return self.candidates[self.place]

    def observe(self, accepted: float) -> None:
        if self.num_steps:
            alpha = self.config.alpha if self.ema is not None else 1.0
            self.ema = (1 - alpha) * (self.ema or 0.0) + alpha * accepted
        self.due -= 1
        if self.due <= 0:
            self._decide()
            self.due = self.config.interval if self.num_steps else self.config.probe_interval

    def _decide(self) -> None:
        """Fall as far as the average says, or rise by one: what lies above the next candidate has not been seen."""
        ema, before = self.ema or 0.0, self.place
        while self.place and ema <= self._floor(self.candidates[self.place - 1]):
            self.place -= 1
        is_last = before == len(self.candidates) - 1
        if self.place == before and not is_last and ema > self.num_steps - 0.5 + self.config.up_hysteresis:
            self.place += 1

    def _floor(self, lower: int) -> float:
        """Average at or below which ``lower`` steps are enough."""
        return lower - 0.5 + self.config.down_hysteresis if lower else self.config.zero_threshold


def largest(candidates: Mapping[int, Sequence[int]]) -> int:
    """The T that everything is sized for."""
    return max(max(steps) for steps in candidates.values())


def _check_candidates(candidates: Mapping[int, Sequence[int]]) -> None:
    if 1 not in candidates or min(candidates) < 1:
        raise ConfigError(f"candidates must begin at batch size 1, got {sorted(candidates)}: add candidates[1]")
    for bs, steps in candidates.items():
        if not steps or min(steps) < 0 or list(steps) != sorted(set(steps)):
            raise ConfigError(
                f"candidates of batch size {bs} must be ascending numbers of steps, 0 or more, got {list(steps)}"
            )
    if largest(candidates) < 1:
        raise ConfigError(
            f"candidates must hold a number of steps above 0, got {dict(candidates)}: or set draft='none'"
        )
