"""Names in a Redis or Valkey that many servers share (extra `redis`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kvcanary.names.store import Named

LASTS = 7 * 24 * 3600  # seconds; a name that is written again lasts anew
WAIT = 0.25  # seconds for an answer: a step may wait for this
_SPACES = "kvcanary:spaces"


class RedisNames:
    """A hash by chain (fingerprint: who wrote it first), and the chain by fingerprint."""

    def __init__(self, url: str) -> None:
        """url: `redis://`, `rediss://` or `unix://`; ImportError without the package, redis.RedisError later"""
        import redis

        where = urlsplit(url)
        self.label = f"redis {where.hostname or where.path}" + (f":{where.port}" if where.port else "")
        self._client: Any = redis.Redis.from_url(url, socket_timeout=WAIT, socket_connect_timeout=WAIT)

    def put(self, space: str, by: str, names: Sequence[tuple[int, int]]) -> None:
        """As `NameStore` has it; one round trip."""
        own = _short(space)
        with self._client.pipeline(transaction=False) as sent:
            sent.sadd(_SPACES, space)
            for chain, fingerprint in names:
                key, back = f"{own}:c:{chain}", f"{own}:f:{fingerprint}"
                sent.hsetnx(key, str(fingerprint), by)
                sent.expire(key, LASTS)
                sent.set(back, chain, ex=LASTS)
            sent.execute()

    def get(self, space: str, chains: Sequence[int]) -> dict[int, Named]:
        """As `NameStore` has it; one round trip."""
        own = _short(space)
        with self._client.pipeline(transaction=False) as sent:
            for chain in chains:
                sent.hgetall(f"{own}:c:{chain}")
            held = sent.execute()
        told = zip(chains, held, strict=True)
        return {chain: {int(number): by.decode() for number, by in ways.items()} for chain, ways in told if ways}

    def chain_of(self, space: str, fingerprint: int) -> int | None:
        """As `NameStore` has it."""
        chain = self._client.get(f"{_short(space)}:f:{fingerprint}")
        return None if chain is None else int(chain)

    def spaces(self) -> list[str]:
        """As `NameStore` has it."""
        return sorted(space.decode() for space in self._client.smembers(_SPACES))

    def close(self) -> None:
        """As `NameStore` has it."""
        self._client.close()


def _short(space: str) -> str:
    return f"kvcanary:{hashlib.blake2b(space.encode(), digest_size=8).hexdigest()}"
