"""The options that every command with an engine shares, and the settings that they make.

What a value may be is decided once, by EngineConfig, SamplingParams and CanaryConfig: the command line hands values
on as they are and shows the sentence with which they are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from kvcanary import CanaryConfig, KVCanaryError
from kvcanary.environment import JSON, OF_THE_ENGINE, PARSERS, variable
from kvcanary.faults import ENVIRONMENT as REENACT
from kvcanary_tools import console
from kvcanary_tools.console import UsageFailure
from kvcanary_tools.files import OutFolder
from spec_engine.config import DEFAULT_NODES, EngineConfig

if TYPE_CHECKING:
    from spec_engine import SamplingParams

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
# Options of commands with an engine can be given as SPEC_ENGINE_<NAME>, the canary's under the names it has everywhere.
ENGINE_CONTEXT = {**CONTEXT, "auto_envvar_prefix": OF_THE_ENGINE.removesuffix("_")}
ENGINE_COMMANDS = ("generate", "serve", "windows")

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_ENGINE_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_CANARY_DEFAULTS = {field.name: field.default for field in fields(CanaryConfig)}


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar=JSON,
    allow_from_autoenv=False,
    show_envvar=True,
    help="Print one JSON object, nothing else.",
)


reenact_option = click.option(
    "--reenact",
    envvar=REENACT,
    allow_from_autoenv=False,
    show_envvar=True,
    metavar="NAME",
    help="Bring back one published bug, to see which check stops it; kvcanary faults lists the names.",
)


class Whole(click.ParamType):
    """A text that an environment variable holds whole: it is not cut at blanks."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


class Setting(click.ParamType):
    """Text of a field of `CanaryConfig`, read as it is in the environment."""

    def __init__(self, field: str) -> None:
        self.name, self._parse = field, PARSERS[field]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TokenBias(click.ParamType):
    """ID=VALUE, such as 42=-1.5 or 42=-inf: a token id and what is added to its logit."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"a bias must be ID=VALUE such as 42=-1.5, got {value!r}", param, ctx)


def engine_options(function: AnyFunction) -> AnyFunction:
    """Model, drafting, memory and canary options, in this order in --help."""
    for decorate in reversed([*_model_options(), *_canary_options()]):
        function = decorate(function)
    return function


def sampling_options(function: AnyFunction) -> AnyFunction:
    # The defaults are SamplingParams', which cannot be imported here without torch; a test compares them.
    options = [
        _option("--max-new-tokens", type=int, default=64, metavar="N", help="Most tokens to generate for a prompt."),
        _option(
            "--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token; above 0 samples."
        ),
        _option(
            "--sample-top-k", type=int, default=0, metavar="K", help="Sample from the K likeliest tokens; 0: from all."
        ),
        _option(
            "--sample-top-p",
            type=float,
            default=1.0,
            metavar="P",
            help="Sample from the likeliest tokens of total probability P.",
        ),
        _option(
            "--sample-min-p",
            type=float,
            default=0.0,
            metavar="P",
            help="Sample from tokens of at least P times the likeliest's probability.",
        ),
        _option("--seed", type=int, default=0, metavar="S", help="Seed of the sampling."),
        _option(
            "--repetition-penalty",
            type=float,
            default=1.0,
            metavar="X",
            help="Divides the positive logits of tokens of prompt and output, multiplies the negative ones.",
        ),
        _option(
            "--presence-penalty",
            type=float,
            default=0.0,
            metavar="X",
            help="Subtracted from the logit of each token in the output.",
        ),
        _option(
            "--frequency-penalty",
            type=float,
            default=0.0,
            metavar="X",
            help="Subtracted once for each time a token is in the output.",
        ),
        _option(
            "--logit-bias",
            type=TokenBias(),
            multiple=True,
            metavar="ID=VALUE",
            help="Added to a token's logit; may be given several times.",
        ),
        _option(
            "--stop", type=Whole(), multiple=True, metavar="TEXT", help="Ends the text; may be given several times."
        ),
        _option(
            "--stop-token-id",
            type=int,
            multiple=True,
            metavar="ID",
            help="Ends the text, as EOS does; may be given several times.",
        ),
        _option(
            "--logprobs",
            type=int,
            metavar="N",
            help="With --json: each token's log-probability, and the N likeliest beside it.",
        ),
    ]
    for decorate in reversed(options):
        function = decorate(function)
    return function


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The engine's settings out of a command's options; a usage failure when they are refused."""
    _expect_known_variables()
    settings = {name: options[name] for name in _ENGINE_DEFAULTS if name in options}
    with usage_failures():
        canary = CanaryConfig(
            mode=options["kv_canary"],
            content=options["kv_canary_content"],
            budget=options["kv_canary_budget"],
            seed=options["kv_canary_seed"],
            poison=options["kv_canary_poison"],
            quarantine=options["kv_canary_quarantine"],
            show_tokens=options["kv_canary_show_tokens"],
            disable=options["kv_canary_disable"],
            model=options["kv_canary_model"],
            ring=options["kv_canary_ring"],
            dump_dir=options["kv_canary_dump"],
            dump_content=options["kv_canary_dump_content"],
            share=options["kv_canary_share"],
        )
        if names := os.environ.get(variable("names"), "").strip():
            CanaryConfig(names=names, seed=0).expect_names_in_memory("this engine")
        config = EngineConfig(**settings, canary=canary)
    _expect_canary_for_its_options()
    if config.host_pages and config.new_token_ratio == 1 and not options.get("role"):
        console.say(
            f"kvcanary: host_pages {config.host_pages} will stay empty: with new_token_ratio 1 nobody is retracted; "
            "lower it, or leave host_pages out",
            fg="yellow",
        )
    return config


