"""Prefix-aware routing: a prompt goes where one that begins like it went before, for its pages are cached there."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

CHUNK, MOST_CHUNKS = 64, 64  # characters of a prompt that are looked up at a time, and how many
KEPT = 1 << 16


class PrefixRouter(PowerOfTwoChoicesRequestRouter):
    """Where a prompt begins as none before, or its replica is full or gone: the shorter of two queues, as ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places: OrderedDict[str, Any] = OrderedDict()  # by beginning of a prompt, the replica that had it last

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        asked = pending_request.args[0] if pending_request is not None and pending_request.args else None
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        for prefix in reversed(beginnings(getattr(asked, "prefix", ""))):
            replica = by_id.get(self._places.get(prefix))
            if replica is not None:
                return [[replica], *ranked]
        return ranked

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        asked = pending_request.args[0] if pending_request.args else None
        for prefix in beginnings(getattr(asked, "prefix", "")):
            self._places[prefix] = replica_id
            self._places.move_to_end(prefix)
        while len(self._places) > KEPT:
            self._places.popitem(last=False)


def beginnings(prefix: str) -> list[str]:
    """Of one chunk, two, and so on; only whole chunks count."""
    count = min(len(prefix) // CHUNK, MOST_CHUNKS)
    return [prefix[: CHUNK * number] for number in range(1, count + 1)]


def prefix_of(body: bytes) -> str:
    """What the prompt of a request begins with, as text; empty where it has none."""
    try:
        told = json.loads(body)
        prompt = told.get("prompt") or told.get("messages") or ""
    except (ValueError, AttributeError):
        return ""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return text[: CHUNK * MOST_CHUNKS]
