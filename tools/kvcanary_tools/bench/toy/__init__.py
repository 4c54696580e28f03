"""A paged engine without a model, with random right traffic: what the canary finds in it, and what it misses."""
