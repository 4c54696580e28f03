"""The rules by which the host judges a model call, a file a kind of fault; `fast_path` proves a clean step in one loop."""
