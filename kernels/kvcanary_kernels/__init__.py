"""Kernels of the KV cache canary: for each operation a Triton kernel and a torch reference with identical bits."""
