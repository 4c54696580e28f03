"""``python -m kvcanary_tools.bench.vllm.reader``."""

if __name__ == "__main__":
    from kvcanary_tools.bench.vllm.reader.run import command

    command()
