"""`kvcanary drill`: flip one bit in a running server, and fail where its canary does not say so."""

from __future__ import annotations

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT


@click.command("drill", context_settings=CONTEXT, short_help="Flip one bit in a running server; silence is a failure.")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--api-key", metavar="KEY", envvar="KVCANARY_API_KEY", help="API key of the servers.")
@click.pass_context
def command(ctx: click.Context, urls: tuple[str, ...], as_json: bool, api_key: str | None) -> None:
    """Let each server run a request of its own, flip one bit of its cache, and report what its canary found.

    Nobody else's request is touched; the finding is counted as a drill, and no fleet joins it. Servers take drills
    from their own machine, with --allow-faults and in mode log, abort or heal. A fleet whose drill is silent has no
    canary: run this by a timer on every node, and alert on its exit code or on kvcanary_drills_total.

    \b
      KVCANARY_API_KEY=KEY kvcanary drill http://127.0.0.1:8000

    Exit codes: 0 every bit was found, 1 somebody was silent or could not be struck, 2 wrong usage or a server refuses.
    """
    from kvcanary_tools.remote import drill

    reported = {url: drill(url, api_key) for url in urls}
    if as_json:
        console.data_json(reported)
    for url, told in () if as_json else reported.items():
        finding = told["finding"]
        where = "" if finding is None else f": {finding['code']} at slot {finding['slot']}, step {finding['step']}"
        console.data(f"{url}  {told['result']}{where}")
    silent = [url for url, told in reported.items() if told["result"] != "found"]
    for url in silent:
        console.say(f"kvcanary: DRILL FAILED at {url}: one bit was flipped there and nobody said so", fg="red")
    ctx.exit(console.EXIT_FINDING if silent else console.EXIT_CLEAN)
