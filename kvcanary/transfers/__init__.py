"""Bytes in motion: moves, snapshots of what was put away, bytes from elsewhere, asynchronous operations.

The names here are what an engine holds.
"""

from kvcanary.transfers.async_ops import HOST, Ticket
from kvcanary.transfers.async_tracker import Resources, TicketDesk
from kvcanary.transfers.snapshots import Parcel

__all__ = ["HOST", "Parcel", "Resources", "Ticket", "TicketDesk"]
