"""How large everything of one engine is: decided once, before anything is allocated, for the longest draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcanary.faults import seam
from kvcanary.invariants import check_reserve
from spec_engine.config import EngineConfig
from spec_engine.errors import ConfigError
from spec_engine.memory.sizing import draft_alloc_len, pages_for, reserve_len, row_width


@dataclass(frozen=True)
class Sizes:
    """What `Engine.sizes` says.

    num_pages, page_size: of each pool, the null page not counted; num_rows: of the request table, without row 0.
    alloc_len: slots past a row's final entries that one step may touch.
    max_accept: most tokens that a step may emit; lag: verifies that the host is behind the device.
    ahead: entries that the draft pool holds beyond the committed length.
    reserve: slots that a running request owns past the committed length which the host knows.
    context_length: longest prompt plus output; row_width: columns of a request-table row.
    pool_bytes: K, V and their scales by pool; table_bytes: the request table.
    canary_bytes: records and fingerprints, 0 without one.
    host_bytes: host memory for what a split pool has no room for on the device, 0 without one.
    """

    page_size: int
    num_pages: int
    num_rows: int
    alloc_len: int
    max_accept: int
    lag: int
    ahead: int
    reserve: int
    context_length: int
    row_width: int
    pool_bytes: Mapping[str, int] = field(default_factory=dict)
    table_bytes: int = 0
    canary_bytes: int = 0
    host_bytes: int = 0


def plan_sizes(config: EngineConfig, *, max_positions: int, ahead: int | None, lag: int) -> Sizes:
    """Sizes without bytes; ``ahead`` is the draft's, None without drafting.

    ConfigError when the pool cannot hold one request's reserve.
    """
    drafts, alloc_len, max_accept = ahead is not None, 1, 1
    if drafts:
        alloc_len = draft_alloc_len(config.page_size, config.topk, config.most_steps, config.most_nodes)
        max_accept = config.most_steps + 1
    ahead = ahead or 0
    reserve = seam("bounds.no_lookahead", reserve_len(alloc_len, max_accept, lag, ahead), lag=lag)
    check_reserve(reserve, lag, max_accept, alloc_len + ahead)
    context_length = min(config.context_length or max_positions, max_positions)
    num_pages = config.max_total_tokens // config.page_size
    _check_pool(num_pages, reserve, config)
    width = row_width(context_length, reserve, config.page_size)
    if drafts:
        width = seam("bounds.row_width", width, context_length=context_length, num_draft_tokens=config.most_nodes)
    return Sizes(
        config.page_size,
        num_pages,
        config.max_running_requests,
        alloc_len,
        max_accept,
        lag,
        ahead,
        reserve,
        context_length,
        width,
    )


def _check_pool(num_pages: int, reserve: int, config: EngineConfig) -> None:
    needed = pages_for(1, reserve, config.page_size)
    if needed > num_pages:
        raise ConfigError(
            f"max_total_tokens must hold one request's reserve, got {config.max_total_tokens}: a token and a reserve "
            f"of {reserve} slots take {needed} pages of {config.page_size}, the pool has {num_pages}",
            f"raise max_total_tokens to {needed * config.page_size} or more, or lower topk, num_steps or page_size",
        )
