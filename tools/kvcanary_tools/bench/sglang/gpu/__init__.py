"""A real SGLang on a GPU, with the canary and without."""
