"""Runs of an engine, kept as data for commands: plain, damaged on purpose, with a fault in the engine, with windows."""
