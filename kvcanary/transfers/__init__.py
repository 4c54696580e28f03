"""Bytes in motion: moves, seals of what was put away, bytes from elsewhere, asynchronous operations.

The names here are what an engine holds.
"""

from kvcanary.provenance.arrival import Peer
from kvcanary.transfers.async_ops import HOST, AsyncOp
from kvcanary.transfers.async_tracker import AsyncTracker, Resources
from kvcanary.transfers.cards import PoolCard, card_of, read_card
from kvcanary.transfers.object_seals import ObjectSeal
from kvcanary.transfers.seal import Seal
from kvcanary.transfers.shards import join_shards, slots_that_differ
from kvcanary.transfers.snapshots import PageSnapshot
from kvcanary.transfers.wire import Reader, Writer

__all__ = [
    "HOST",
    "AsyncOp",
    "AsyncTracker",
    "ObjectSeal",
    "PageSnapshot",
    "Peer",
    "PoolCard",
    "Reader",
    "Resources",
    "Seal",
    "Writer",
    "card_of",
    "join_shards",
    "read_card",
    "slots_that_differ",
]
