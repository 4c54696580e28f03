"""Bytes at rest, read again: running rows, a prefix cache, what nobody has written, windows, poison; and repair."""
