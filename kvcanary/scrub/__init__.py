"""Bytes at rest, read again: running rows in turn, a prefix cache, what nobody has written, windows, poison."""
