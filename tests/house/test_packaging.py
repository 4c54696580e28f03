"""One distribution with exactly four packages, its data, its licence, and pins for what the Makefile installs."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvcanary

PACKAGES = {"kvcanary", "kvcanary_kernels", "kvcanary_tools", "spec_engine"}


@pytest.fixture(scope="module")
def wheel(built_wheel: Path) -> list[str]:
    """Names inside the wheel."""
    with zipfile.ZipFile(built_wheel) as archive:
        return archive.namelist()


def test_wheel_holds_exactly_our_packages(wheel: list[str]) -> None:
    """The wheel installs four import names and nothing called `kernels`, `tools` or `tests`."""
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_wheel_holds_the_data(wheel: list[str]) -> None:
    """Pages and the licence travel with the package; the embedded model does not."""
    assert [name for name in wheel if "embedded_model/" in name or name.endswith(".safetensors")] == []
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)
    assert "kvcanary/py.typed" in wheel
    templates = {"spec_engine/server/templates/canary.html", "spec_engine/html/style.css", "spec_engine/html/copy.js"}
    assert templates <= set(wheel)


def test_wheel_holds_every_module(root: Path, tracked_files: list[Path], wheel: list[str]) -> None:
    """No Python file of the four packages stays behind, as one without its folder's __init__.py would."""
    sources = [path.relative_to(root).as_posix() for path in tracked_files if path.suffix == ".py"]
    names = [source.removeprefix("kernels/").removeprefix("tools/") for source in sources]
    missing = [name for name in names if name.partition("/")[0] in PACKAGES and name not in wheel]
    assert missing == []


@pytest.mark.parametrize("folder", ["kernels", "tools", "tests"])
def test_folder_is_not_a_package(root: Path, folder: str) -> None:
    """An __init__.py here would shadow other projects' `kernels` and `tools` from the repository root."""
    assert (root / folder).is_dir()
    assert not (root / folder / "__init__.py").exists()


def test_version_is_one(root: Path, pyproject: dict[str, Any]) -> None:
    """Project file, module, installed metadata and changelog name the same version."""
    version = pyproject["project"]["version"]
    assert kvcanary.__version__ == version
    assert importlib.metadata.version("kvcanary") == version
    assert re.search(rf"^## \[?{re.escape(version)}\b", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert yaml.safe_load((root / "CITATION.cff").read_text())["version"] == version
    assert tomllib.loads((root / "embedded_package/pyproject.toml").read_text())["project"]["version"] == version


def pins(root: Path) -> dict[str, str]:
    lines = (root / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_constraints_pin_what_is_installed(root: Path, pyproject: dict[str, Any]) -> None:
    """Every dependency that `make setup` installs has a pin, and the pin satisfies the dependency."""
    project = pyproject["project"]
    pinned = pins(root)
    extras = project["optional-dependencies"]
    installed = [text for extra in ("serve", "docs", "browser", "dev", "mutation") for text in extras[extra]]
    for text in [*project["dependencies"], *installed]:
        requirement = Requirement(text)
        if requirement.name == "kvcanary":  # dev takes other extras, and mutation takes dev
            assert requirement.extras in ({"browser", "docs", "redis", "serve"}, {"dev"})
            continue
        assert canonicalize_name(requirement.name) in pinned, f"constraints.txt has no {requirement.name}"
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text
    assert pinned["torch"] == "2.13.0"


def test_constraints_pin_the_triton_that_torch_asks_for(root: Path) -> None:
    """torch's CUDA build demands one exact triton: any other pin would make `make setup` fail beside it."""
    wanted = [Requirement(text) for text in importlib.metadata.requires("torch") or []]
    for requirement in wanted:
        if requirement.name == "triton":
            assert requirement.specifier.contains(pins(root)["triton"]), str(requirement)
    assert pins(root)["triton"] == "3.7.1"


def test_extras_are_the_documented_ones(pyproject: dict[str, Any]) -> None:
    """Extras are those that the docs have, and plain installs need none of them."""
    assert set(pyproject["project"]["optional-dependencies"]) == {
        "gpu",
        "serve",
        "ray",
        "nixl",
        "redis",
        "hf",
        "docs",
        "browser",
        "mutation",
        "dev",
    }
    names = {Requirement(text).name for text in pyproject["project"]["dependencies"]}
    assert names == {"torch", "triton", "click", "jinja2", "numba", "numpy", "safetensors", "structlog", "tokenizers"}


def test_triton_is_asked_for_on_linux_only(pyproject: dict[str, Any]) -> None:
    """Where there is no triton wheel the torch references serve."""
    [triton] = [text for text in pyproject["project"]["dependencies"] if text.startswith("triton")]
    marker = Requirement(triton).marker
    assert marker is not None
    assert marker.evaluate({"platform_system": "Linux"})
    assert not marker.evaluate({"platform_system": "Darwin"})


def test_licence_is_apache(root: Path, pyproject: dict[str, Any]) -> None:
    """The full Apache-2.0 text is there, and the metadata name it."""
    text = (root / "LICENSE").read_text()
    for words in ("Apache License", "Version 2.0, January 2004", "3. Grant of Patent License", "END OF TERMS AND"):
        assert words in text
    assert pyproject["project"]["license"] == "Apache-2.0"


def test_pytest_finds_the_plugin(pyproject: dict[str, Any]) -> None:
    """By an entry point that has the module's name, so that naming it in `pytest_plugins` too does no harm."""
    assert pyproject["project"]["entry-points"]["pytest11"] == {"kvcanary.pytest_plugin": "kvcanary.pytest_plugin"}