def _expect_canary_for_its_options() -> None:
    """UsageFailure where an option of the canary was typed and --kv-canary was not said: nothing would be checked."""
    context = click.get_current_context(silent=True)
    if context is None or context.get_parameter_source("kv_canary") is not ParameterSource.DEFAULT:
        return
    for name in context.params:
        typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if typed and name.startswith("kv_canary_"):
            option = f"--{name.replace('_', '-')}"
            raise UsageFailure(f"{option} needs a canary, got none", "add --kv-canary")


def _expect_known_variables() -> None:
    """UsageFailure for a SPEC_ENGINE_ variable that no command reads: what it was meant to set would stay unset."""
    context = click.get_current_context(silent=True)
    given = {name for name in os.environ if name.startswith(OF_THE_ENGINE)}
    if context is None or not given - _variables_of(context.command):
        return
    commands = [import_module(f"kvcanary_tools.commands.{name}").command for name in ENGINE_COMMANDS]
    known = frozenset().union(*map(_variables_of, commands))
    for name in sorted(given - known):
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "kvcanary generate --help lists the options"
        raise UsageFailure(f"{name} sets nothing", hint)


def _variables_of(command: click.Command) -> frozenset[str]:
    return frozenset(OF_THE_ENGINE + param.name.upper() for param in command.params if param.name)


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    from spec_engine import SamplingParams

    with usage_failures():
        return SamplingParams(
            max_new_tokens=options["max_new_tokens"],
            temperature=options["temperature"],
            top_k=options["sample_top_k"],
            top_p=options["sample_top_p"],
            min_p=options["sample_min_p"],
            seed=options["seed"],
            repetition_penalty=options["repetition_penalty"],
            presence_penalty=options["presence_penalty"],
            frequency_penalty=options["frequency_penalty"],
            logit_bias=dict(options["logit_bias"]),
            stop=options["stop"],
            stop_token_ids=options["stop_token_id"],
            logprobs=options["logprobs"],
        )


@contextmanager
def usage_failures() -> Iterator[None]:
    """Settings and prompts that engine or canary refuse become a sentence and a hint."""
    try:
        yield
    except ValueError as error:
        from spec_engine.models.config import CheckpointError

        if not isinstance(error, KVCanaryError | CheckpointError):
            raise
        command = click.get_current_context().command_path
        hint = getattr(error, "hint", None) or f"{command} --help lists the options and their defaults"
        raise UsageFailure(str(error), hint) from error


