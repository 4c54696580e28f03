"""Compiled loops over host memory. Each is the same formula as a torch reference or a rule next door, tested equal."""
