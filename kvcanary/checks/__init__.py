"""Every rule that judges a model call, one file for each kind of fault; `fast_path` proves a clean step in one loop."""
