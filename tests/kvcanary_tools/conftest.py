"""A `kvcanary` to call: in this process, or as the child process that a user would start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import structlog
from click.testing import CliRunner, Result

from kvcanary_tools.cli import main


@pytest.fixture(autouse=True)
def _structlog_as_it_was() -> Iterator[None]:
    """A command that configures structlog does so for its process; here that is everybody's."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def kvcanary() -> Callable[..., Result]:
    """`kvcanary("generate", "--json")` runs the command here; stdout and stderr are kept apart."""

    def call(*arguments: str, **settings: object) -> Result:
        return CliRunner().invoke(main, list(arguments), prog_name="kvcanary", **settings)

    return call


@pytest.fixture
def kvcanary_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same in a child process, two minutes at most; keyword arguments are environment variables."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvcanary_tools", *arguments]
        environment = {**os.environ, **environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return call
