"""``python -m kvcanary_tools.bench.pins sglang`` pins the host that tests run, with the hashes of its wheels.

The wheels that pip chooses for each Python on Linux x86_64 are asked for, and none is downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "tests" / "kvcanary" / "adapters"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(17, 36)), "manylinux2014_x86_64")


def hashes(listed: Path, python: str) -> dict[str, str]:
    """By `name==version`, the sha256 of the wheel that pip chooses for this Python."""
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--only-binary", ":all:", "--python-version", python, *platforms, "--target", "none", "--report", "-"]
    report = subprocess.run([*command, "-r", str(listed)], capture_output=True, text=True, check=True).stdout
    chosen = json.loads(report)["install"]
    return {
        f"{own['metadata']['name']}=={own['metadata']['version']}": own["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for own in chosen
    }


def lines(listed: Path) -> list[str]:
    """Pins with their hashes, sorted by name."""
    found: dict[str, set[str]] = {}
    for python in PYTHONS:
        for pin, digest in hashes(listed, python).items():
            found.setdefault(pin.lower().replace("_", "-"), set()).add(digest)
    pins = []
    for pin in sorted(found):
        pins += [f"{pin} \\", *(f"    --hash=sha256:{digest} \\" for digest in sorted(found[pin]))]
        pins[-1] = pins[-1].removesuffix(" \\")
    return pins


if __name__ == "__main__":
    for host in sys.argv[1:]:
        head = (
            f"# Written by `python -m kvcanary_tools.bench.pins {host}` for Python {', '.join(PYTHONS)}, Linux x86_64."
        )
        for name in (host, "others"):
            place = FOLDER / f"real_{host}" / name
            text = "\n".join([head, *lines(place.with_suffix(".in"))]) + "\n"
            place.with_suffix(".txt").write_text(text, encoding="utf-8")
