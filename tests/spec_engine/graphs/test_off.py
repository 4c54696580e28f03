"""Graphs without a canary: nothing of it is loaded, and what is launched is what an engine without one launches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

REFUSE = """
import sys

class Refuse:
    '''Importing what a canary is made of fails.'''
    NAMES = {"manager", "checks", "lifecycle", "mirror", "sealing", "reading", "sweep", "registry", "static", "graphs"}
    NAMES |= {"storing", "host", "loops", "substep", "launches", "buffers", "harvest", "mailbox", "flights", "learning"}
    NAMES |= {"beside"}

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.rpartition(".")
        if package == "kvcanary" and module in self.NAMES:
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
"""

# What a CPU runs, by name and shapes; what a GPU's graphs hold, by kind of node, kernel and grid.
RECORD = """
import ctypes
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcanary import CanaryConfig
from spec_engine import Engine, EngineConfig
from spec_engine.graphs import program

device, topk, *modes = sys.argv[1:]
launched, graphs = [], []

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple) else (out,)
        launched.append((str(func), [list(t.shape) for t in results if isinstance(t, torch.Tensor)]))
        return out

class KeptGraph(torch.cuda.CUDAGraph):
    def __new__(cls):
        return super().__new__(cls, True)

    def __init__(self):
        super().__init__(True)
        graphs.append(self)

NUMBERS = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")

class KernelNode(ctypes.Structure):
    _fields_ = [("func", ctypes.c_void_p), *((name, ctypes.c_uint) for name in NUMBERS)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("params", "extra", "kern", "context")]

def driver(name, *arguments):
    error = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    assert error == 0, (name, error)

def nodes_of(graph):
    count, handle = ctypes.c_size_t(), ctypes.c_void_p(graph.raw_cuda_graph())
    driver("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    driver("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    for node in nodes:
        kind, kernel, name = ctypes.c_int(), KernelNode(), ctypes.c_char_p()
        driver("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == 0:
            driver("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(kernel))
            get_name, owner = ("cuFuncGetName", kernel.func) if kernel.func else ("cuKernelGetName", kernel.kern)
            driver(get_name, ctypes.byref(name), ctypes.c_void_p(owner))
        yield kind.value, name.value, [getattr(kernel, part) for part in NUMBERS[:6]]

record = program.Recorder.record

def recorded(self, body):
    if device == "cpu":
        with Operations():
            body()
    return record(self, body)

program.Recorder.record = recorded
torch.cuda.CUDAGraph = KeptGraph
settings = {"max_total_tokens": 256, "context_length": 48, "max_running_requests": 2, "topk": int(topk), "num_steps": 2}
for mode in modes:
    launched.clear()
    graphs.clear()
    Engine(EngineConfig(graphs="on", graph_buckets=[2], device=device, canary=CanaryConfig(mode=mode), **settings))
    for graph in graphs:
        launched += nodes_of(graph)
    print(mode, len(launched), "with" if "kvcanary.captured.substep" in sys.modules else "without", "the canary")
    if mode == "off":
        print(*launched, sep="\\n")
"""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def launches(program: str, *arguments: str) -> list[str]:
    """Lines that a child process prints: by mode how many launches, and whether with a canary; of off's all."""
    paths = os.pathsep.join(path for path in [os.getcwd(), *sys.path] if path)
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if "kvcanary.compiling" not in line]  # told once a machine


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("topk", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_off_launches_what_an_engine_without_a_canary_launches(device, topk):
    """With modules that refuse to be loaded the list is equal, launch by launch; a canary that is on adds to it."""
    refused = launches(REFUSE + RECORD, device, topk, "off")
    *off, on = launches(RECORD, device, topk, "off", "raise")
    assert off == refused
    count, more = (int(line.split()[1]) for line in (off[0], on))
    assert (off[0], on) == (f"off {count} without the canary", f"raise {more} with the canary")
    assert 100 < count < more
