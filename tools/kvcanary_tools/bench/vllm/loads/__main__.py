"""``python -m kvcanary_tools.bench.vllm.loads``."""

from kvcanary_tools.bench.vllm.loads import restart

if __name__ == "__main__":
    restart.main()
