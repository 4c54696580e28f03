"""Attention over paged KV: one interface, one file a backend."""
