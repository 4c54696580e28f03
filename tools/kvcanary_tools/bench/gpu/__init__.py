"""What kernels, prefills and captured steps of an 8B model take on a GPU, with the canary and without."""
