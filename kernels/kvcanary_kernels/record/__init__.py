"""The 64-byte record and its keys, and what every kernel shares."""
