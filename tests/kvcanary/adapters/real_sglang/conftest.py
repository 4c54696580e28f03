"""Scenes in a real SGLang."""

from __future__ import annotations

from functools import cache

import pytest

from kvcanary_tools.bench.sglang.cpu import SCENES, played

from .playing import INSTALLED


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory):
    """The acts of a scene, which is played once for all tests of a file."""
    place = tmp_path_factory.mktemp("sglang")
    return cache(lambda name: played(SCENES[name], INSTALLED, place))
