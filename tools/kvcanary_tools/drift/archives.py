"""Archives: a release of a host, downloaded by pip and unpacked; nothing of it is built or imported."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

NO_BUILD = 'raise ImportError("nothing is built here")\n'


def unpacked(host: str, version: str, folder: Path, from_wheel: bool) -> Path:
    """The folder that holds the packages of a release; what lies below `folder` already is not downloaded again.

    from_wheel: a wheel is taken; else the source archive, which is smaller where a wheel holds compiled code
    RuntimeError where pip gets none.
    """
    place = folder / f"{host}-{version}"
    if not place.is_dir():
        _download_wheel(host, version, place) if from_wheel else _download_source(host, version, place)
    roots = [path.parents[1] for path in place.rglob(f"{host}/__init__.py")]
    if not roots:
        raise RuntimeError(f"pip gave no {host} {version} that holds {host}/__init__.py, see {place}")
    return min(roots, key=lambda root: len(root.parts))


def released(host: str) -> list[str]:
    """Its releases, newest first, as pip's index says."""
    lines = _pip(["index", "versions", host], os.environ).stdout.splitlines()
    listed = [line for line in lines if line.startswith("Available versions:")]
    if not listed:
        raise RuntimeError(f"pip says no versions of {host}")
    return listed[0].partition(":")[2].replace(" ", "").split(",")


def _download_wheel(host: str, version: str, place: Path) -> None:
    place.mkdir(parents=True)
    _pip(["download", "--no-deps", "--only-binary", ":all:", "--dest", str(place), f"{host}=={version}"], os.environ)
    for wheel in place.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
        wheel.unlink()


def _download_source(host: str, version: str, place: Path) -> None:
    """pip unpacks a source archive before it asks how to build it: a stub answers that with an error."""
    stub = place / "stub" / "setuptools"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(NO_BUILD, encoding="utf-8")
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(stub.parent)}
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-clean", "--dest", str(place)]
    _pip(["download", *options, f"{host}=={version}"], environment)


def _pip(arguments: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=dict(environment), check=False)
