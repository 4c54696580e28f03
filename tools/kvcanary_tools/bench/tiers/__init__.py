"""A tier of files, and LMCache's storage backends, behind seals: the examples of docs/tiers.md, and faults in files."""
