"""What a server is told of its connector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class KVTransferConfig:
    kv_connector: str | None = None
    kv_load_failure_policy: str = "fail"
