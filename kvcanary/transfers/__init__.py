"""Bytes in motion: moves, snapshots of what was offloaded, imports, asynchronous operations; what an engine holds."""

from kvcanary.transfers.async_ops import HOST, Ticket
from kvcanary.transfers.async_tracker import Resources, TicketDesk
from kvcanary.transfers.snapshots import Parcel

__all__ = ["HOST", "Parcel", "Resources", "Ticket", "TicketDesk"]
