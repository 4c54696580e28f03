"""`python -m kvcanary_tools` is `kvcanary`."""

from kvcanary_tools.cli import main

main(prog_name="kvcanary")
