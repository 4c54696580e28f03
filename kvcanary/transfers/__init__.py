"""Bytes in motion: moves, snapshots of what was offloaded, imports, asynchronous operations."""
