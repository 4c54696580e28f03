"""What every test starts from: at most two threads, Triton's interpreter where there is no GPU, visible skips."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from zlib import crc32

import pytest
import torch

pytest_plugins = ["kvcanary.pytest_plugin", "pytester"]

HAS_CUDA = torch.cuda.is_available()

# Triton chooses between compiler and interpreter when a kernel is defined: this comes before the first import of one.
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(min(2, torch.get_num_threads()))  # OMP_NUM_THREADS=1 helps where another process holds a core


# Files of a minute: they come first, so that no worker is left with one when the others have ended.
LONG = (
    "test_real_sglang.py",
    "test_real_vllm.py",
    "test_real_loads.py",
    "test_campaign.py",
    "test_batching.py",
    "test_huge_pages.py",
    "test_walkthrough.py",
    "test_progress.py",
    "test_soak.py",
    "test_seams_named_runs.py",
    "test_engine_benches.py",
    "test_demo.py",
)


#: Big grids: of so many cases of a test in these files one is run on a CPU, the first and those that a hash of their
#: name chooses; `make test-all`, and a GPU, run all.
SAMPLED = {
    8: "campaign dumps each_check equality finite modes poison stored taken_states walk",
    6: (
        "abort causes drafting_grid engine_acceptance equality_grid flood full_acceptance heal huge_pages lineage "
        "mixed_windows one_flipped_bit reads reread seals splitting vllm_owners"
    ),
    4: (
        "always_on_checks attention batching delta drafted_ahead drafted_states false_alarms faults guard "
        "judged_behind locate page_backends plan pressure product reader_probe requests shares sliding "
        "standalone_engine states transformers windows"
    ),
    3: (
        "ahead announced_forwards attention_probe cli compile content corruption debug dump_replay fp8_engine index "
        "kernel_backends lag offload one_report quiet_steps recurrence refusals rows seams_named_runs seams_reenacted "
        "transformers_prompts vllm vllm_faults vllm_healing vllm_identity vllm_releases what_is_told"
    ),
    2: "backends gpu_benches identities",
}
ONE_OF = {f"test_{name}.py": number for number, names in SAMPLED.items() for name in names.split()}


def leave_to_test_all(items: list[pytest.Item]) -> None:
    """Marks what `SAMPLED` leaves out as slow."""
    begun = set[str]()
    for item in items:
        one_of = ONE_OF.get(item.path.name, 1)
        name = item.nodeid.partition("[")[0]
        if name in begun and crc32(item.nodeid.encode()) % one_of:
            item.add_marker(pytest.mark.slow)
        begun.add(name)


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_CUDA:
        leave_to_test_all(items)
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        if not HAS_CUDA and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and none is present"))
        for name in (marker.args[0] for marker in item.iter_markers("package")):
            if find_spec(name) is None:
                item.add_marker(pytest.mark.skip(reason=f"needs the package {name}, which is not installed"))


def pytest_collection_finish() -> None:
    """What was collected stays, a million objects: nobody looks through them again."""
    gc.collect()
    gc.freeze()


LEFT_OUT = pytest.StashKey[int]()  # cases that were deselected


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        stash = items[0].config.stash
        stash[LEFT_OUT] = stash.get(LEFT_OUT, 0) + len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist says how many it left out: all of them leave out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What no line above shows: xdist counts no cases that were not run."""
    count = config.stash.get(LEFT_OUT, 0)
    if count and not config.option.keyword:
        terminalreporter.write_line(f"{count} cases left out (-m {config.option.markexpr!r}): make test-all runs them")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting of the developer's shell must not decide what a test sees."""
    for name in [name for name in os.environ if name.startswith(("KVCANARY_", "SPEC_ENGINE_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """A benchmark that asks for two threads leaves them to no test behind it: beside a busy core they crawl."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def early_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rolling check has a slice so soon that a run of ten steps meets one, as long ones do all the time."""
    monkeypatch.setattr("kvcanary.scrub.scrubber.STRIDE", 7)
