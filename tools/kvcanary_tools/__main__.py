"""The program `kvcanary`, and `python -m kvcanary_tools`: an interrupt has one sentence before anything is imported."""

import sys


def run() -> None:
    """Exit code 130 where Control-C comes before `cli.main` is there to say so."""
    try:
        from kvcanary_tools.cli import main

        main(prog_name="kvcanary")
    except KeyboardInterrupt:
        print("kvcanary: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