def expect_embedded_model() -> None:
    """UsageFailure where a command needs the embedded model, and it is not installed."""
    from spec_engine.models.embedded import embedded_model

    with usage_failures():
        embedded_model()


def _model_options() -> list[Callable[[AnyFunction], AnyFunction]]:
    return [
        _engine_option(
            "--model",
            metavar="embedded|DIR",
            help="The model that ships with kvcanary, or a folder with a llama-family checkpoint of Hugging Face.",
        ),
        _engine_option(
            "--draft",
            metavar="auto|eagle3|eagle|standalone|none",
            help="Which drafter; auto takes the best head that the model has.",
        ),
        _engine_option(
            "--draft-model",
            metavar="DIR",
            help="Folder of the draft head, if not the model's own, or of the small model that standalone needs.",
        ),
        _engine_option("--page-size", type=int, metavar="P", help="Tokens in a page (block) of the KV pools."),
        _engine_option("--topk", "--speculative-eagle-topk", type=int, metavar="K", help="Width of the draft tree."),
        _engine_option(
            "--num-steps", "--speculative-num-steps", type=int, metavar="T", help="Depth of the draft tree."
        ),
        _engine_option(
            "--num-draft-tokens",
            "--speculative-num-draft-tokens",
            type=int,
            metavar="N",
            help=f"Nodes that the target verifies, with the root; by default {DEFAULT_NODES}, or all of a chain.",
        ),
        _engine_option(
            "--acceptance",
            metavar="match|tree|rejection",
            help="How drafts are accepted when sampling: by equality, tree sampling, chain rejection sampling.",
        ),
        _engine_option(
            "--threshold-single",
            type=float,
            metavar="X",
            help="Tree sampling accepts every draft of at least this probability; 1 is exact.",
        ),
        _engine_option(
            "--threshold-acc",
            type=float,
            metavar="X",
            help="Tree sampling divides the probability of siblings by it; 1 is exact.",
        ),
        _engine_option(
            "--adaptive-steps",
            is_flag=True,
            help="Draft more steps where drafts are accepted and fewer where not, from --num-steps on; for --topk 1.",
        ),
        _engine_option(
            "--attend",
            metavar="ancestors|columns",
            help="What draft branches attend to: their exact ancestors, or an approximation, their own column.",
        ),
        _engine_option("--dtype", metavar="auto|float32|float64|bfloat16", help="Number type of weights and cache."),
        _engine_option(
            "--kv-cache-dtype",
            metavar="auto|fp8_e4m3",
            help="Number type of the cache: the model's, or 8-bit numbers with a scale for each row.",
        ),
        _engine_option("--device", metavar="DEVICE", help="Device, such as cpu or cuda."),
        _engine_option(
            "--attention-backend",
            metavar="NAME",
            help="Which kernels read the cache: torch, paged, block-table, dense, triton, triton-paged or flashinfer.",
        ),
        _engine_option(
            "--graphs",
            metavar="off|on",
            help="Run decode steps as CUDA graphs; on a CPU the same code without capture.",
        ),
        _engine_option(
            "--schedule",
            metavar="sync|overlap",
            help="overlap prepares the next step on the host while the device computes this one.",
        ),
        _engine_option("--max-total-tokens", type=int, metavar="N", help="Size of each KV pool, in tokens."),
        _engine_option(
            "--max-window-tokens",
            type=int,
            metavar="N",
            help="Size of the pool of sliding-window layers, in tokens; by default enough for all.",
        ),
        _engine_option(
            "--max-device-tokens",
            type=int,
            metavar="N",
            help="Tokens of the target's pool kept on the device, the rest in host memory; by default all.",
        ),
        _engine_option(
            "--device-turn",
            type=int,
            metavar="N",
            help="With --max-device-tokens: steps before waiting requests take their turn on the device.",
        ),
        _engine_option(
            "--new-token-ratio",
            type=float,
            metavar="X",
            help="Share of --max-new-tokens for which a request is admitted; below 1 more run, and some may be "
            "retracted for want of pages and resume later.",
        ),
        _engine_option(
            "--host-pages",
            type=int,
            metavar="N",
            help="Pages of host memory for what retracted requests had computed, and for handovers; 0: none. Needs "
            "--new-token-ratio below 1, or --role.",
        ),
        _engine_option("--max-running-requests", type=int, metavar="N", help="Most requests that run at a time."),
        _engine_option(
            "--context-length",
            type=int,
            metavar="N",
            help="Longest prompt plus output; by default what the model was made for.",
        ),
    ]


