"""``python -m kvcanary_tools.bench.vllm.loads``."""

from kvcanary_tools.bench.vllm.loads.restart import main

if __name__ == "__main__":
    main()
