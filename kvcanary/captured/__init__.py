"""The same checks inside CUDA graphs, and reading back what they found."""
