"""What an engine declares: its pools and their layouts, slot maps, the plans of a forward, and where in a step it runs.

`event_log` is where the canary puts down what it was told, for whoever records.
"""
