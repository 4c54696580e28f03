"""The pages of docs/ name every command and every option of the flag, and their Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from kvcanary.config import MODES
from kvcanary_tools.cli import COMMANDS
from kvcanary_tools.commands.generate import command as generate


@pytest.fixture
def docs(root: Path) -> Path:
    return root / "docs"


def test_every_page_is_in_the_navigation(root: Path, docs: Path) -> None:
    """The table of contents has each page once; mkdocs itself checks the links (`make docs`)."""
    reported = re.findall(r"\b([a-z_]+\.md)\b", str(yaml.safe_load((root / "mkdocs.yml").read_text())["nav"]))
    assert sorted(reported) == sorted(path.name for path in docs.glob("*.md"))
    assert {path.name for path in docs.iterdir() if path.suffix != ".md"} == {"pictures"}


def test_tests_build_the_docs(root: Path) -> None:
    """`make test`, which is what CI runs, builds them, and a broken link fails."""
    makefile = (root / "Makefile").read_text()
    assert "\ntest: lint docs " in makefile
    assert 'mkdocs" build --strict' in makefile


def test_every_command_is_listed(docs: Path) -> None:
    """One row each, and no row of a command that is not there."""
    rows = re.findall(r"^\| `kvcanary ([\w-]+)", (docs / "commands.md").read_text(), re.M)
    assert sorted(rows) == sorted(COMMANDS)


def test_every_option_of_the_flag_is_listed(docs: Path) -> None:
    """Modes and options as `--help` has them."""
    text = (docs / "flag.md").read_text()
    options = {name for option in generate.params for name in option.opts if name.startswith("--kv-canary")}
    assert options == {f"--{name}" for name in re.findall(r"`--(kv-canary[a-z-]*)", text)}
    assert set(re.findall(r"^\| `([a-z]+)` \|", text, re.M)) == set(MODES)


def test_the_tests_of_the_page_pass(docs: Path, tmp_path: Path) -> None:
    """The example of the fixtures, run by pytest as it stands."""
    [code] = re.findall(r"^```python\n(.*?)^```$", (docs / "pytest.md").read_text(), re.DOTALL | re.M)
    (tmp_path / "test_page.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "4 passed" in child.stdout, child.stdout


def test_every_command_names_a_module(root: Path, docs: Path) -> None:
    """What a page tells its reader to run with `python -m` is there."""
    for page in [root / "README.md", *docs.glob("*.md")]:
        for name in set(re.findall(r"python -m (kvcanary[\w.]*\w|spec_engine[\w.]*\w)", page.read_text())):
            assert find_spec(name) is not None, f"{page.name} names {name}"
