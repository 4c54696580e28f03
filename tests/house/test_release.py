"""A release: small files that install and run, the model apart, and papers beside them that say what is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import kvcanary
from kvcanary_tools.pages import api

MOST = 5 * 10**6  # bytes
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(built_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `kvcanary` as the wheel has installed it, beside the dependencies that are here already."""
    place = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(built_wheel)], check=True, capture_output=True
    )

    def run(*arguments: str, beside: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(place), beside)))}
        command = [sys.executable, place / "bin" / "kvcanary", *arguments]
        return subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=120)

    return run


def test_the_wheel_is_small(built_wheel: Path) -> None:
    """Whoever puts it into a serving image brings no model along."""
    assert built_wheel.stat().st_size < MOST


def test_the_source_distribution_is_small_and_whole(source_copy: Path, built_wheel: Path) -> None:
    """What the wheel has of us can be built from it."""
    program = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", program], cwd=source_copy, check=True, capture_output=True)
    [built] = (source_copy / "dist").glob("*.tar.gz")
    assert built.name == f"kvcanary-{kvcanary.__version__}.tar.gz"
    assert built.stat().st_size < MOST
    with tarfile.open(built) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    with zipfile.ZipFile(built_wheel) as archive:
        ours = [name for name in archive.namelist() if ".dist-info/" not in name]
    sources = {name.removeprefix("kernels/").removeprefix("tools/") for name in names}
    assert [name for name in ours if name not in sources] == []
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(names)
    assert [name for name in names if name.endswith(".safetensors")] == []


def test_what_is_installed_runs(installed: Run) -> None:
    """Help and doctor work without the model; what needs it says what to install."""
    shown = installed("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "Understand:" in shown.stdout
    health = installed("doctor")
    assert health.returncode == 0, health.stdout + health.stderr
    assert "\nembedded model: not present\n" in health.stdout
    assert health.stdout.endswith("everything works\n")
    demo = installed("demo")
    assert (demo.returncode, demo.stdout) == (2, "")
    assert demo.stderr.startswith(
        "kvcanary: the embedded model is not installed\n\nhint: pip install kvcanary-embedded"
    )


def test_the_model_is_found_where_its_package_is(installed: Run, root: Path, tmp_path: Path) -> None:
    """The package has the files that a checkout has."""
    config = (root / "embedded_package" / "pyproject.toml").read_text()
    [folder] = re.findall(r'kvcanary_embedded = "(.+)"', config)
    (tmp_path / "kvcanary_embedded").symlink_to((root / "embedded_package" / folder).resolve())
    made = installed("generate", "--prompt", "def f(", "--max-new-tokens", "2", beside=str(tmp_path))
    assert made.returncode == 0, made.stderr


def test_the_release_is_published_without_a_token(root: Path) -> None:
    """Trusted publishing with attestations, of files that were installed and run before; no job has more rights."""
    workflow = yaml.safe_load((root / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow["permissions"] == jobs["try"]["permissions"] == {}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert (jobs["publish"]["needs"], jobs["try"]["needs"]) == ("try", "build")
    [upload] = [step for step in jobs["publish"]["steps"] if "pypi-publish" in step["uses"]]
    assert upload["with"] == {"attestations": True}
    assert "secrets." not in (root / ".github/workflows/release.yml").read_text()
    tried = [step.get("run", "") for step in jobs["try"]["steps"]]
    assert any("kvcanary doctor" in line for line in tried)
    assert jobs["try"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def test_every_change_is_tested_on_the_pythons_that_are_promised(root: Path) -> None:
    """By the README's two commands."""
    job = yaml.safe_load((root / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    pythons = re.findall(r"Python :: (3\.\d+)", (root / "pyproject.toml").read_text(encoding="utf-8"))
    assert job["strategy"]["matrix"]["python"] == pythons
    assert {"make demo", "make test"} <= {step.get("run") for step in job["steps"]}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"])
def test_the_papers_name_what_is_there(root: Path, page: str) -> None:
    """Files and commands that they speak of exist."""
    text = (root / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:kvcanary|kernels|tools|tests|docs)/[\w./]+)`", text) + re.findall(
        r"\]\((docs/[\w.]+)\)", text
    )
    assert [path for path in paths if not (root / path).exists()] == []
    assert page != "CONTRIBUTING.md" or len(paths) > 10
    for module in re.findall(r"python -m (kvcanary_tools[\w.]+)", text):
        assert import_module(module)


def test_public_names_and_their_page_agree(root: Path) -> None:
    """docs/api.md has each name of `__all__`, and no other; `python -m kvcanary_tools.pages.api` writes it."""
    page = (root / "docs" / "api.md").read_text(encoding="utf-8")
    assert "\n".join((api.BEGIN, *api.lines(), api.END)) in page
    for module in api.MODULES:
        section = page.partition(f"## `{module}`\n")[2].partition("\n## ")[0]
        named = re.findall(r"^\| `(\w+)[`(]", section, re.MULTILINE)
        assert sorted(named) == sorted(import_module(module).__all__)
    assert "| |" not in page
    assert " |  |" not in page
