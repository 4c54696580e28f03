"""Families of faults of what a step computes and passes on: indices, lengths, drafts, order, captures, hooks."""
