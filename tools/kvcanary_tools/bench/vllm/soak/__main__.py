"""``python -m kvcanary_tools.bench.vllm.soak``."""

from kvcanary_tools.bench.vllm.soak.run import main

main()
