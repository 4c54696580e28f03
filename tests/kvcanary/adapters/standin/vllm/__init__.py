"""A stand-in of vLLM 0.26: the names and signatures that the adapter leans on, over plain torch, and no more."""
