"""`kvcanary demo`: tree drafting on real code with the canary on, then two faults that it must find."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from kvcanary_tools import console
from kvcanary_tools.engine_options import CONTEXT, expect_embedded_model, json_option

if TYPE_CHECKING:
    from kvcanary_tools.runs.demonstration import Comparison, Outcome
    from kvcanary_tools.runs.generation import Completion
    from spec_engine import TokenEvent

NUM_PROMPTS = 6
NUM_TOKENS = 96
PROMPT_LINES = 4


@click.command("demo", context_settings=CONTEXT, short_help="See the engine draft and the canary catch two faults.")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """See the engine draft and the canary watch, then see two faults found and named, in half a minute.

    Completes code that the embedded model has never seen, with tree drafting and the canary on; measures the speed
    against no drafting; then flips one bit of one V row in mid-run, and then swaps two page-table entries.

    \b
      kvcanary demo
      kvcanary demo --json

    Exit codes: 0 the clean part was clean and both faults were found and named, 1 otherwise, 2 wrong usage.
    """
    from kvcanary_tools.runs.demonstration import as_dict, one_thread

    expect_embedded_model()
    console.log_to_stderr(logging.CRITICAL)  # what the events would tell, the reports tell
    show = console.say if as_json else console.data
    with one_thread():
        comparison, outcomes = _perform(show)
    clean = comparison.drafted.report is None and not comparison.drafted.findings
    passed = clean and all(outcome.caught for outcome in outcomes.values())
    show("The clean part was clean, both faults were found and named." if passed else "This is not what should be.")
    if as_json:
        console.data_json({**as_dict(comparison, outcomes), "passed": passed})
    ctx.exit(console.EXIT_CLEAN if passed else console.EXIT_FINDING)


def _perform(show: Callable[..., None]) -> tuple[Comparison, dict[str, Outcome]]:
    from kvcanary_tools.runs import demonstration
    from spec_engine.models.embedded import load_excerpts

    show(f"1. {NUM_PROMPTS} pieces of held-out code, {NUM_TOKENS} tokens each, tree drafting, canary on\n")
    files = {excerpt.prompt: excerpt.file for excerpt in load_excerpts()[:NUM_PROMPTS]}
    prompts = list(files)
    comparison = demonstration.compare(prompts, NUM_TOKENS, _Live(show, files))
    _show_comparison(comparison, show)
    outcomes = {}
    faults = {"bit flip": demonstration.flip_bit, "page swap": demonstration.swap_pages}
    for number, (name, fault) in enumerate(faults.items(), start=2):
        outcomes[name] = demonstration.strike(prompts[0], NUM_TOKENS, fault)
        _show_outcome(number, outcomes[name], show)
    return comparison, outcomes


class _Live:
    """The end of each prompt behind |, then the completion behind >, as it comes."""

    def __init__(self, show: Callable[..., None], files: dict[str, str]) -> None:
        self.show = show
        self.files = files
        self.current: Completion | None = None

    def __call__(self, completion: Completion, event: TokenEvent) -> None:
        if completion is not self.current:
            self.current = completion
            self.show(f"   held out: {self.files[completion.prompt]}")
            for line in completion.prompt.splitlines()[-PROMPT_LINES:]:
                self.show(f"   | {line}", dim=True)
            self.show("   > ", newline=False)
        self.show(event.text.replace("\n", "\n   > "), newline=False, fg="green")
        if event.finished:
            self.show("\n")


def _show_comparison(comparison: Comparison, show: Callable[..., None]) -> None:
    from kvcanary_tools.certificate import certificate_lines

    drafted, plain = comparison.drafted, comparison.plain
    show(f"accepted length  {drafted.accepted_length:.2f} tokens a target forward")
    speeds = f"{drafted.tokens_per_second:.0f} tokens/s with drafting, {plain.tokens_per_second:.0f} without"
    show(f"speed            {speeds}: {comparison.speedup:.2f} x")
    show(f"same tokens      {comparison.num_equal} of {len(plain.completions)} prompts, with and without drafting")
    if drafted.certificate is not None:
        for number, line in enumerate(certificate_lines(drafted.certificate)):
            show(f"{'' if number else 'certificate':<15}  {line}")
    if drafted.report is not None:
        show(drafted.report.text(), fg="red")
    show()


def _show_outcome(number: int, outcome: Outcome, show: Callable[..., None]) -> None:
    show(f"{number}. {outcome.damage.what}\n")
    if outcome.report is None:
        show(f"NOT FOUND: {console.numbered(outcome.tokens_leaked, 'token')} left after it\n", fg="red")
        return
    show(outcome.report.text(), fg="yellow")
    verdict = "found and named" if outcome.named else f"found, but not as {outcome.damage.code} at its place"
    show(f"\n{verdict}; {console.numbered(outcome.tokens_leaked, 'token')} left after it\n")
