"""A canary that is off is absent: no manager, no buffer, no wrapper, and its modules are not even loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig, SamplingParams

PROGRAM = """
import sys

class Refuse:
    '''Importing what a canary is made of fails.'''
    NAMES = {"checks", "lifecycle", "mirror", "sealing", "reading", "sweep", "registry", "static", "graphs"}
    NAMES |= {"storing", "host", "loops"}

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.rpartition(".")
        if package.partition(".")[0] == "kvcanary" and module in self.NAMES:
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
from spec_engine import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(max_total_tokens=512))
print(engine.generate(["def f("], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids)
"""


def test_off_loads_nothing_of_the_canary() -> None:
    """An engine without a canary runs where the modules of the canary cannot be imported."""
    paths = os.pathsep.join(path for path in [os.getcwd(), *sys.path] if path)
    environment = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    engine = Engine(EngineConfig(max_total_tokens=512))
    output = engine.generate(["def f("], SamplingParams(max_new_tokens=4, ignore_eos=True))[0]
    assert result.stdout.strip() == str(output.token_ids)


SERVER = (
    PROGRAM
    + """
from spec_engine.server.options import ServerOptions
Refuse.NAMES |= {"hook_clock", "page_map", "catalogue", "target"}
from spec_engine.server.app import create_app
create_app(engine, ServerOptions())
"""
)


def test_a_server_loads_nothing_of_an_absent_canary() -> None:
    """Neither the canary, nor what reads it, nor the catalogue of faults."""
    paths = os.pathsep.join(path for path in [os.getcwd(), *sys.path] if path)
    environment = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run([sys.executable, "-c", SERVER], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_off_installs_nothing() -> None:
    """No manager, no substep, no quarantine; the attention of a forward has the engine's own arrays."""
    engine = Engine(EngineConfig(max_total_tokens=512, canary=CanaryConfig(mode="off")))
    assert engine.canary is None
    assert engine.runner.forwards.canary is None
    assert engine.allocator.quarantine == 0
    seen = []
    plain = engine.pools["target"].store

    def store(layer: int, slots: torch.Tensor, *values: object) -> None:
        seen.append(slots)
        plain(layer, slots, *values)

    engine.pools["target"].store = store
    engine.generate(["def f("], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert seen
    assert not [name for name in vars(engine) if "canary" in name and getattr(engine, name) is not None]
