"""`kvcanary generate`: complete prompts, and say what the canary saw."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcanary_tools import console
from kvcanary_tools.cli import EXAMPLE
from kvcanary_tools.console import UsageFailure
from kvcanary_tools.engine_options import (
    ENGINE_CONTEXT,
    Whole,
    engine_config,
    engine_options,
    json_option,
    reenact_option,
    sampling_options,
    sampling_params,
    usage_failures,
)
from kvcanary_tools.files import OutFile

if TYPE_CHECKING:
    from kvcanary_tools.runs.generation import Completion, Generation
    from spec_engine import Engine, TokenEvent
    from spec_engine.memory.sizes import Sizes


@click.command("generate", context_settings=ENGINE_CONTEXT, short_help="Complete prompts.")
@click.option(
    "--prompt",
    type=Whole(),
    multiple=True,
    metavar="TEXT",
    help="Text to complete; may be given several times.",
)
@click.option(
    "--prompt-file",
    multiple=True,
    metavar="FILE...",
    help="Files to complete, each one prompt, whole; - reads stdin.",
)
@click.argument("more_files", nargs=-1, metavar="")
@click.option(
    "--dump",
    type=OutFile(),
    metavar="FILE",
    help="Write a dump of the recorded steps at the end, for kvcanary diff and timeline.",
)
@engine_options
@sampling_options
@reenact_option
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, **options: Any) -> None:
    """Complete prompts with tree drafting; --kv-canary checks every KV read and write while it does.

    \b
      kvcanary generate --prompt 'def fibonacci(n):' --max-new-tokens 48 --kv-canary
      kvcanary generate --prompt-file *.py --json

    The text goes to stdout as it comes, everything else to stderr. Every option can be given in the environment
    too: the canary's as KVCANARY_MODE=log, KVCANARY_CONTENT=full, the others as SPEC_ENGINE_PAGE_SIZE=4.

    A prompt that is refused, being empty or too long, does not stop the others.

    Exit codes: 0 clean, 1 the canary found a violation, 2 wrong usage or a refused prompt, 3 kvcanary itself failed.
    """
    prompts = _read_prompts(options["prompt"], options["prompt_file"], options["more_files"])
    config, params = engine_config(options), sampling_params(options)
    if options["dump"] is not None and not (config.canary.enabled and config.canary.ring):
        raise UsageFailure("--dump needs a canary that records, got none", "add --kv-canary, and leave its ring")

    from kvcanary_tools.runs.generation import generate
    from kvcanary_tools.runs.reenactment import reenacting
    from spec_engine import Engine

    console.log_to_stderr()
    printer = _Printer(len(prompts))
    with usage_failures(), reenacting(options["reenact"], as_json) as reenacted:
        engine = Engine(config)
        reenacted.watch(engine)
        console.say(_sizes_line(engine.sizes))
        generation = generate(engine, prompts, params, None if as_json else printer)
        if options["dump"] is not None:
            _dump(engine, options["dump"])
    if as_json:
        console.data_json(generation.as_dict())
    else:
        printer.end(generation)
        _summarise(generation)
    _say_refused(generation)
    ctx.exit(_exit_code(generation))


def _dump(engine: Engine, path: Path) -> None:
    try:
        engine.canary.dump(path)
    except OSError as error:
        raise UsageFailure(f"{path} cannot be written: {error.strerror}", "name a file in a folder of yours") from error


def _read_prompts(prompts: tuple[str, ...], files: tuple[str, ...], more_files: tuple[str, ...]) -> list[str]:
    """The texts of --prompt, then of --prompt-file; a shell that expands *.py leaves all but one file behind it."""
    if more_files and not files:
        raise UsageFailure(f"generate takes options, got the bare word {more_files[0]!r}", EXAMPLE)
    texts = [*prompts, *(_read_file(name) for name in (*files, *more_files))]
    if not texts:
        raise UsageFailure("generate needs a prompt: --prompt TEXT or --prompt-file FILE", EXAMPLE)
    return texts


def _read_file(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageFailure(
            f"cannot read the prompt file {name!r}: {error.strerror}", "give a text file, or - for stdin"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageFailure(f"cannot read the prompt file {name!r}: it is not UTF-8 text", "give a text file") from error


def _sizes_line(sizes: Sizes) -> str:
    """What an operator wants to know at the start: row width, and the bytes of pools, table and canary."""
    pools = ", ".join(f"{name} pool {console.size(count)}" for name, count in sizes.pool_bytes.items())
    host = f", host {console.size(sizes.host_bytes)}" if sizes.host_bytes else ""
    return (
        f"{sizes.num_rows} rows of {sizes.row_width} columns (context {sizes.context_length}, "
        f"reserve {sizes.reserve}), {sizes.num_pages} pages of {sizes.page_size} slots: {pools}{host}, "
        f"table {console.size(sizes.table_bytes)}, canary {console.size(sizes.canary_bytes)}"
    )


class _Printer:
    """Text to stdout: as it comes when there is one prompt, under a heading as each completes when there are more."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts

    def __call__(self, completion: Completion, event: TokenEvent) -> None:
        if self.num_prompts == 1:
            console.data(event.text, newline=False)
        elif completion.finish_reason:
            self._whole(completion)

    def end(self, generation: Generation) -> None:
        """What a finding stopped is shown as far as it came."""
        if self.num_prompts == 1:
            if not generation.refusals:
                console.data("")
            return
        for completion in generation.completions:
            if completion.finish_reason == "kv_corruption":
                self._whole(completion)

    def _whole(self, completion: Completion) -> None:
        first_line = completion.prompt.lstrip().partition("\n")[0]
        console.data(f"=== {completion.request_id} ({completion.finish_reason}): {first_line[:60]}")
        console.data(completion.text)


def _say_refused(generation: Generation) -> None:
    """A sentence for each refused prompt, then the hints."""
    many = len(generation.completions) > 1
    for number, completion in enumerate(generation.completions, 1):
        if completion.error is not None:
            which = f"prompt {number} of {len(generation.completions)} is refused: " if many else ""
            console.say(f"kvcanary: {which}{completion.error}", fg="red")
    hints = dict.fromkeys(error.hint for error in generation.refusals if error.hint)
    if hints:
        console.say()
    for hint in hints:
        console.say(f"hint: {hint}")


def _exit_code(generation: Generation) -> int:
    if generation.findings:
        return console.EXIT_FINDING
    return console.EXIT_USAGE if generation.refusals else console.EXIT_CLEAN


def _summarise(generation: Generation) -> None:
    from kvcanary_tools.certificate import certificate_line

    if len(generation.refusals) == len(generation.completions):
        return
    console.say()
    if generation.report is not None:
        console.say(generation.report.text())
        console.say()
    tokens = console.numbered(generation.num_tokens, "token")
    console.say(
        f"{tokens}, accepted length {generation.accepted_length:.2f}, {generation.tokens_per_second:.0f} tokens/s"
    )
    if generation.adaptive is not None:
        batches = sorted(generation.adaptive.batches.items())
        chosen = ", ".join(f"{steps} in {console.numbered(count, 'step')}" for steps, count in batches)
        console.say(f"drafts by step: {chosen}, {console.numbered(generation.adaptive.switches, 'change')}")
    if generation.num_retractions:
        restored = console.numbered(generation.restored_tokens, "token")
        retractions = console.numbered(generation.num_retractions, "retraction")
        console.say(f"{retractions} for want of pages, {restored} restored from the host")
    if generation.certificate is not None:
        console.say(certificate_line(generation.certificate))
