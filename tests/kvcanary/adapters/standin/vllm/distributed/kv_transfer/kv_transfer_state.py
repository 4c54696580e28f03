"""The connector of this process."""

from __future__ import annotations

from typing import Any

_KV_CONNECTOR_AGENT: Any = None


def get_kv_transfer_group() -> Any:
    return _KV_CONNECTOR_AGENT


def has_kv_transfer_group() -> bool:
    return _KV_CONNECTOR_AGENT is not None
