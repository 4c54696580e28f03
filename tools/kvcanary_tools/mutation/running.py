"""Running mutmut: a tree with all packages side by side, the tests, and mutmut's settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcanary_tools.mutation.areas import AREAS
from kvcanary_tools.mutation.clock import PLACE
from kvcanary_tools.mutation.subset import OPTIONS, TESTS

PACKAGES = {"kvcanary": "kvcanary", "kernels/kvcanary_kernels": "kvcanary_kernels"}
READ_BY_TESTS = ("tests", "docs")
KILLED = ("killed", "timeout", "segfault")


class SubsetFailedError(RuntimeError):
    """The unit subset fails where nothing is mutated, or mutmut does; what it said stands above."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, in mutmut's words; the lines that its diff takes away and puts there."""

    name: str
    status: str
    removed: str
    added: str

    @property
    def killed(self) -> bool:
        return self.status in KILLED

    @property
    def function(self) -> str:
        """`module.function` or `module.Class.function`."""
        module, _, mangled = self.name.partition("__mutmut_")[0].rpartition(".")
        return f"{module}.{mangled.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"


def make_tree(root: Path, tree: Path) -> None:
    """Copy what a run needs of the repository at `root`; pyproject.toml gets mutmut's settings."""
    folders = PACKAGES | {name: name for name in READ_BY_TESTS}
    for source, name in folders.items():
        shutil.copytree(root / source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = {
        "source_paths": list(PACKAGES.values()),
        "only_mutate": [file for files in AREAS.values() for file in files],
        "pytest_add_cli_args": list(OPTIONS),
        "pytest_add_cli_args_test_selection": list(TESTS),
        "process_isolation": "forkserver",
        "use_git_change_detection": False,
        "also_copy": list(READ_BY_TESTS),
        "timeout_constant": 4.0,
    }
    written = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    (tree / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *written, ""]), encoding="utf-8")


def subset_seconds(tree: Path) -> float:
    """Processor time of the unit subset where nothing is mutated, imports apart: the least of three runs.

    The first run compiles the canary's loops, whose machine code is kept on disk; other work slows each of them.
    """
    reported, taken = tree / "clock", []
    for _ in range(3):
        _call(tree, "pytest", *TESTS, *OPTIONS, "-q", **{PLACE: str(reported)})
        taken.append(float(reported.read_text(encoding="utf-8")))
    return min(taken)


def run(tree: Path, names: Sequence[str], workers: int) -> list[Outcome]:
    """Let mutmut make all mutants and run the tests against those of these names. The cwd is `tree`."""
    _call(tree, "mutmut", "run", "--max-children", str(workers), *names)
    return outcomes(names)


def outcomes(names: Sequence[str]) -> list[Outcome]:
    """What mutmut wrote down of these mutants. The cwd is the tree of the run."""
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    found = []
    for name in names:
        path = Path(name.rpartition(".")[0].replace(".", "/") + ".py")
        file = SourceFileMutationData(path=path)
        file.load()
        lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
        removed, added = ("\n".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
        found.append(Outcome(name, status_by_exit_code[file.exit_code_by_key[name]], removed, added))
    return found


def _call(tree: Path, module: str, *arguments: str, **environment: str) -> None:
    """Run a module there, what it prints on stderr; one thread, and the packages of the tree before all others."""
    paths = [str(tree), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | environment
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=tree, env=given, stdout=sys.stderr)
    if done.returncode:
        raise SubsetFailedError(f"{module} must pass where nothing is mutated, it ended with {done.returncode}")
