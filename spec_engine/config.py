"""Engine settings: one frozen dataclass, checked once, passed to constructors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcanary import CanaryConfig
from spec_engine.acceptance.thresholds import Thresholds
from spec_engine.attention.backends import BACKENDS, TREE_BACKENDS
from spec_engine.drafting.adaptive import AdaptiveConfig
from spec_engine.errors import ConfigError

__all__ = ["ConfigError", "EngineConfig", "check_backend"]

DRAFTS = ("auto", "eagle3", "eagle", "standalone", "none")
ATTEND = ("ancestors", "columns")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
DTYPES = ("auto", "float32", "float64", "bfloat16")
ATTENTION_BACKENDS = tuple(BACKENDS)
SCHEDULES = ("sync", "overlap")
ACCEPTANCES = ("match", "tree", "rejection")
#: What settings must be where decode steps are captured.
GRAPH_SETTINGS: dict[str, tuple[object, ...]] = {
    "attention_backend": ("torch", "triton"),
    "attend": ("ancestors",),
    "adaptive_steps": (False,),
    "max_device_tokens": (None,),
    "acceptance": ("match", "tree"),
}
DEFAULT_NODES = 8  # on a CPU a target forward over 16 nodes costs more than the eight extra nodes gain


@dataclass(frozen=True)
class EngineConfig:
    """Everything that decides how an :class:`~spec_engine.Engine` runs.

    model: "embedded" (ships with the package) or a folder with a Hugging Face checkpoint.
    draft: "eagle3", "eagle", "standalone" (a small model of the same vocabulary), "none", or "auto" (the best head the
        model has).
    draft_model: folder of the draft head or small model; by default the head beside the model.
    page_size, topk, num_steps, num_draft_tokens: P (a power of two), K, T and N of the draft tree; N counts the root.
        ``num_draft_tokens=None`` takes DEFAULT_NODES of a tree and all of a chain; a chain has no other N.
    adaptive_steps: for chains, let T follow what is accepted, beginning at ``num_steps``; a mapping names what T may
        become, by smallest batch size, see `AdaptiveConfig`.
    attend: "ancestors", or "columns": a draft branch reads what was written for its number before, whoever its
        ancestors are. Other engines do that; it mixes paths of the tree, which costs acceptance and never correctness.
    kv_cache_dtype: "auto" keeps K and V as the model computes them; "fp8_e4m3" as 8-bit numbers, with one float32 scale
        for each K row and each V row of a token and layer.
    attention_backend: "torch" reads by token indices, "paged" by page tables, "block-table" by page tables too, but no
        draft trees on pages; "dense" is the slow reference. On CUDA also "triton" (token indices), "triton-paged" (page
        tables) and "flashinfer" (token indices).
    max_total_tokens: slots of the KV pool; max_running_requests: rows of the request table.
    max_window_tokens: slots of the target's pool where its layers have a sliding window; by default enough for all.
    max_device_tokens: slots of the target's pool on the device; K and V of tokens for which there is no room lie on the
        host, and come back before a forward of their request. By default all lie on the device.
    device_turn: steps that requests run before others take their places on such a device.
    context_length: longest prompt plus output; by default what the model was made for.
    prefill_chunk_tokens: most prompt tokens in one forward.
    schedule: "sync" waits for every step; "overlap" prepares the next step before it has collected the last one.
    prefix_cache: keep the pages of finished requests for prompts that begin alike.
    host_pages: pages of host memory in which a retracted request keeps what it had computed; 0: it computes it again.
    acceptance: how requests with a temperature accept drafts. "match": drafts that equal the seeded draw, so that
        drafting changes no token; "tree": target-only tree sampling; "rejection": chain rejection sampling, of drafts
        that are drawn. All three keep the target's distribution; greedy requests accept what the target takes.
    threshold_single, threshold_acc: of acceptance "tree", see `Thresholds`.
    graphs: "on": decode steps run as programs over static buffers, on a GPU as CUDA graphs; "off": as they come.
    graph_buckets: batch sizes that programs are made for; by default powers of two up to max_running_requests. A batch
        larger than all of them runs as without graphs.
    new_token_ratio: share of max_new_tokens that admission counts with; below 1 requests may be retracted and resume.
    """

    model: str = "embedded"
    draft: str = "auto"
    draft_model: str | None = None
    page_size: int = 16
    topk: int = 4
    num_steps: int = 5
    num_draft_tokens: int | None = None
    adaptive_steps: bool | Mapping[int, Sequence[int]] = False
    attend: str = "ancestors"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    attention_backend: str = "torch"
    schedule: str = "sync"
    max_total_tokens: int = 16384
    max_window_tokens: int | None = None
    max_device_tokens: int | None = None
    device_turn: int = 16
    max_running_requests: int = 8
    context_length: int | None = None
    prefill_chunk_tokens: int = 512
    prefix_cache: bool = True
    host_pages: int = 0
    new_token_ratio: float = 1.0
    acceptance: str = "match"
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    graphs: str = "off"
    graph_buckets: Sequence[int] | None = None
    canary: CanaryConfig = field(default_factory=lambda: CanaryConfig(mode="off"))

    def __post_init__(self) -> None:
        for name in ("page_size", "topk", "num_steps", "max_total_tokens", "max_running_requests"):
            _require_positive(name, getattr(self, name))
        for name in ("prefill_chunk_tokens", "device_turn"):
            _require_positive(name, getattr(self, name))
        for name in ("context_length", "max_window_tokens", "max_device_tokens"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}", "use 1, 2, 4, 8, 16 and so on")
        _require_one_of("draft", self.draft, DRAFTS)
        _require_one_of("attend", self.attend, ATTEND)
        _require_one_of("dtype", self.dtype, DTYPES)
        _require_one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _require_one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _require_one_of("schedule", self.schedule, SCHEDULES)
        if not isinstance(self.host_pages, int) or self.host_pages < 0:
            raise ConfigError(
                f"host_pages must be a whole number, 0 or more, got {self.host_pages!r}",
                "0 keeps nothing on the host: what a retracted request had computed is computed again",
            )
        if not 0.0 <= self.new_token_ratio <= 1.0:
            raise ConfigError(
                f"new_token_ratio must lie in [0, 1], got {self.new_token_ratio}",
                "1 admits by whole answers, and nobody is retracted; 0 admits by prompts alone",
            )
        _require_one_of("acceptance", self.acceptance, ACCEPTANCES)
        self._check_acceptance()
        if self.draft != "none":
            check_backend(self.attention_backend, self.topk, self.page_size)
            self._check_tree()
        self._check_adaptive()
        self._check_graphs()
        self._check_split()

    def _check_split(self) -> None:
        """A verify takes one page of the device beyond those of its row at most, and nothing lies there for a draft."""
        if self.max_device_tokens is None:
            return
        if self.host_pages:
            raise ConfigError(
                f"host_pages must be 0 with max_device_tokens, got {self.host_pages}: what has no room on the device "
                "lies on the host already",
                "leave host_pages out",
            )
        if self.draft == "none":
            return
        if self.topk != 1:
            raise ConfigError(
                f"topk must be 1 with max_device_tokens, got {self.topk}: the device has no room for the branches of "
                "a tree",
                "use topk 1, or leave max_device_tokens out",
            )
        if self.most_nodes is not None and self.most_nodes > self.page_size - 1:
            raise ConfigError(
                f"num_draft_tokens must be at most page_size - 1 = {self.page_size - 1} with max_device_tokens, got "
                f"{self.most_nodes}: the nodes of a verify lie on their row's last page and one more",
                f"lower num_steps to {self.page_size - 2} or less, or raise page_size",
            )

    def _check_graphs(self) -> None:
        _require_one_of("graphs", self.graphs, ("off", "on"))
        if self.graph_buckets is not None:
            object.__setattr__(self, "graph_buckets", tuple(sorted(set(self.graph_buckets))))
            for size in self.graph_buckets:
                _require_positive("graph_buckets", size)
        if self.graphs == "off":
            return
        for name, needed in GRAPH_SETTINGS.items():
            value = getattr(self, name)
            if value not in needed:
                raise ConfigError(
                    f"{name} must be {' or '.join(map(str, needed))} with graphs, got {value!r}: a captured step "
                    "cannot do it yet",
                    f"use graphs off, or {name} {needed[0]}",
                )

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that programs are made for, ascending; none without graphs."""
        if self.graphs == "off":
            return ()
        if self.graph_buckets is not None:
            return tuple(self.graph_buckets)
        most = self.max_running_requests
        return (*(1 << power for power in range((most - 1).bit_length())), most)

    def _check_adaptive(self) -> None:
        if self.adaptive is None:
            return
        if self.draft == "none":
            raise ConfigError("adaptive_steps needs a draft, got draft 'none'", "name a draft, or fix num_steps")
        if self.topk != 1:
            raise ConfigError(
                f"adaptive_steps needs topk 1, got {self.topk}: only a chain's length may change as it runs",
                "use topk 1, or fix num_steps",
            )

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
        if self.topk == 1 and nodes != self.num_steps + 1:
            raise ConfigError(
                f"num_draft_tokens must be num_steps + 1 = {self.num_steps + 1} where topk is 1, got {nodes}: a chain "
                "is verified whole",
                "leave num_draft_tokens out, or set topk above 1",
            )

    @property
    def adaptive(self) -> AdaptiveConfig | None:
        """What may become of T at run time; None: nothing."""
        if isinstance(self.adaptive_steps, Mapping):
            return AdaptiveConfig(self.adaptive_steps)
        return AdaptiveConfig() if self.adaptive_steps else None

    @property
    def step_choices(self) -> tuple[int, ...]:
        """Every T that a step may have, ascending; what is sized, is sized for the last."""
        if self.adaptive is None:
            return (self.num_steps,)
        return tuple(sorted({steps for choices in self.adaptive.candidates.values() for steps in choices}))

    @property
    def most_steps(self) -> int:
        """The longest draft's T."""
        return self.step_choices[-1]

    @property
    def most_nodes(self) -> int | None:
        """The longest draft's N; None without drafting."""
        return self.num_draft_tokens if self.adaptive is None else self.most_steps + 1

    def _check_acceptance(self) -> None:
        if self.thresholds != Thresholds() and self.acceptance != "tree":
            raise ConfigError(
                f"threshold_single and threshold_acc must be 1 with acceptance {self.acceptance!r}, got "
                f"{self.threshold_single} and {self.threshold_acc}: only tree sampling has thresholds",
                "use acceptance 'tree'",
            )
        if self.acceptance != "match" and self.draft == "none":
            raise ConfigError(
                f"acceptance {self.acceptance!r} needs drafts to accept, got draft 'none'", "use acceptance 'match'"
            )
        if self.acceptance == "rejection" and self.topk != 1:
            raise ConfigError(
                f"topk must be 1 with acceptance 'rejection', got {self.topk}: drafts are drawn in a chain",
                "use topk 1, or acceptance 'tree'",
            )

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.threshold_single, self.threshold_acc)

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


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
