"""What importing kvcanary loads, and what it offers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import pytest

import kvcanary


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh process has loaded after this statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    paths = os.pathsep.join(path for path in [os.getcwd(), *sys.path] if path)
    child = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    return set(child.stdout.split())


def test_import_kvcanary_loads_neither_torch_nor_the_engine():
    """Importing the package is cheap: tensors and the engine come with the names that need them."""
    loaded = loaded_by("import kvcanary")
    assert "kvcanary" in loaded
    assert not loaded & {"torch", "spec_engine", "triton", "transformers"}


def test_a_config_needs_no_torch():
    """Settings can be read and refused before torch is loaded."""
    loaded = loaded_by("from kvcanary import CanaryConfig\nassert CanaryConfig.from_env({}).enabled")
    assert "torch" not in loaded


def test_the_manager_does_not_load_the_engine():
    """The canary knows no engine: even all its names load none."""
    loaded = loaded_by("from kvcanary import *")
    assert "torch" in loaded
    assert "spec_engine" not in loaded


@pytest.mark.parametrize("name", kvcanary.__all__)
def test_every_offered_name_resolves(name):
    """Each name of `__all__` exists and is the one of its home module."""
    value = getattr(kvcanary, name)
    if name == "__version__":
        assert value.count(".") == 2
    else:
        home = import_module(f"kvcanary.{kvcanary._HOMES[name]}")
        assert value is vars(home)[name]
        assert getattr(value, "__module__", home.__name__) in (home.__name__, "builtins")  # it is defined there


def test_dir_lists_what_is_offered():
    """Completion shows the offered names before they are loaded."""
    assert dir(kvcanary) == sorted(kvcanary.__all__)


def test_an_unknown_name_is_an_attribute_error():
    """A misspelt name is refused as by any module."""
    with pytest.raises(AttributeError) as caught:
        _ = kvcanary.CanaryManger
    assert str(caught.value) == "module 'kvcanary' has no attribute 'CanaryManger'"
