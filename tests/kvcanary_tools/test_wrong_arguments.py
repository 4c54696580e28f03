"""Every wrong argument of every command: one sentence, a hint, exit code 2, nothing on stdout, nothing run."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from kvcanary_tools import cli

#: Options of which every text is a right value as far as a command can know.
FREE = {"--prompt", "--stop", "--model-name", "--api-key", "--debug-host", "--pool", "--kv-canary-model"}
#: Numbers that may be negative.
SIGNED = {"--seed", "--presence-penalty", "--frequency-penalty"}
NUMBERS = ("integer", "float", "integer range", "float range")
IN_A_FILE = f"{__file__}/x"  # neither a file nor a folder can be made there
#: What a command wants before it looks at an option's value.
BEFORE = {"generate": ["--prompt", "x"], "windows": ["--prompt", "1"]}
SENTENCE_AND_HINT = re.compile(r"kvcanary: [^\n]+[^\n.]\n\nhint: [^\n]+\n")


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with the words that call it."""
    context = click.Context(cli.main)
    for name in cli.COMMANDS:
        command = cli.main.get_command(context, name)
        yield name, command
        for inner, own in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", own


COMMANDS = dict(commands())


def wrong_arguments(command: click.Command) -> Iterator[list[str]]:
    """One of an option that is not there, of too many words, of each option without a value, and with wrong ones."""
    yield ["--no-such-option"]
    yield ["no/such/thing"] * 9
    for option in (param for param in command.params if isinstance(param, click.Option)):
        name = option.opts[0]
        if option.is_flag:
            yield [f"{name}=x"]
        elif not option._flag_needs_value:  # as --kv-canary does, which alone means raise
            yield [name]
        yield from ([name, value] for value in wrong_values(option))


def wrong_values(option: click.Option) -> Iterator[str]:
    """Values that an option of this type and name cannot take."""
    if option.is_flag or option.opts[0] in FREE:
        return
    if option.type.name in NUMBERS:
        yield "x"
        yield from [] if option.opts[0] in SIGNED else ["-7"]
    else:
        yield IN_A_FILE


@pytest.mark.parametrize("words", COMMANDS)
def test_a_wrong_argument_has_a_sentence_and_a_hint(kvcanary, words: str) -> None:
    """Also of options that come later: nothing is asked of a user but to read two lines."""
    wrong = [[*BEFORE.get(words, []), *arguments] for arguments in wrong_arguments(COMMANDS[words])]
    answers = [(arguments, kvcanary(*words.split(), *arguments)) for arguments in wrong]
    assert len(answers) >= 2
    assert [
        (arguments, result.exit_code, result.stdout[:80], result.stderr)
        for arguments, result in answers
        if (result.exit_code, result.stdout) != (2, "") or not SENTENCE_AND_HINT.fullmatch(result.stderr)
    ] == []


@pytest.mark.parametrize("words", [name for name, own in COMMANDS.items() if any(p.required for p in own.params)])
def test_a_missing_argument_is_named(kvcanary, words: str) -> None:
    """`kvcanary explain` alone says what it wants."""
    result = kvcanary(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.match(r"kvcanary: missing argument '[\w.\[\]]+'\n\nhint: kvcanary ", result.stderr), result.stderr
