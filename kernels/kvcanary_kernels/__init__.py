"""Kernels of the KV cache canary: for each operation a Triton kernel and a torch reference with identical bits.

Both are one function, which takes its arguments and checks them once. With ``launches=False``, or under its name with
``_torch`` behind, it computes in torch, on any device and without Triton: the body below the launch is the reference.
"""
