"""`kvcanary top URL`: a running server in the terminal, refreshed."""

from __future__ import annotations

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT


@click.command("top", context_settings=CONTEXT, short_help="Watch a running server.")
@click.argument("url")
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="KVCANARY_API_KEY",
    help="API key of a server with --debug: shows requests, pages and findings too.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates.",
)
@click.option("--once", is_flag=True, help="Print once and exit.")
@click.pass_context
def command(ctx: click.Context, url: str, api_key: str | None, interval: float, once: bool) -> None:
    """Watch the server at URL: speed, pages, and what the canary checked and found.

    \b
      kvcanary top http://127.0.0.1:8000
      KVCANARY_API_KEY=KEY kvcanary top http://127.0.0.1:8000 --once

    With the API key of a server that has --debug it shows pages, requests and findings one by one.

    Exit codes: 0 clean, 1 with --once where there are findings, 2 wrong usage or nobody answers, 130 ended by Ctrl-C.
    """
    try:
        import prometheus_client  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise console.UsageFailure(
            f"top needs the package {error.name!r}, which is not installed", "pip install 'kvcanary[serve]'"
        ) from error
    from kvcanary_tools.watching import look, show_live, show_once

    first = look(url, api_key)
    if once:
        show_once(first)
        ctx.exit(console.EXIT_FINDING if first.num_findings else console.EXIT_CLEAN)
    show_live(first, lambda: look(url, api_key), interval)
