"""Families of faults of what lies in memory: bytes, pages, who has them, and their way out and back."""
