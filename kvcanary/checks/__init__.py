"""The rules by which the host judges a model call, one file each; `fast_path` proves a clean step in one loop."""
