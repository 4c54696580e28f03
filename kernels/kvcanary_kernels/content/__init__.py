"""Bytes of slots: stored, fingerprinted, compared, poisoned."""
