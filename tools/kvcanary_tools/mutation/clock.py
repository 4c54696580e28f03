"""A plugin of pytest, for `-p`: what is imported on first use is imported before the tests, and they are timed."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

PLACE = "MUTATION_CLOCK"  # file for the processor time of all tests, fixtures included
_spent = 0.0


def pytest_collection_finish() -> None:
    """The compiled loops, and what torch imports when it first compares; none of it is looked at by the collector."""
    importlib.import_module("kvcanary.native.loops")
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def _timed() -> Generator[None, object, object]:
    global _spent
    start = time.process_time()
    try:
        return (yield)
    finally:
        _spent += time.process_time() - start


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _timed


def pytest_sessionfinish() -> None:
    if PLACE in os.environ:
        Path(os.environ[PLACE]).write_text(str(_spent), encoding="utf-8")
