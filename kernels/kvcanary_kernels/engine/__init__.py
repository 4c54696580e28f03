"""Kernels of the engine that are no canary: attention, layers, drafting, index arrays."""
