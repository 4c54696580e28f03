"""``python -m kvcanary_tools.bench.vllm.soak``."""

if __name__ == "__main__":
    from kvcanary_tools.bench.vllm.soak.run import main

    main()
