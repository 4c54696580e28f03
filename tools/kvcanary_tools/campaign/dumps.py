"""What dumps of a campaign are worth: whether `explain` names the right cause first, and `replay` ends as they did.

`kvcanary inject all --config full --runs 20 --dumps DIR`, then
`python -m kvcanary_tools.campaign.dumps DIR --json FILE` tells of each fault how many of its dumps do.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from kvcanary.dumps.reading import read_dump
from kvcanary.errors import KVCanaryError
from kvcanary.faults.catalogue import find
from kvcanary.manager.dump_trigger import SUFFIX
from kvcanary.replay.replayer import replay
from kvcanary_tools import console
from kvcanary_tools.campaign.outcome.bars import FIRST
from kvcanary_tools.campaign.outcome.report import versions
from kvcanary_tools.campaign.runner import begin_worker, default_workers
from kvcanary_tools.dumps.explaining import explain
from kvcanary_tools.files import JsonFile, OutFile


@dataclass(frozen=True)
class Score:
    """Of one dump.

    rank: of the right cause in what is explained, 1 is the first, 0: not named.
    missing: recorded findings that the replay did not reach; error: in what it ended otherwise.
    is_recorded: its pool is in the recording, which has no recurrent states.
    """

    dump: str
    fault: str
    code: str
    rank: int
    missing: Sequence[str] = ()
    error: str = ""
    is_recorded: bool = True

    @property
    def is_same(self) -> bool:
        return not self.missing and not self.error


def score(path: Path) -> Score:
    """Explain and replay the first finding of a dump, whose name begins with its fault's."""
    fault, dump = find(path.name.partition("-")[0]), read_dump(path)
    if not dump.findings:
        return Score(path.name, fault.name, "", 0, error="it has no finding")
    families = [cause["family"] for cause in explain(dump, 0)["causes"]]
    right = fault.cause or fault.family
    rank = families.index(right) + 1 if right in families else 0
    code, is_recorded = dump.findings[0]["code"], dump.findings[0]["pool"] in dump.pools
    try:
        missing = [f"{finding['code']} at slot {finding['slot']}" for finding in replay(dump).missing]
    except KVCanaryError as error:
        return Score(path.name, fault.name, code, rank, error=f"{type(error).__name__}: {error}")
    return Score(path.name, fault.name, code, rank, missing, is_recorded=is_recorded)


def as_json(scores: Iterable[Score]) -> dict[str, Any]:
    """The sums, a row a fault, and the dumps that are not as they should be."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for one in scores:
        groups[one.fault].append(one)
    rows = [{"fault": fault} | _sums(group) for fault, group in sorted(groups.items())]
    every = [one for group in groups.values() for one in group]
    wrong = [asdict(one) for one in every if one.rank != 1 or (one.is_recorded and not one.is_same)]
    return {"meta": {"faults": len(groups)} | _sums(every) | versions(), "rows": rows, "wrong": wrong}


def _sums(scores: Sequence[Score]) -> dict[str, int]:
    return {
        "dumps": len(scores),
        "cause_first": sum(one.rank == 1 for one in scores),
        "cause_named": sum(one.rank > 0 for one in scores),
        "recorded": sum(one.is_recorded for one in scores),
        "replayed": sum(one.is_same for one in scores),
    }


def missed(reported: dict[str, Any]) -> Iterator[str]:
    """What of the sums is not enough."""
    meta = reported["meta"]
    if meta["cause_first"] < FIRST * meta["dumps"]:
        yield f"the right cause is first in {meta['cause_first']} of {meta['dumps']} dumps, {FIRST:.0%} are due"
    if meta["replayed"] < meta["recorded"]:
        yield f"the same finding is reached in {meta['replayed']} of {meta['recorded']} replays, all are due"


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "json_file", type=OutFile(), help="Write the scores there.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; by default one a core.")
def main(folder: Path, json_file: Path | None, workers: int | None) -> None:
    """Exit codes: 0 every bar is held, 1 otherwise."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise click.UsageError(f"{folder} must hold dumps, got none: kvcanary inject --dumps {folder} writes them")
    with ProcessPoolExecutor(workers or default_workers(), get_context("spawn"), begin_worker) as pool:
        reported = as_json(pool.map(score, paths, chunksize=4))
    file = JsonFile(json_file)
    file.write(reported)
    file.say(json.dumps(reported["meta"]))
    misses = list(missed(reported))
    for miss in misses:
        console.say(f"missed: {miss}", fg="red")
    raise click.exceptions.Exit(console.EXIT_FINDING if misses else console.EXIT_CLEAN)


if __name__ == "__main__":
    main()
