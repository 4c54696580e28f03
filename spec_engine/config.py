"""Engine settings: one frozen dataclass, checked once, passed to constructors."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcanary import CanaryConfig, KVCanaryError
from spec_engine.attention.backends import BACKENDS, TREE_BACKENDS

DRAFTS = ("auto", "eagle3", "eagle", "none")
DTYPES = ("auto", "float32", "float64", "bfloat16")
ATTENTION_BACKENDS = tuple(BACKENDS)
SCHEDULES = ("sync", "overlap")
DEFAULT_NODES = 8  # on a CPU a target forward over 16 nodes costs more than the eight extra nodes gain


class ConfigError(KVCanaryError, ValueError):
    """A setting that the engine cannot honour; ``hint`` is the remedy, one line."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class EngineConfig:
    """Everything that decides how an :class:`~spec_engine.Engine` runs.

    model: "embedded" (ships with the package) or a folder with a Hugging Face checkpoint.
    draft: "eagle3", "eagle", "none", or "auto" (the best head the model has).
    draft_model: folder of the draft head; by default the one beside the model.
    page_size, topk, num_steps, num_draft_tokens: P, K, T and N of the draft tree; N counts the root.
        ``num_draft_tokens=None`` takes DEFAULT_NODES of a tree and all of a chain.
    attention_backend: "torch" reads by token indices, "paged" by page tables, "block-table" by page tables too, but no
        draft trees on pages; "dense" is the slow reference.
    max_total_tokens: slots of the KV pool; max_running_requests: rows of the request table.
    max_window_tokens: slots of the target's pool where its layers have a sliding window; by default enough for all.
    context_length: longest prompt plus output; by default what the model was made for.
    prefill_chunk_tokens: most prompt tokens in one forward.
    schedule: "sync" waits for every step; "overlap" prepares the next step before it hears of the last one.
    prefix_cache: keep the pages of finished requests for prompts that begin alike.
    host_pages: pages of host memory in which a retracted request keeps what it had computed; 0: it computes it again.
    new_token_ratio: share of max_new_tokens that admission counts with; below 1 requests may be retracted and resume.
    """

    model: str = "embedded"
    draft: str = "auto"
    draft_model: str | None = None
    page_size: int = 16
    topk: int = 4
    num_steps: int = 5
    num_draft_tokens: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    attention_backend: str = "torch"
    schedule: str = "sync"
    max_total_tokens: int = 16384
    max_window_tokens: int | None = None
    max_running_requests: int = 8
    context_length: int | None = None
    prefill_chunk_tokens: int = 512
    prefix_cache: bool = True
    host_pages: int = 0
    new_token_ratio: float = 1.0
    canary: CanaryConfig = field(default_factory=lambda: CanaryConfig(mode="off"))

    def __post_init__(self) -> None:
        for name in ("page_size", "topk", "num_steps", "max_total_tokens", "max_running_requests"):
            _require_positive(name, getattr(self, name))
        _require_positive("prefill_chunk_tokens", self.prefill_chunk_tokens)
        for name in ("context_length", "max_window_tokens"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        _require_one_of("draft", self.draft, DRAFTS, {"standalone": "drafting with a standalone small model"})
        _require_one_of("dtype", self.dtype, DTYPES)
        _require_one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _require_one_of("schedule", self.schedule, SCHEDULES)
        if not isinstance(self.host_pages, int) or self.host_pages < 0:
            raise ConfigError(f"host_pages must be a whole number, 0 or more, got {self.host_pages!r}")
        if not 0.0 <= self.new_token_ratio <= 1.0:
            raise ConfigError(f"new_token_ratio must lie in [0, 1], got {self.new_token_ratio}")
        if self.draft != "none":
            check_backend(self.attention_backend, self.topk, self.page_size)
            self._check_tree()

    def _check_tree(self) -> None:
        if self.num_draft_tokens is None:
            tokens = self.num_candidates + 1
            object.__setattr__(self, "num_draft_tokens", tokens if self.topk == 1 else min(DEFAULT_NODES, tokens))
        nodes = self.num_draft_tokens
        if nodes is None or not 2 <= nodes <= self.num_candidates + 1:
            raise ConfigError(
                f"num_draft_tokens must lie in [2, {self.num_candidates + 1}], got {nodes}: topk {self.topk} and "
                f"num_steps {self.num_steps} make {self.num_candidates} candidates, and the root is one more",
                "lower num_draft_tokens, or raise topk or num_steps",
            )

    @property
    def num_candidates(self) -> int:
        """Nodes that T selections of K propose: K, then K*K a step (engine facts, flat candidate index)."""
        return self.topk + (self.num_steps - 1) * self.topk**2


def check_backend(name: str, topk: int, page_size: int) -> None:
    """ConfigError for a draft tree on pages (K > 1 with P > 1) that this attention backend cannot read."""
    if topk > 1 and page_size > 1 and not BACKENDS[name].supports_tree_pages:
        raise ConfigError(
            f"attention_backend {name!r} reads draft trees with page_size 1 only, got topk {topk} with page_size "
            f"{page_size}: those that can are {', '.join(TREE_BACKENDS)}",
            "use one of these, or topk 1, or page_size 1",
        )


def _require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, got {value!r}")


def _require_one_of(name: str, value: str, known: tuple[str, ...], planned: dict[str, str] | None = None) -> None:
    if value in known:
        return
    choices = ", ".join(known)
    if planned and value in planned:
        raise ConfigError(f"{planned[value]} ({name}={value!r}) is not built yet", f"use one of: {choices}")
    raise ConfigError(f"{name} must be one of {choices}, got {value!r}")
