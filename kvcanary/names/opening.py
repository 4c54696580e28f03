"""Opening the store that a setting names."""

from __future__ import annotations

from kvcanary.config import NAMES_FILE, place_of
from kvcanary.errors import CanaryConfigError
from kvcanary.names.store import NameStore


def store_at(place: str) -> NameStore:
    """Of a checked place that is not memory. CanaryConfigError where it lacks its package, or cannot be opened."""
    try:
        if place.startswith(NAMES_FILE):
            from kvcanary.names.file_store import FileNames

            return FileNames(place.removeprefix(NAMES_FILE))
        from kvcanary.names.redis_store import RedisNames

        return RedisNames(place)
    except ImportError:
        raise CanaryConfigError("names in a Redis need its package: pip install 'kvcanary[redis]'") from None
    except Exception as error:
        raise CanaryConfigError(f"names cannot be kept in {place_of(place)}: {error}") from error