def _canary_options() -> list[Callable[[AnyFunction], AnyFunction]]:
    return [
        _canary_option(
            "--kv-canary",
            field="mode",
            is_flag=False,
            flag_value="raise",
            default="off",
            metavar="[off|log|raise|abort|heal]",
            help="What a finding does; without a value: raise.",
        ),
        _canary_option(
            "--kv-canary-content",
            metavar="write|rolling|full",
            help="When K and V bytes are read again: never, some in each step, or all in every forward.",
        ),
        _canary_option(
            "--kv-canary-budget",
            metavar="BYTES",
            help="What rolling reads again in a step, such as 64KiB; by default enough to read all in 128 steps.",
        ),
        _canary_option(
            "--kv-canary-seed",
            metavar="S",
            help="Seed of the fingerprints' keys; by default random and secret.",
        ),
        _canary_option(
            "--kv-canary-poison",
            metavar="finite|nan|off",
            help="What freed pages are filled with; they are compared with it before they are used again.",
        ),
        _canary_option(
            "--kv-canary-quarantine",
            metavar="STEPS",
            help="Steps that a freed page waits before it is used again.",
        ),
        _canary_option(
            "--kv-canary-ring",
            metavar="STEPS",
            help="Steps that the flight recorder keeps, in at most 64 MB; 0: none.",
        ),
        _canary_option(
            "--kv-canary-disable",
            default="",
            show_default=False,
            metavar="CODES",
            help="Checks to leave out, such as T1,R5; kvcanary codes lists them.",
        ),
        _canary_option(
            "--kv-canary-model",
            show_default=False,
            metavar="NAME",
            help="What seals say of the model and its weights; a seal of another model is refused.",
        ),
        _canary_option(
            "--kv-canary-share",
            type=float,
            metavar="SHARE",
            help="Of a fleet's workers that are watched at a time, by turns of a week: 0.05 is 5 %.",
        ),
        _canary_option(
            "--kv-canary-dump",
            field="dump_dir",
            type=OutFolder(),
            metavar="DIR",
            help="Where a finding, or SIGUSR1, writes a dump of the recorded steps.",
        ),
        _canary_option(
            "--kv-canary-dump-content",
            is_flag=True,
            help="Dumps contain the real token ids, and the bytes of the slots that findings name.",
        ),
        _canary_option(
            "--kv-canary-show-tokens",
            is_flag=True,
            help="Token ids may appear in findings and reports.",
        ),
    ]


def _engine_option(*names: str, **settings: Any) -> Callable[[AnyFunction], AnyFunction]:
    return _option(*names, default=_ENGINE_DEFAULTS[_python_name(names[0])], **settings)


def _canary_option(name: str, field: str = "", **settings: Any) -> Callable[[AnyFunction], AnyFunction]:
    field = field or _python_name(name).removeprefix("kv_canary_")
    own = {"default": _CANARY_DEFAULTS[field], "envvar": variable(field), "show_envvar": True}
    if not settings.get("is_flag"):
        own["type"] = Setting(field)
    return _option(name, **{**own, "allow_from_autoenv": False, **settings})


def _option(*names: str, **settings: Any) -> Callable[[AnyFunction], AnyFunction]:
    # The first name decides what the parameter, and so the environment variable, is called.
    return click.option(*names, _python_name(names[0]), **{"show_default": True, **settings})


def _python_name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
