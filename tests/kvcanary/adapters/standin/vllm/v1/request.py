"""A request, as the scheduler has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Request:
    request_id: str
    cache_salt: str | None = None
