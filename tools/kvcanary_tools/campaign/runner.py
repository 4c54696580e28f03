"""A campaign: its runs, drawn from a seed, in worker processes."""

from __future__ import annotations

import logging
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from multiprocessing import get_context
from multiprocessing.synchronize import Event

from kvcanary.faults.catalogue import faults, find
from kvcanary.faults.fault import READY, Fault
from kvcanary.faults.target import Setup
from kvcanary_tools import console
from kvcanary_tools.campaign.configurations import EMBEDDED, Plan, quiet_setup_for, setup_for
from kvcanary_tools.campaign.runs import Result, perform
from kvcanary_tools.campaign.switches import can_switch_off
from kvcanary_tools.campaign.traffic import CLEAN, DISABLED, FAULTY, QUIET, Run

BATCH = 8  # runs that a worker takes at a time
MODES = ("raise", "abort")  # taken in turn
SEED_STEP = 2  # seeds keep their parity: the rules of the ranker are tuned on even ones


def chosen(names: Sequence[str]) -> list[Fault]:
    """The faults of these names and families, every one where none is named; UnknownFaultError for another name."""
    if not names or "all" in names:
        return faults()
    named = {family: [fault for fault in faults() if fault.family == family] for family in names}
    return [fault for name in names for fault in named[name] or [find(name)]]


def runs_of(wanted: Sequence[Fault], plan: Plan, runs: int | None, seed: int) -> list[Run]:
    """Every run of a campaign: a fault's go round its configurations, a clean twin is there once a setup and seed."""
    found: list[Run] = []
    for fault in wanted:
        if fault.state != READY:
            continue
        setups = _setups_of(fault, plan, setup_for)
        quiet = _setups_of(fault, plan, quiet_setup_for)
        count = runs or max(plan.runs, len(setups))
        kinds = {FAULTY: count}
        if can_switch_off(fault.expected):
            kinds[DISABLED] = min(count, plan.disabled)
        if fault.has_twin:
            kinds[QUIET] = min(count, plan.quiet)
        for kind, number in kinds.items():
            own = quiet if kind == QUIET else setups
            for turn, (name, setup) in enumerate(islice(cycle(own.items()), number if own else 0)):
                number_of_round = turn // len(own)  # seeds are by round, so that faults share their clean twins
                mode = MODES[(turn + number_of_round) % 2] if kind == FAULTY else MODES[0]
                found.append(Run(fault.name, name, setup, seed + SEED_STEP * number_of_round, kind, mode, turn))
    found.sort(key=lambda run: run.turn)  # a campaign that is interrupted has come as far with every fault
    return [*_clean_of(found), *found]


def runs_instead(results: Sequence[Result], plan: Plan, runs: int | None) -> list[Run]:
    """For runs in which their fault could not be made others, with later seeds, in configurations in which it could.

    There is one for each that a fault lacks of what the plan wants, of the embedded model too where it wants all.
    """
    wanted = {FAULTY: runs or plan.runs, QUIET: plan.quiet, DISABLED: plan.disabled}
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.run.kind != CLEAN:
            groups[result.run.fault, result.run.kind].append(result)
    found: list[Run] = []
    for (_, kind), group in groups.items():
        could = [result.run for result in group if result.struck]
        due = {"": min(wanted[kind], len(group)) - len(could)}
        if kind == FAULTY and runs is None:
            due[EMBEDDED] = plan.embedded - sum(run.config == EMBEDDED for run in could)
        last = {name: max(result.run.seed for result in group) for name in {run.config for run in could}}
        ways = {run.config: run for run in could}
        turn = len(group)
        for name, missing in due.items():
            own = [run for config, run in ways.items() if name in ("", config)]
            for run in islice(cycle(own), max(0, missing)):
                last[run.config] += SEED_STEP
                found.append(replace(run, seed=last[run.config], turn=turn))
                turn += 1
    return [*_clean_of(found, {(r.run.twin, r.run.seed) for r in results if r.run.kind == CLEAN}), *found]


def _clean_of(found: Sequence[Run], known: Set[tuple[str, int]] = frozenset()) -> list[Run]:
    """The clean twins of these runs, but for those of a setup and seed that there are."""
    twins = {(run.twin, run.seed): run for run in found if run.kind == FAULTY}
    return [Run("", run.config, run.setup, run.seed, CLEAN) for key, run in twins.items() if key not in known]


def _setups_of(fault: Fault, plan: Plan, setup_for: Callable[[Fault, Setup], Setup | None]) -> dict[str, Setup]:
    """By name, those of the plan in which the fault can be made."""
    return {name: setup for name, base in plan.setups.items() if (setup := setup_for(fault, base)) is not None}


def campaign(runs: Sequence[Run], workers: int) -> Iterator[Result]:
    """Perform them, results as they come; in this process with one worker, in as many others with more.

    The first one runs here: what it compiles, the others find in the cache. Who closes it waits for one run a worker.
    """
    alone = 1 if workers > 1 else len(runs)
    yield from map(perform, runs[:alone])
    size = max(1, min(BATCH, len(runs) // workers))  # no worker is left without
    batches = [runs[start : start + size] for start in range(alone, len(runs), size)]
    if not batches:
        return
    context = get_context("spawn")
    ends = context.Event()
    pool = ProcessPoolExecutor(min(workers, len(batches)), context, _begin, (ends,))
    try:
        with _interrupts_wait():  # a process begins with the signals blocked that are blocked where it is started
            coming = [pool.submit(_perform_all, batch) for batch in batches]
        for future in as_completed(coming):
            yield from future.result()
    finally:
        ends.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes behind it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_ends: list[Event] = []  # of this worker: set when nobody waits for its results any more


def _begin(ends: Event) -> None:
    _ends.append(ends)
    begin_worker()


def _perform_all(runs: Sequence[Run]) -> list[Result]:
    return [perform(run) for run in runs if not _ends[0].is_set()]


def begin_worker() -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is interrupted tells the workers to end
    torch.set_num_threads(1)
    console.log_to_stderr(logging.CRITICAL)


def cpu_seconds() -> float:
    """That this process has used, and those of its workers that have ended."""
    return sum(os.times()[:4])


def default_workers() -> int:
    return os.cpu_count() or 1
