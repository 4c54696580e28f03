"""`kvcanary serve`: the engine behind HTTP, as OpenAI's clients speak it, with the canary on a flag."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvcanary.environment import API_KEY
from kvcanary_tools import console, heap
from kvcanary_tools.campaign.fault_target import target_of
from kvcanary_tools.engine_options import ENGINE_CONTEXT, engine_config, engine_options, usage_failures
from spec_engine.server.options import LINKS, ServerOptions

if TYPE_CHECKING:
    from spec_engine import Engine, EngineConfig
    from spec_engine.parallel import Ranks
    from spec_engine.server.serving import Server

OF_ROLES = ("peers", "transport", "peer_name", "lease_seconds", "handover_timeout")
DUMPS = "kvcanary-dumps"  # folder for what mode raise writes, unless --kv-canary-dump names another
_DEFAULTS = {field.name: field.default for field in fields(ServerOptions)}


def _option(name: str, **settings: Any) -> Any:
    parameter = name.removeprefix("--").replace("-", "_")
    return click.option(name, parameter, default=_DEFAULTS.get(parameter), show_default=True, **settings)


@click.command("serve", context_settings=ENGINE_CONTEXT, short_help="Serve a model over HTTP.")
@_option("--host", metavar="ADDRESS", help="Where to listen; 0.0.0.0 is everywhere.")
@_option("--port", type=int, metavar="N", help="Port to listen on; 0 takes any free one.")
@_option("--model-name", metavar="NAME", help="What clients call the model; by default embedded, or its folder.")
@_option("--api-key", envvar=API_KEY, metavar="KEY", help=f"Key that clients must send; better given as {API_KEY}.")
@_option("--max-waiting", type=int, metavar="N", help="Sequences that may be queued; more are refused with 429.")
@_option("--max-concurrent", type=int, metavar="N", help="Requests answered at a time; more are refused with 429.")
@_option("--max-body-bytes", type=int, metavar="N", help="Longest request body; more is refused with 413.")
@_option("--max-tokens", type=int, metavar="N", help="Most tokens of a chat answer whose request gives no limit.")
@_option(
    "--grace-seconds", type=float, metavar="S", help="How long running requests may go on after SIGTERM or Ctrl-C."
)
@_option(
    "--role",
    type=click.Choice(["prefill", "decode"]),
    help="Compute prompts for servers that decode them, or decode what others have prefilled; needs --host-pages.",
)
@click.option(
    "--peer", "peers", multiple=True, metavar="URL", help="A prefill server whose handovers a decode server takes."
)
@_option("--transport", type=click.Choice(LINKS), help="By which K and V travel from one server to the other.")
@_option("--peer-name", metavar="NAME", help="What findings of other servers call this one.")
@_option("--lease-seconds", type=float, metavar="S", help="How long a prefilled request is kept for its decode server.")
@_option("--handover-timeout", type=float, metavar="S", help="After which a prompt whose bytes lack is computed again.")
@_option("--debug", is_flag=True, help="Open /debug/kvcanary, which needs an API key.")
@click.option(
    "--debug-host",
    "debug_hosts",
    multiple=True,
    metavar="NAME",
    help="Another host name under which /debug/kvcanary is reached.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    metavar="N",
    help="Serve from N engines on Ray; needs the extra ray.",
)
@click.option("--ray", metavar="ADDRESS", help="Ray cluster of the replicas; without one it is started here.")
@_option("--allow-faults", is_flag=True, help="Let clients of this machine arm faults; opens /debug/kvcanary too.")
@engine_options
@click.pass_context
def command(ctx: click.Context, replicas: int | None, ray: str | None, **options: Any) -> None:
    """Serve /v1/completions and /v1/chat/completions, watched by the canary.

    \b
      kvcanary serve --kv-canary abort --port 8000
      kvcanary serve --model DIR --kv-canary raise --api-key KEY --debug
      kvcanary serve --replicas 2 --kv-canary abort
      torchrun --nproc-per-node 2 -m kvcanary_tools serve --model DIR --kv-canary raise
      kvcanary serve --role prefill --host-pages 4096 --peer-name prefill-1
      kvcanary serve --role decode --host-pages 4096 --peer http://HOST:8000 --port 8001

    The embedded model completes Python, and nothing else: do not chat with it.

    Exit codes: 0 stopped by a signal, 2 wrong usage or a busy port, 3 kvcanary itself failed, 70 a finding or a
    broken rule of KV memory stopped the engine (--kv-canary raise). A finding leaves a dump in the folder that
    --kv-canary-dump names, kvcanary-dumps where it names none; the report says which file.
    """
    if options["kv_canary"] == "raise" and options["kv_canary_ring"]:  # what stops a server leaves a dump
        options["kv_canary_dump"] = options["kv_canary_dump"] or DUMPS
    _expect_role(ctx, options["role"])
    from spec_engine.parallel import num_ranks

    if num_ranks() > 1:
        _expect_plain(options | {"replicas": replicas})
    config = engine_config(options)
    with usage_failures():
        served = ServerOptions(**{field: options[field] for field in _DEFAULTS})
    _expect_extra()
    if replicas is not None or ray is not None:
        _serve_replicas(config, served, replicas or 1, ray)
        ctx.exit(console.EXIT_CLEAN)

    from spec_engine import Engine
    from spec_engine.parallel import Leader, join_ranks
    from spec_engine.server.serving import Server, bind, serve, url_of

    console.log_to_stderr()
    with usage_failures():
        ranks = join_ranks(config.device)
        if ranks is not None and ranks.rank:
            engine = Engine(config, ranks=ranks.compares)
            heap.settle()
            ctx.exit(_follow(engine, ranks))
        listening = bind(served)
        try:
            engine = Engine(config) if ranks is None else Engine(config, ranks=ranks.compares)
            leader = None if ranks is None else Leader(engine, ranks.calls)
            server = Server(engine if leader is None else leader.engine, served, target_of)
        except BaseException:
            listening.close()
            raise
    heap.settle()  # what is loaded stays, and no later collection stops a step to look through it
    _greet(server, url_of(listening))
    failure = serve(server, listening)
    if leader is not None and failure is None:
        leader.end()
    ctx.exit(_tell(failure))


def _follow(engine: Engine, ranks: Ranks) -> int:
    """Run what the first rank is asked for; the exit code."""
    from kvcanary import KVCanaryError
    from spec_engine.parallel import follow

    try:
        follow(engine, ranks.calls)
    except KVCanaryError as error:
        return _tell(error)
    return console.EXIT_CLEAN


def _expect_plain(options: dict[str, Any]) -> None:
    """Usage failure for what changes an engine otherwise than by requests: other ranks would not hear of it."""
    for name in ("role", "replicas", "allow_faults"):
        if options.get(name):
            raise click.UsageError(
                f"--{name.replace('_', '-')} is of a server of one process: start it without torchrun"
            )


def _expect_role(ctx: click.Context, role: str | None) -> None:
    """Usage failure where an option of handovers is given to a server that has none."""
    given = [name for name in OF_ROLES if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if role is None and given:
        name = given[0].removesuffix("s") if given[0] == "peers" else given[0]
        raise click.UsageError(
            f"--{name.replace('_', '-')} is of servers with a role: say --role prefill or decode too"
        )


def _serve_replicas(config: EngineConfig, served: ServerOptions, replicas: int, address: str | None) -> None:
    """Until Ctrl-C or SIGTERM. Usage failure where Ray is missing, or no cluster answers."""
    from kvcanary_tools.campaign.on_ray import HERE, expect_ray

    expect_ray()
    from kvcanary_tools.replicas.deployment import deploy, until_stopped

    deploy(config, served, replicas, address or HERE)
    console.data(f"url     http://{served.host}:{served.port}/v1")
    console.data(f"ray     {console.numbered(replicas, 'replica')}; a replica whose memory fails is replaced")
    until_stopped()


def _expect_extra() -> None:
    try:
        import fastapi
        import sse_starlette
        import uvicorn
    except ImportError as error:
        raise console.UsageFailure(
            f"serving needs the package {error.name!r}, which is not installed", "pip install 'kvcanary[serve]'"
        ) from error
    del fastapi, sse_starlette, uvicorn


def _greet(server: Server, url: str) -> None:
    """Model id, URL and a line to copy."""
    options, mode = server.options, server.worker.engine.config.canary.mode
    body = {"model": server.model_name, "prompt": "def fibonacci(n):\n", "max_tokens": 48, "temperature": 0}
    key = " -H 'Authorization: Bearer KEY'" if options.api_key else ""
    console.data(f"model   {server.model_name}, canary {mode}")
    console.data(f"url     {url}/v1")
    if options.has_debug:
        console.data(f"debug   {url}/debug/kvcanary (any name, the API key as password)")
    console.data(f"try     curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'")


def _tell(failure: BaseException | None) -> int:
    """What stopped the engine, and the exit code for it."""
    from kvcanary import KVCorruptionError
    from kvcanary.invariants import InvariantError
    from kvcanary.ranks import RanksDisagreeError

    if failure is None:
        console.say("kvcanary: stopped")
        return console.EXIT_CLEAN
    if isinstance(failure, KVCorruptionError):
        console.say(failure.report.text())
        return console.EXIT_CORRUPTION
    if isinstance(failure, InvariantError | RanksDisagreeError):
        console.say(f"kvcanary: {type(failure).__name__}: {failure}", fg="red")
        return console.EXIT_CORRUPTION
    raise failure
