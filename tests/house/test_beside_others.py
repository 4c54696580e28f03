"""kvcanary beside the hosts that it attaches to: pip finds a common set, and no two wheels hold one path."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.slow]
PLATFORMS = [f"--platform=manylinux_2_{n}_x86_64" for n in range(5, 40)]  # pip matches them one by one
PLATFORMS += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
FOR_HOSTS = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *PLATFORMS]
HOSTS = {"vllm": ["vllm==0.26.0"], "transformers": ["transformers", "kernels"]}


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def index() -> None:
    """Skipped, visibly, where no package index answers."""
    if pip("index", "versions", "packaging").returncode:
        pytest.skip("no package index answers here")


@pytest.fixture(scope="module")
def wheel(index: None, built_wheel: Path) -> Path:
    """kvcanary's own wheel."""
    return built_wheel


def paths(wheel: Path) -> Iterator[str]:
    """What the RECORD of a wheel installs."""
    with zipfile.ZipFile(wheel) as archive:
        [record] = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        for line in archive.read(record).decode().splitlines():
            yield line.rsplit(",", 2)[0]


@pytest.mark.parametrize("host", HOSTS)
def test_pip_finds_a_common_set(wheel: Path, tmp_path: Path, host: str) -> None:
    """`pip install --dry-run --report` resolves kvcanary together with its host."""
    report = tmp_path / "report.json"
    found = pip(
        "install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report),
        "--target", str(tmp_path / "to"), *FOR_HOSTS, str(wheel), *HOSTS[host],
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    chosen = {entry["metadata"]["name"].lower() for entry in json.loads(report.read_text())["install"]}
    assert {"kvcanary", "torch", host} <= chosen


@pytest.mark.parametrize("host", HOSTS)
def test_no_two_wheels_hold_one_path(wheel: Path, tmp_path: Path, host: str) -> None:
    """The import names `kernels` and `tools` are others', and nothing of ours lies where a host's file lies."""
    fetched = pip("download", "--quiet", "--no-deps", "--dest", str(tmp_path), *FOR_HOSTS, *HOSTS[host])
    assert fetched.returncode == 0, fetched.stderr[-2000:]
    owners: dict[str, str] = {}
    for path in (wheel, *tmp_path.glob("*.whl")):
        for name in paths(path):
            assert owners.setdefault(name, path.name) == path.name, name
    assert len({*owners.values()}) == 1 + len(HOSTS[host])
