"""Mutation testing: does a test fail when one operator, argument or word of what judges a cache is changed?

mutmut makes the mutants and runs the tests that reach them; a sample of them, drawn from a seed, is what is run.
"""
