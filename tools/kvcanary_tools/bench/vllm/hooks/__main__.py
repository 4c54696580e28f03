"""``python -m kvcanary_tools.bench.vllm.hooks``."""

if __name__ == "__main__":
    from kvcanary_tools.bench.vllm.hooks.run import main

    main()
