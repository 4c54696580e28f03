"""Prefill in one engine, decode in another: a request leaves with a seal, its bytes follow, and are compared."""
