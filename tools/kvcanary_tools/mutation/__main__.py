"""`python -m kvcanary_tools.mutation`: mutants of what judges a cache, a sample of them, against the unit subset."""

from __future__ import annotations

import json
import tempfile
from contextlib import chdir
from pathlib import Path

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT
from kvcanary_tools.files import JsonFile, OutFile
from kvcanary_tools.mutation import areas, report, running
from kvcanary_tools.mutation.subset import MOST_SECONDS

FILE = OutFile(resolve_path=True)
REPORT = click.Path(exists=True, dir_okay=False, path_type=Path, resolve_path=True)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True)
LEAST_KILLED = 0.9


@click.command(context_settings=CONTEXT)
@click.option("--sample", "size", type=click.IntRange(min=1), default=400, show_default=True, help="Mutants to run.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--root", type=FOLDER, default=".", help="The checkout; the current folder by default.")
@click.option("--again", type=REPORT, metavar="FILE", help="Run only what survived there; tests were added since.")
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write the report there; - is stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    size: int,
    seed: int,
    workers: int,
    root: Path,
    again: Path | None,
    json_file: Path | None,
) -> None:
    """Mutate findings, ledger, record, diagnosis and torch references, and run the unit subset against a sample.

    \b
      pip install -c constraints.txt -e '.[mutation]'
      python -m kvcanary_tools.mutation --json build/mutants.json

    Exit codes: 0 at least nine of ten mutants were killed and every other one is explained, 1 otherwise, 2 wrong usage.
    """
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        tree = Path(folder)
        running.make_tree(root, tree)
        sources = areas.digest(tree)
        names, mutants = areas.sample(tree, seed, size)
        known = [] if again is None else _known(again, names, sources)
        wanted = sorted(set(names).difference(outcome.name for outcome in known))
        console.say("the unit subset, three times")
        seconds = running.subset_seconds(tree)
        console.say(f"{len(wanted)} of {sum(mutants.values())} mutants, a unit subset of {seconds:.2f} s")
        found = known + running.run(tree, wanted, workers) if wanted else known
    meta = {"seed": seed, "subset_seconds": round(seconds, 2), "sources": sources, "versions": report.versions()}
    reported = report.as_dict(found, mutants, report.explanations(root), meta)
    file = JsonFile(json_file)
    for survivor in reported["survivors"]:
        file.say(f"{survivor['name']}\n  {survivor['change']}\n  {survivor['why'] or 'NOT EXPLAINED'}")
    killed = reported["meta"]["killed"]
    file.say(f"{killed} of {len(found)} mutants killed ({killed / len(found):.1%}) in {seconds:.2f} s of tests")
    file.write(reported)
    is_explained = all(survivor["why"] for survivor in reported["survivors"])
    ctx.exit(int(not is_explained or killed < LEAST_KILLED * len(found) or seconds > MOST_SECONDS))


def _known(again: Path, names: list[str], sources: str) -> list[running.Outcome]:
    """What an earlier report of this very sample has killed."""
    reported = json.loads(again.read_text(encoding="utf-8"))
    if reported["meta"]["sources"] != sources or sorted(reported["mutants"]) != names:
        raise click.UsageError(f"{again.name} must be of this sample of these sources: run all of it")
    return report.killed_before(reported)


if __name__ == "__main__":
    command(prog_name="python -m kvcanary_tools.mutation")
