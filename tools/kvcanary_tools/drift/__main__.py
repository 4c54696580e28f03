"""``python -m kvcanary_tools.drift vllm 0.32.0 0.33.0``: which names that an adapter uses a release does not have."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from kvcanary.adapters.compatibility import Needed
from kvcanary_tools.drift.archives import released, unpacked
from kvcanary_tools.drift.source import Source

#: By path of an adapter, lists of the names that it uses, one of which must be whole.
Paths = Mapping[str, tuple[tuple[Needed, ...], ...]]
RESULTS = Path(__file__).parents[1] / "bench" / "results"
FROM_WHEEL = {"transformers": True, "vllm": False, "sglang": True}
#: The oldest release that is looked at. Of each with as many numbers as these the newest one is.
OLDEST = {"transformers": (5, 14), "vllm": (0, 26), "sglang": (0, 5, 23)}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("host", type=click.Choice(sorted(FROM_WHEEL)))
@click.argument("versions", nargs=-1)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("build/drift"), help="For downloads.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object instead of a table.")
@click.option("--keep", is_flag=True, help="Write it among the results that docs/adapters.md quotes.")
def main(host: str, versions: tuple[str, ...], folder: Path, as_json: bool, keep: bool) -> None:
    """Compare the names that the adapter of HOST uses with releases of it, by parsing their source.

    VERSIONS: those to look at; none: the last patch of every release from the oldest that was tried on.

    Exit codes: 0 every path is whole in every release, 1 a name is gone.
    """
    record = compared(host, versions or newest_of_each(released(host), OLDEST[host]), folder)
    if keep:
        text = json.dumps(record, indent=1) + "\n"
        (RESULTS / f"drift_{host}.json").write_text(text, encoding="utf-8")
    click.echo(json.dumps(record, indent=1) if as_json else table(record))
    sys.exit(any(release["gone"] for release in record["releases"].values()))


def compared(host: str, versions: Iterable[str], folder: Path) -> dict[str, Any]:
    """What each release lacks, by path of the adapter."""
    paths, releases = paths_of(host), {}
    for version in versions:
        source = Source(unpacked(host, version, folder, FROM_WHEEL[host]))
        releases[version] = looked_at(source, paths)
    return {"host": host, "names": sum(len(lists[-1]) for lists in paths.values()), "releases": releases}


def looked_at(source: Source, paths: Paths) -> dict[str, Any]:
    """gone: by path, sentences; lacks: optional attributes that are not there."""
    gone = {}
    for path, lists in paths.items():
        faults = [source.faults(needs) for needs in lists]
        if [] not in faults:
            gone[path] = faults[-1]
    lacks = sorted({name for lists in paths.values() for name in source.lacks(lists[-1])})
    return {"gone": gone, "lacks": lacks}


def paths_of(host: str) -> Paths:
    """What the adapter of a host uses."""
    if host == "vllm":
        module = import_module("kvcanary.adapters.vllm.compatibility")
        sides = {name: (needs,) for name, needs in module.SIDES.items()}
        runners = {module.RUNNERS[name]: (needs,) for name, needs in module.NEEDED_OF.items()}
        return {"every runner": (module.EVERY_RUNNER,)} | sides | runners
    if host == "sglang":
        module = import_module("kvcanary.adapters.sglang.compatibility")
        return {path: (needs,) for path, needs in module.NEEDED_OF.items()}
    return import_module("kvcanary.adapters.transformers.needs").PATHS  # type: ignore[no-any-return]


def newest_of_each(versions: Iterable[str], oldest: tuple[int, ...]) -> list[str]:
    """Of versions, newest first, the newest of each that begins with other numbers, as many as `oldest` has."""
    newest: dict[tuple[int, ...], str] = {}
    for version in versions:
        parts = version.split(".")
        if all(part.isdigit() for part in parts) and (key := tuple(map(int, parts[: len(oldest)]))) >= oldest:
            newest.setdefault(key, version)
    return [newest[key] for key in sorted(newest)]


def table(record: Mapping[str, Any]) -> str:
    """A line for each release."""
    lines = []
    for version, release in record["releases"].items():
        faults = [f"{path}: {fault}" for path, own in release["gone"].items() for fault in own]
        without = f"; without {', '.join(release['lacks'])}" if release["lacks"] else ""
        lines += [f"{record['host']} {version}  {len(faults) or 'no'} names are gone{without}"]
        lines += [f"  {fault}" for fault in faults]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
