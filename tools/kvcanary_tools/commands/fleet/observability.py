"""`kvcanary observability DIR`: dashboards, alert rules, and a compose file that starts Prometheus and Grafana."""

from __future__ import annotations

from pathlib import Path

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT


@click.command("observability", context_settings=CONTEXT, short_help="Write Grafana dashboards and alert rules.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="HOST:PORT",
    default=("host.docker.internal:8000",),
    show_default=True,
    help="A server to scrape; may be repeated.",
)
def command(folder: Path, targets: tuple[str, ...]) -> None:
    """Write two Grafana dashboards (an engine, a fleet), alert rules, and a compose file into DIR.

    \b
      kvcanary observability monitoring --target node1:8000 --target node2:8000
      docker compose -f monitoring/docker-compose.yml up

    Exit codes: 0 written, 2 wrong usage or the folder cannot be written.
    """
    from kvcanary_tools.fleet.observability.writing import write

    try:
        for path in write(folder, targets):
            console.data(str(path))
    except OSError as error:
        raise console.UsageFailure(
            f"{error.filename} cannot be written: {error.strerror}", "name a folder that is yours"
        ) from error
