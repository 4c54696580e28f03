"""Drift: whether the names that adapters use are in a host's release, by parsing its source: nothing of it is run."""
