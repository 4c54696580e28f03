"""The Makefile sets up by itself, says what it needs, and refuses an old Python with a sentence."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make, and none is present")


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def fresh(root: Path, tmp_path: Path) -> Path:
    """A checkout on which nothing is set up yet."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("target", ["setup", "demo", "test", "test-all", "memcheck", "lint", "docs"])
def test_target_sets_up_first(fresh: Path, target: str) -> None:
    """On a fresh machine every target makes the environment, with the pins and the caller's PIP_ARGS."""
    planned = make(fresh, "--dry-run", target, "PYTHON=python3", "PIP_ARGS=--extra-index-url https://example.org/cpu")
    assert planned.returncode == 0
    assert '-m venv ".venv"' in planned.stdout
    assert "--constraint constraints.txt --extra-index-url https://example.org/cpu" in planned.stdout


def test_setup_says_sizes_and_minutes(fresh: Path) -> None:
    """Nobody should wonder how much is being downloaded, and for how long."""
    planned = make(fresh, "--dry-run", "setup", "PYTHON=python3").stdout
    assert "GB" in planned
    assert "minutes" in planned


def test_setup_runs_once(fresh: Path) -> None:
    """With the stamp newer than project file and pins there is nothing left to do."""
    (fresh / ".venv").mkdir()
    (fresh / ".venv" / "pyvenv.cfg").touch()
    (fresh / ".venv" / ".kvcanary-setup").touch()
    assert "Nothing to be done" in make(fresh, "setup").stdout


def test_memcheck_names_what_it_lacks(fresh: Path, tmp_path: Path) -> None:
    """Without compute-sanitizer on the PATH: a sentence, a hint, and nothing runs."""
    (fresh / ".venv").mkdir()
    (fresh / ".venv" / ".kvcanary-setup").touch()
    (tmp_path / "empty").mkdir()
    command = [shutil.which("make"), "memcheck", "SHELL=/bin/sh", "-o", ".venv/.kvcanary-setup"]
    refused = subprocess.run(command, cwd=fresh, env={"PATH": str(tmp_path / "empty")}, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "memcheck needs CUDA's compute-sanitizer" in refused.stdout
    assert "hint: PATH=/usr/local/cuda/bin:$PATH make memcheck" in refused.stdout


def test_setup_refuses_an_old_python(fresh: Path) -> None:
    """A Python older than 3.11 is named with its version, and nothing is made."""
    old = fresh / "python3.9"
    old.write_text('#!/bin/sh\ncase "$2" in *version_info*) exit 1;; *) echo 3.9.18;; esac\n')
    old.chmod(0o755)
    refused = make(fresh, "setup", f"PYTHON={old}")
    assert refused.returncode == 2
    assert f"kvcanary needs Python 3.11 or later, '{old}' is 3.9.18" in refused.stdout
    assert "hint: make setup PYTHON=python3.12" in refused.stdout
    assert not (fresh / ".venv").exists()


def test_setup_refuses_a_missing_python(fresh: Path) -> None:
    """Where there is no such interpreter the sentence says so."""
    refused = make(fresh, "setup", "PYTHON=no-such-python")
    assert refused.returncode == 2
    assert "kvcanary needs Python 3.11 or later, and there is no 'no-such-python' on the PATH" in refused.stdout


def test_continuous_integration_runs_make_test(root: Path) -> None:
    """What CI runs is what a developer runs."""
    script = root / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "exec make test\n" in script.read_text()
