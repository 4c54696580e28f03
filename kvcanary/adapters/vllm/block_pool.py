"""What vLLM's scheduler does with its blocks, told to every worker on the `SchedulerOutput` of the step.

Workers hear of a request's blocks anyway, but not of what happens in `BlockPool`: which blocks it grants, who touches
one that is cached, which it takes back, which are full and hashed. `follow` has these methods note what they did, and
`Scheduler.schedule` put the notes into its output, as one `bytes` that any executor carries, pickled or not.

Workers take the outputs in the order of `schedule()`, so a note is done on their streams before the forward that came
with it and behind all before: a block that is given away while a step in flight still reads it is no fault.

So do cache salts of requests, as digests: a block that was found under another salt is somebody else's.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import structlog

from kvcanary.adapters.compatibility import missing, resolved
from kvcanary.adapters.vllm.compatibility import POOL, SCHEDULER, SCHEDULER_SIDE

_events = structlog.get_logger("kvcanary")
ATTRIBUTE, SALTS = "kvcanary_blocks", "kvcanary_salts"
#: Kinds of what is told, each with the blocks that it happened to.
GRANTED, TOUCHED, FREED, HASHED, DISTRUSTED = range(5)


class Notes:
    """What one pool did since the last step; `serial`: how often that was told."""

    def __init__(self) -> None:
        self.words, self.serial = array("i"), 0

    def add(self, kind: int, blocks: Iterable[Any]) -> None:
        """blocks: vLLM's; null blocks are nobody's"""
        ids = [block.block_id for block in blocks if not block.is_null]
        if ids:
            self.words.extend((kind, len(ids), *ids))

    def told(self) -> bytes:
        """All of it, behind the serial number of the telling."""
        self.serial += 1
        words, self.words = self.words, array("i")
        return array("i", (self.serial & 0x7FFFFFFF,)).tobytes() + words.tobytes()


def read(told: bytes) -> tuple[int, list[tuple[int, list[int]]]]:
    """The serial number, and each kind with its blocks, in the order in which it happened."""
    words = memoryview(told).cast("i").tolist()
    happened, place = [], 1
    while place < len(words):
        kind, count = words[place : place + 2]
        happened.append((kind, words[place + 2 : place + 2 + count]))
        place += 2 + count
    return words[0], happened


def follow() -> Callable[[], None]:
    """Have every scheduler of this process tell; gives what undoes it. Twice is harmless.

    Where vLLM has other names nothing is told, and workers keep a ledger of their own.
    """
    if missing(SCHEDULER_SIDE):
        return lambda: None
    pool, scheduler = resolved(POOL), resolved(SCHEDULER)
    wrappers = {
        (pool, "get_new_blocks"): _get_new_blocks,
        (pool, "touch"): _touch,
        (pool, "free_blocks"): _free_blocks,
        (pool, "cache_full_blocks"): _cache_full_blocks,
        (pool, "evict_blocks"): _evict_blocks,
        (scheduler, "schedule"): _schedule,
    }
    for (owner, name), wrapper in wrappers.items():
        method = getattr(owner, name)
        if not hasattr(method, "kvcanary_method"):
            setattr(owner, name, _around(method, wrapper))
    return functools.partial(_undo, list(wrappers))


def _around(method: Any, wrapper: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(method, self, *args, **kwargs)

    around.kvcanary_method = method  # type: ignore[attr-defined]
    return around


def _undo(places: Iterable[tuple[Any, str]]) -> None:
    for owner, name in places:
        method = getattr(getattr(owner, name), "kvcanary_method", None)
        if method is not None:
            setattr(owner, name, method)


def _schedule(method: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    if pool is not None and "kvcanary_notes" not in vars(pool):
        pool.kvcanary_notes = Notes()  # no pool notes anything before it is scheduled from
    output = method(scheduler, *args, **kwargs)
    notes = getattr(pool, "kvcanary_notes", None)
    if notes is not None:
        try:
            setattr(output, SALTS, _salts(scheduler, output))
            setattr(output, ATTRIBUTE, notes.told())
        except Exception as error:
            _unheard(pool, error)
    return output


def _salts(scheduler: Any, output: Any) -> dict[str, str]:
    """Digests of the cache salts of requests that begin: blocks are keyed by them, and no worker hears of them."""
    requests = getattr(scheduler, "requests", {})
    salts = {new.req_id: getattr(requests.get(new.req_id), "cache_salt", None) for new in output.scheduled_new_reqs}
    return {name: blake2b(salt.encode(), digest_size=8).hexdigest() for name, salt in salts.items() if salt}


def _note(pool: Any, kind: int, blocks: Callable[[], Iterable[Any]]) -> None:
    """What goes wrong here ends no request: this pool tells nothing any more."""
    notes = getattr(pool, "kvcanary_notes", None)
    if notes is None:
        return
    try:
        notes.add(kind, blocks())
    except Exception as error:
        _unheard(pool, error)


def _unheard(pool: Any, error: Exception) -> None:
    pool.kvcanary_notes = None
    _events.warning("kvcanary.block_pool_unheard", error=f"{type(error).__name__}: {error}")


def _get_new_blocks(method: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
    blocks = method(pool, *args, **kwargs)
    _note(pool, GRANTED, lambda: blocks)
    return blocks


def _touch(method: Any, pool: Any, blocks: Any, *args: Any, **kwargs: Any) -> Any:
    result = method(pool, blocks, *args, **kwargs)
    _note(pool, TOUCHED, lambda: blocks)
    return result


def _free_blocks(method: Any, pool: Any, ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    blocks = list(ordered_blocks)  # it may be an iterator
    result = method(pool, blocks, *args, **kwargs)
    _note(pool, FREED, lambda: [block for block in blocks if block.ref_cnt == 0 and _is_of(pool, block)])
    return result


def _is_of(pool: Any, block: Any) -> bool:
    """Whether a pool has a block; one of another pool is freed by that, which notes it."""
    return getattr(block, "pool", None) in (None, pool)


def _cache_full_blocks(method: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
    result = method(pool, *args, **kwargs)
    _note(pool, HASHED, lambda: _full(*args, **kwargs))
    return result


def _full(
    request: Any, blocks: Sequence[Any], num_cached_blocks: int, num_full_blocks: int, *_: Any, **__: Any
) -> list[Any]:
    return [block for block in blocks[num_cached_blocks:num_full_blocks] if block.block_hash is not None]


def _evict_blocks(method: Any, pool: Any, block_ids: Iterable[int], *args: Any, **kwargs: Any) -> Any:
    """A connector could not load these: somebody computes them anew."""
    result = method(pool, block_ids, *args, **kwargs)
    _note(pool, DISTRUSTED, lambda: [pool.blocks[block] for block in block_ids])
    return result
