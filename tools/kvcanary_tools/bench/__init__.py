"""Benchmarks: one script a table. Each prints the table and writes JSON into ``results/``, with device and versions."""
