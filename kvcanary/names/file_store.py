"""Names in a file beside a tier, that several processes may read and write: an SQLite database."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from kvcanary.names.store import Named

MOST_NAMES = 1 << 22  # about 200 MB; the oldest go
#: Seconds to wait for another process's lock: a step may wait for an answer, but nobody for what is stored.
ANSWERED_IN, STORED_IN = 0.25, 10.0
_AT_ONCE = 500  # chains of one query
_TABLES = """
CREATE TABLE IF NOT EXISTS texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS names (
    id INTEGER PRIMARY KEY AUTOINCREMENT, space INTEGER NOT NULL, chain INTEGER NOT NULL,
    fingerprint INTEGER NOT NULL, writer INTEGER NOT NULL, UNIQUE (space, chain, fingerprint)
);
"""


class FileNames:
    """A file; each thread that uses it opens its own."""

    def __init__(self, path: str | Path, most: int = MOST_NAMES) -> None:
        """sqlite3.Error where it cannot be opened or is no such file."""
        self.label, self._most = f"file {path}", most
        self._texts: dict[str, int] = {}
        self._open = sqlite3.connect(path, timeout=STORED_IN, isolation_level="IMMEDIATE", check_same_thread=False)
        try:
            self._open.executescript(_TABLES)
        except BaseException:
            self._open.close()
            raise

    def put(self, space: str, by: str, names: Sequence[tuple[int, int]]) -> None:
        """As `NameStore` has it; one transaction."""
        self._wait_up_to(STORED_IN)
        try:
            with self._open as held:
                own, writer = self._number(space), self._number(by)
                rows = [(own, chain, fingerprint, writer) for chain, fingerprint in names]
                held.executemany(
                    "INSERT OR IGNORE INTO names (space, chain, fingerprint, writer) VALUES (?, ?, ?, ?)", rows
                )
                held.execute("DELETE FROM names WHERE id <= (SELECT MAX(id) FROM names) - ?", (self._most,))
        except Exception:
            self._texts.clear()  # numbers that were given in a transaction that is undone are free again
            raise

    def get(self, space: str, chains: Sequence[int]) -> dict[int, Named]:
        """As `NameStore` has it."""
        found: dict[int, dict[int, str]] = {}
        for start in range(0, len(chains), _AT_ONCE):
            some = chains[start : start + _AT_ONCE]
            rows = self._ask(
                "SELECT chain, fingerprint, writers.text FROM names JOIN texts AS writers ON writers.id = writer"
                " WHERE space = (SELECT id FROM texts WHERE text = ?)"
                f" AND chain IN ({', '.join('?' * len(some))})",
                (space, *some),
            )
            for chain, fingerprint, by in rows:
                found.setdefault(chain, {})[fingerprint] = by
        return dict(found)

    def chain_of(self, space: str, fingerprint: int) -> int | None:
        """As `NameStore` has it."""
        row = self._ask(
            "SELECT chain FROM names WHERE space = (SELECT id FROM texts WHERE text = ?) AND fingerprint = ? LIMIT 1",
            (space, fingerprint),
        ).fetchone()
        return None if row is None else int(row[0])

    def spaces(self) -> list[str]:
        """As `NameStore` has it."""
        rows = self._ask("SELECT text FROM texts WHERE id IN (SELECT DISTINCT space FROM names)")
        return [text for (text,) in rows]

    def close(self) -> None:
        """As `NameStore` has it."""
        self._open.close()

    def _ask(self, query: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        self._wait_up_to(ANSWERED_IN)
        return self._open.execute(query, values)

    def _wait_up_to(self, seconds: float) -> None:
        self._open.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")

    def _number(self, text: str) -> int:
        if text not in self._texts:
            self._open.execute("INSERT OR IGNORE INTO texts (text) VALUES (?)", (text,))
            [self._texts[text]] = self._open.execute("SELECT id FROM texts WHERE text = ?", (text,)).fetchone()
        return self._texts[text]
