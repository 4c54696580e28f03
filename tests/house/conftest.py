"""Where things are, for the tests of this folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def tracked_files() -> list[Path]:
    """Files that are committed or would be; where this is no git checkout there is no such list."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing says which files are tracked")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.fixture(scope="session")
def source_copy(root: Path, tracked_files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build from, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("source")
    for path in tracked_files:
        target = copy / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return copy


@pytest.fixture(scope="session")
def built_wheel(source_copy: Path) -> Path:
    """The wheel of the checkout."""
    dist = source_copy / "dist"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(dist)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source_copy)], check=True, capture_output=True)
    [built] = dist.glob("*.whl")
    return built
