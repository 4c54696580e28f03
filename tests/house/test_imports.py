"""The four packages import one way only: kvcanary_kernels <- kvcanary <- spec_engine <- kvcanary_tools."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = {
    "kvcanary_kernels": "kernels/kvcanary_kernels",
    "kvcanary": "kvcanary",
    "spec_engine": "spec_engine",
    "kvcanary_tools": "tools/kvcanary_tools",
}
ORDER = list(FOLDERS)

# What a package may use besides the standard library and the packages before it; None: anything declared.
ALLOWED = {
    "kvcanary_kernels": {"torch", "triton"},
    "kvcanary": {"torch", "triton", "numba", "numpy", "safetensors", "structlog"},
}

# What one file alone may use: pytest for other people's tests, what a driver says, and a Redis.
PLACES = {
    ("kvcanary/pytest_plugin.py", "pytest"),
    ("kvcanary/hardware/nvml.py", "pynvml"),
    ("kvcanary/names/redis_store.py", "redis"),
}

# Hosts that `kvcanary` can be attached to: only the one adapter file of each may import it.
HOSTS = {"transformers", "vllm", "sglang"}


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of every import in the source: inside functions and `if TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, package if node.level else str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                module = name.value.partition(".")[0]
                yield node.lineno, module or package


def imports_of(root: Path, package: str) -> Iterator[tuple[str, str]]:
    files = sorted((root / FOLDERS[package]).rglob("*.py"))
    assert files, f"{FOLDERS[package]} holds no Python file"
    for file in files:
        for line, module in imported_modules(file.read_text(), package):
            yield f"{file.relative_to(root)}:{line}", module


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(root: Path, package: str) -> None:
    """No file imports a package that comes after its own, not even lazily."""
    later = set(ORDER[ORDER.index(package) + 1 :])
    wrong = [f"{place} imports {module}" for place, module in imports_of(root, package) if module in later]
    assert wrong == []


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_only_what_the_package_allows(root: Path, package: str) -> None:
    """The kernels need nothing but torch and triton, the canary hardly more: an adapter may import its host."""
    known = ALLOWED[package] | set(ORDER) | set(sys.stdlib_module_names)
    wrong = [
        f"{place} imports {module}"
        for place, module in imports_of(root, package)
        if module not in known
        and not (module in HOSTS and place.startswith("kvcanary/adapters/"))
        and (place.partition(":")[0], module) not in PLACES
    ]
    assert wrong == []


def test_imported_modules_sees_every_form() -> None:
    """The reader behind these tests finds plain, from, relative, nested, guarded and dynamic imports."""
    source = """
import os.path
from torch import nn
from . import sibling
from .sibling import thing
def lazy():
    import spec_engine.engine
if TYPE_CHECKING:
    from kvcanary_tools import cli
importlib.import_module("spec_engine")
__import__("triton")
import_module(".views", __name__)
import_module(f"{name}.x")
"""
    found = [module for _, module in imported_modules(source, "kvcanary")]
    assert sorted(found) == sorted(
        ["os", "torch", "kvcanary", "kvcanary", "spec_engine", "kvcanary_tools", "spec_engine", "triton", "kvcanary"]
    )


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(child.stdout.split())


def test_import_kvcanary_loads_neither_torch_nor_engine() -> None:
    """`import kvcanary` is cheap and takes no host with it, so that any engine can afford it."""
    loaded = loaded_by("import kvcanary; kvcanary.__version__")
    assert "kvcanary" in loaded
    assert loaded & ({"torch", "triton", "numba", "spec_engine", "kvcanary_tools"} | HOSTS) == set()


def test_import_of_the_canary_classes_loads_no_engine() -> None:
    """The canary's classes need torch, but no engine, and no compiler before a manager is built."""
    loaded = loaded_by("from kvcanary import CanaryConfig, CanaryManager, PoolView, ReadPlan, WritePlan")
    assert loaded & ({"numba", "spec_engine", "kvcanary_tools"} | HOSTS) == set()
