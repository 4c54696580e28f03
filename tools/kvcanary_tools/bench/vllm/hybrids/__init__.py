"""Hybrid models inside a real vLLM on a CPU: their recurrent states, and faults in these."""
