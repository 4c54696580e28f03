"""`python -m kvcanary_tools.drift`: names in a release's source, found by parsing, as importing finds them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcanary.adapters.compatibility import Needed, missing
from kvcanary_tools.drift import __main__ as drift
from kvcanary_tools.drift import archives
from kvcanary_tools.drift.source import Source

FILES = {
    "__init__.py": "",
    "outputs.py": """
from dataclasses import dataclass, field
from typing import ClassVar

@dataclass
class Base:
    first: int
    KIND: ClassVar[str] = ""

@dataclass
class Output(Base):
    second: int = 0
    hidden: int = field(default=0, init=False)
""",
    "runner/__init__.py": "from .model import Runner\n",
    "runner/model.py": """
try:
    from drifthost.mixins import Mixin
except ImportError:
    Mixin = object

class Runner(Mixin):
    limit: int = 3

    def __init__(self, config, *, device=None, **rest):
        self.config, self.device = config, device

    async def step(self, output, *rest):
        self.last: int = 0
        output.other = 1
""",
    "mixins.py": """
import sys

if sys.version_info > (3, 0):
    class Mixin:
        def reset(self, hard=False):
            self.is_reset = hard
""",
}
HOLDS = (
    Needed("drifthost.outputs:Output", ("first", "second"), ("second",), ("first", "second")),
    Needed("drifthost.runner:Runner", ("config",), ("device",), attributes=("config", "device", "last", "limit")),
    Needed("drifthost.runner:Runner", attributes=("is_reset", "step", "reset")),
    Needed("drifthost.runner:Runner.step", ("self", "output", "rest")),
    Needed("drifthost.runner.model:Runner.reset", ("self", "hard"), optional=("x",)),
)
GONE = {
    "drifthost.runner:Runner.stop is gone": Needed("drifthost.runner:Runner.stop"),
    "drifthost.nothing:At.all is gone": Needed("drifthost.nothing:At.all"),
    "drifthost.outputs:Output must begin with (second), got (first)": Needed("drifthost.outputs:Output", ("second",)),
    "drifthost.outputs:Output must take no, got (first, second)": Needed("drifthost.outputs:Output", (), ("no",)),
    "drifthost.runner:Runner must have cache": Needed("drifthost.runner:Runner", attributes=("config", "cache")),
}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder with the packages of a tiny host, as an unpacked archive has it."""
    for name, text in FILES.items():
        path = tmp_path / "drifthost-1.2.0" / "drifthost-1.2.0" / "drifthost" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_parsing_says_what_importing_says(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dataclasses, bases of other modules, names under `try` and `if`, re-exports: whole lists and gone names alike."""
    root = archives.unpacked("drifthost", "1.2.0", release, from_wheel=False)
    source = Source(root)
    assert source.faults(HOLDS) == []
    assert [source.faults((need,)) for need in GONE.values()] == [[sentence] for sentence in GONE]
    monkeypatch.syspath_prepend(str(root))
    importlib.invalidate_caches()
    assert missing(HOLDS) == []
    assert [missing((need,)) for need in GONE.values()] == [[sentence] for sentence in GONE]
    for name in [name for name in sys.modules if name.partition(".")[0] == "drifthost"]:
        del sys.modules[name]


def test_optional_names_are_only_told(release: Path) -> None:
    """An attribute that the adapter does without is no fault, and the table says that it is not there."""
    source = Source(archives.unpacked("drifthost", "1.2.0", release, from_wheel=False))
    need = Needed("drifthost.runner:Runner", optional=("config", "gone_since"))
    assert source.faults((need,)) == []
    assert source.lacks((need,)) == ["Runner.gone_since"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_command_ends_with_1_where_a_name_is_gone(release: Path, monkeypatch, is_gone: bool) -> None:
    """One whole list of a path is enough; where none is, its sentences, and exit code 1."""
    lists = ((*HOLDS, GONE["drifthost.nothing:At.all is gone"]), HOLDS)
    paths = {"runner": lists[:1] if is_gone else lists, "outputs": (HOLDS[:1],)}
    monkeypatch.setattr(drift, "paths_of", lambda host: paths)
    monkeypatch.setattr(drift, "FROM_WHEEL", {"vllm": False})
    monkeypatch.setattr(archives, "_download_source", lambda *arguments: None)
    (release / "drifthost-1.2.0").rename(release / "vllm-1.2.0")
    (release / "vllm-1.2.0" / "drifthost-1.2.0" / "vllm").mkdir()
    (release / "vllm-1.2.0" / "drifthost-1.2.0" / "vllm" / "__init__.py").touch()
    result = CliRunner().invoke(drift.main, ["vllm", "1.2.0", "--folder", str(release), "--json"])
    found = json.loads(result.stdout)["releases"]["1.2.0"]
    assert result.exit_code == is_gone
    assert found["gone"] == ({"runner": ["drifthost.nothing:At.all is gone"]} if is_gone else {})
    text = CliRunner().invoke(drift.main, ["vllm", "1.2.0", "--folder", str(release)]).stdout
    assert text.startswith(f"vllm 1.2.0  {'1 names are' if is_gone else 'no names are'} gone")


def test_every_minor_release_is_looked_at_by_its_last_patch() -> None:
    """From the oldest that was tried on; what is no final release is left out."""
    versions = ["0.33.0", "0.32.1rc1", "0.32.0", "0.27.1", "0.27.0", "0.26.0", "0.25.1"]
    assert drift.newest_of_each(versions, (0, 26)) == ["0.26.0", "0.27.1", "0.32.0", "0.33.0"]


def test_every_patch_is_looked_at_where_all_releases_share_their_minor() -> None:
    """A host whose releases are all 0.5 is looked at by patch; posts of a patch are no patch of their own."""
    versions = ["0.5.23", "0.5.17.post1", "0.5.17", "0.5.16", "0.5.9"]
    assert drift.newest_of_each(versions, (0, 5, 16)) == ["0.5.16", "0.5.17", "0.5.23"]


@pytest.mark.parametrize(
    ("host", "paths"),
    [
        (
            "vllm",
            [
                *(
                    "every runner",
                    "external loads with runner V1",
                    "loads that are computed again",
                    "owners of blocks",
                    "probes of attention",
                    "ranks of one model",
                    "recurrent states",
                ),
                *("recurrent states where the server drafts", "runner V1", "runner V2"),
            ],
        ),
        (
            "sglang",
            [
                *("drafts of a model", "drafts without a model", "every scheduler", "probes of attention"),
                "probes of attention in graphs",
                *("ranks of one model", "recurrent states", "recurrent states where the server drafts"),
            ],
        ),
    ],
)
def test_the_list_of_an_adapter_needs_neither_torch_nor_its_host(host: str, paths: list[str]) -> None:
    """Its list of names is read in a process that loads neither."""
    import subprocess

    program = (
        f"import sys; from kvcanary_tools.drift.__main__ import paths_of; paths = paths_of('{host}');"
        f"print(sorted(paths), sum(map(len, sum(paths.values(), ()))) > 20, {{'torch', '{host}'}} & set(sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.stdout.strip() == f"{paths} True set()", child.stderr
