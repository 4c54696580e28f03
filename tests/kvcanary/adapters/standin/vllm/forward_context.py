"""What attention of a forward finds its metadata in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

now = SimpleNamespace(attn_metadata=None, slot_mapping=None)


@contextmanager
def set_forward_context(attn_metadata: Any, vllm_config: Any, num_tokens=None, slot_mapping=None) -> Iterator[None]:
    now.attn_metadata, now.slot_mapping = attn_metadata, slot_mapping
    yield
    now.attn_metadata = now.slot_mapping = None
