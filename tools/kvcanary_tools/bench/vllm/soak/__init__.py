"""Random traffic in a real vLLM on a CPU, then flipped bits: ``python -m kvcanary_tools.bench.vllm.soak``."""
