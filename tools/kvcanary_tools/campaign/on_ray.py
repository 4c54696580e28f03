"""A campaign on a Ray cluster: its runs are independent processes with a seed, so each task is a few of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from kvcanary_tools.campaign.runner import BATCH, begin_worker
from kvcanary_tools.campaign.runs import Result, perform
from kvcanary_tools.campaign.traffic import Run
from kvcanary_tools.console import UsageFailure

HERE = "here"  # no cluster: one that is started on this machine, and ends with the campaign


def campaign_on_ray(runs: Sequence[Run], address: str) -> Iterator[Result]:
    """Perform them, results in their order. UsageFailure where there is no Ray, or no cluster at the address.

    kvcanary must be installed on every node, in the same version. A task whose node is lost runs again elsewhere, with
    the same seeds, so its results are the same.
    """
    ray = start(address)
    try:
        task = ray.remote(num_cpus=1)(_perform_all)
        for coming in [task.remote(list(runs[begin : begin + BATCH])) for begin in range(0, len(runs), BATCH)]:
            yield from ray.get(coming)
    finally:
        with suppress(Exception):  # who interrupts does not wait for what nobody wants
            ray.shutdown()


def start(address: str, **settings: Any) -> Any:
    """The module, connected. UsageFailure where it is not installed, or no cluster is at the address."""
    ray = expect_ray()
    settings = {"log_to_driver": False, "include_dashboard": False} | settings if address == HERE else {}
    try:
        ray.init(address=None if address == HERE else address, configure_logging=False, **settings)
    except ConnectionError as error:
        raise UsageFailure(f"no Ray cluster answers at {address}: {error}", "--ray alone starts one here") from error
    return ray


def expect_ray() -> Any:
    """The module. UsageFailure where it is not installed."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise UsageFailure("Ray is not installed", "pip install 'kvcanary[ray]'") from error


def _perform_all(runs: Sequence[Run]) -> list[Result]:
    begin_worker()
    return [perform(run) for run in runs]
