"""`kvcanary fleet`: one certificate of many servers, and which GPU, code path, version or connector is to blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT

if TYPE_CHECKING:
    from kvcanary_tools.fleet.members import Member

SHOW = "show"


class Fleet(click.Group):
    """A group whose first word may be left out: `kvcanary fleet URL` is `kvcanary fleet show URL`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [SHOW, *args]
        return super().parse_args(ctx, args)


def _members(function: Callable[..., Any]) -> Callable[..., Any]:
    """What both commands take."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
        click.option("--api-key", metavar="KEY", envvar="KVCANARY_API_KEY", help="API key of the servers."),
        click.option("--prometheus", metavar="URL", help="Ask this Prometheus which servers have a canary."),
        click.option(
            "--urls",
            "url_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="A file of members, one a line; # begins a comment.",
        ),
        click.argument("places", nargs=-1, metavar="[URL|FILE.json]..."),
    ):
        function = decorate(function)
    return function


@click.group(
    "fleet", cls=Fleet, context_settings=CONTEXT, short_help="One certificate of many servers; who is to blame."
)
def command() -> None:
    """Add up the certificates and findings of many servers; `blame` says what stands out.

    Members are URLs of servers with --debug, or JSON files of what an adapter reports
    (`llm.collective_rpc("kvcanary_report")`).

    \b
      kvcanary fleet http://node1:8000 http://node2:8000
      kvcanary fleet --prometheus http://prometheus:9090 --json
      kvcanary fleet blame --urls members.txt

    Exit codes: 0 nothing was found and all are watched, 1 otherwise, 2 wrong usage.
    """


@command.command(SHOW, context_settings=CONTEXT, short_help="One certificate of all, the weakest member first.")
@_members
@click.pass_context
def show(ctx: click.Context, as_json: bool, **asked: Any) -> None:
    """Add up certificates and findings: sums, the weakest of each setting, incidents joined by what they share.

    Exit codes: 0 nothing was found and all are watched, 1 otherwise, 2 wrong usage.
    """
    from kvcanary_tools.fleet.merging import fleet_certificate, lines

    certificate = fleet_certificate(_asked(**asked))
    if as_json:
        console.data_json(certificate)
    else:
        for line in lines(certificate):
            console.data(line)
    is_clean = certificate["is_whole"] and not certificate["incidents"]
    ctx.exit(console.EXIT_CLEAN if is_clean else console.EXIT_FINDING)


@command.command("blame", context_settings=CONTEXT, short_help="Which GPU, code path, version or connector.")
@_members
@click.pass_context
def show_blame(ctx: click.Context, as_json: bool, **asked: Any) -> None:
    """Rank GPUs, code paths, versions and connectors by their incidents over their exposure, with a p-value.

    Each comes with what to do: heal, restart, drain and probe, or file with the engine.

    Exit codes: 0 nobody stands out, 1 somebody does, 2 wrong usage.
    """
    from kvcanary_tools.fleet.blame import blame, lines, of_members

    members = _asked(**asked)
    for member in members:
        if not member.is_reached:
            console.say(f"unreachable: {member.place}: {member.reason}", fg="yellow")
    verdict = blame(*of_members(members))
    if as_json:
        console.data_json(asdict(verdict) | {"unreachable": [one.place for one in members if not one.is_reached]})
    else:
        for line in lines(verdict):
            console.data(line)
    ctx.exit(console.EXIT_FINDING if verdict.suspects else console.EXIT_CLEAN)


def _asked(
    places: Sequence[str], url_file: Path | None, prometheus: str | None, api_key: str | None
) -> Sequence[Member]:
    """Every member that was named, each once. A usage failure where none was, or a file is none."""
    from kvcanary_tools.fleet.members import ask_all, found_by_prometheus

    named = list(places)
    if url_file is not None:
        own = [line.partition("#")[0].strip() for line in url_file.read_text(encoding="utf-8").splitlines()]
        named += filter(None, own)
    if prometheus is not None:
        named += found_by_prometheus(prometheus)
    if not named:
        raise console.UsageFailure("a fleet has members, got none", "name URLs, or --urls FILE, or --prometheus URL")
    return ask_all(list(dict.fromkeys(named)), api_key)
