"""The example of docs/tiers.md around a storage backend of LMCache."""

from collections.abc import MutableMapping
from typing import Any

from kvcanary import Tier


class SealedBackend:
    """Any `StorageBackendInterface` of LMCache: what it stores is sealed, and what it gives is compared."""

    def __init__(self, backend: Any, tier: Tier, seals: MutableMapping[str, bytes]) -> None:
        self.backend, self.tier, self.seals = backend, tier, seals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def batched_submit_put_task(self, keys: Any, objs: Any, transfer_spec: Any = None) -> Any:
        for key, obj in zip(keys, objs, strict=True):
            name = key.to_string()
            self.seals[name] = self.tier.put(name, obj.tensor).to_bytes()
        return self.backend.batched_submit_put_task(keys, objs, transfer_spec)

    def get_blocking(self, key: Any) -> Any:
        obj, name = self.backend.get_blocking(key), key.to_string()
        if obj is None or self.tier.check(name, obj.tensor, self.seals.get(name)):
            return obj
        obj.ref_count_down()
        return None

    def batched_get_blocking(self, keys: Any) -> Any:
        return [self.get_blocking(key) for key in keys]
