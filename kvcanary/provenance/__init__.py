"""Whose bytes lie in a slot now: by name, by layout, by the word that changed."""
