"""What runs in production checks with exceptions: an `assert` vanishes under `python -O`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest


@pytest.mark.parametrize("folder", ["kvcanary", "spec_engine", "kernels/kvcanary_kernels"])
def test_no_package_asserts(root: Path, folder: str) -> None:
    """No file of a package that an engine loads has an assert statement."""
    files = sorted((root / folder).rglob("*.py"))
    assert files, f"{folder} holds no Python file"
    found = [
        f"{file.relative_to(root)}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
