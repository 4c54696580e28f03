"""Where names are kept, as a setting says it: `memory`, `file:PATH`, or the URL of a Redis."""

from __future__ import annotations

from kvcanary.errors import CanaryConfigError
from kvcanary.names.store import NameStore

MEMORY, FILE, REDIS = "memory", "file:", ("redis://", "rediss://", "unix://")


def expect_place(text: str) -> None:
    """CanaryConfigError for what names no place."""
    is_file = isinstance(text, str) and text.startswith(FILE) and len(text) > len(FILE)
    if text != MEMORY and not is_file and not (isinstance(text, str) and text.startswith(REDIS)):
        raise CanaryConfigError(f"names must be memory, file:PATH or redis://HOST:PORT, got {text!r}")


def place_of(text: str) -> str:
    """A place as messages show it, without a password."""
    scheme, _, rest = text.partition("://")
    return f"{scheme}://{rest.split('@')[-1]}" if rest else text


def store_at(text: str) -> NameStore:
    """Of a place that is not memory. CanaryConfigError where it lacks its package, or cannot be opened."""
    try:
        if text.startswith(FILE):
            from kvcanary.names.file_store import FileNames

            return FileNames(text.removeprefix(FILE))
        from kvcanary.names.redis_store import RedisNames

        return RedisNames(text)
    except ImportError:
        raise CanaryConfigError("names in a Redis need its package: pip install 'kvcanary[redis]'") from None
    except Exception as error:
        raise CanaryConfigError(f"names cannot be kept in {place_of(text)}: {error}") from error
