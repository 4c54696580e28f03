"""Drafting: where branches live, how the tree is chosen, and the loop that grows it."""
