"""A connector of vLLM's that says of every load that its second block failed, when it is told to."""

from __future__ import annotations

from functools import cache
from typing import Any

NAME = "FailingConnector"


@cache
def _connector() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    class FailingConnector(ExampleConnector):  # type: ignore[misc]
        """The block is as it was stored all the same: what comes of it is vLLM's recovery alone."""

        fails = False
        _failed: frozenset[int] = frozenset()

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            super().start_load_kv(forward_context, **kwargs)
            size = self._block_size
            loads = [own for own in self._get_connector_metadata().requests if not own.is_store]
            self._failed = frozenset(int(own.slot_mapping[size]) // size for own in loads if self.fails)

        def get_block_ids_with_load_errors(self) -> set[int]:
            failed, self._failed = self._failed, frozenset()
            return set(failed)

    return FailingConnector


def __getattr__(name: str) -> Any:
    """vLLM asks this module for the class; without vLLM it can be imported all the same."""
    if name != NAME:
        raise AttributeError(name)
    return _connector()
