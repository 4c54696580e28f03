"""Bytes at rest, read again: rolling, prefix cache, tails of pages, windows, poison."""
