"""Whose bytes lie in a slot where a check fired: by fingerprint, by layout, by the one word that changed."""
