"""Bytes in motion: moves, seals of what was put away, bytes from elsewhere, asynchronous operations.

The names here are what an engine holds.
"""

from kvcanary.transfers.async_ops import HOST, AsyncOp
from kvcanary.transfers.async_tracker import AsyncTracker, Resources
from kvcanary.transfers.object_seals import ObjectSeal
from kvcanary.transfers.seal import Seal
from kvcanary.transfers.shards import join_shards, slots_that_differ
from kvcanary.transfers.snapshots import PageSnapshot

__all__ = [
    "HOST",
    "AsyncOp",
    "AsyncTracker",
    "ObjectSeal",
    "PageSnapshot",
    "Resources",
    "Seal",
    "join_shards",
    "slots_that_differ",
]
