"""What holds for every command: help without torch, sentences with hints, exit codes, streams, colours."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import click
import pytest

from kvcanary_tools import cli, console

COMMANDS = list(cli.COMMANDS)


def test_bare_call_shows_a_working_example(kvcanary) -> None:
    """`kvcanary` alone is no error: each command once, by what it is for, and a line to copy."""
    result = kvcanary()
    assert result.exit_code == 0
    assert cli.EXAMPLE in result.stdout
    listed = re.findall(r"^  ([a-z][a-z-]+)  +\S", result.stdout, re.MULTILINE)
    assert listed == COMMANDS
    assert re.findall(r"^(\w+):$", result.stdout, re.MULTILINE) == ["Options", *cli.TASKS]
    assert result.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_each_command(kvcanary, command: str) -> None:
    """Every command has a help text with its exit codes."""
    result = kvcanary(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: kvcanary {command}" in result.stdout
    assert "Exit codes: 0" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_of_one_style(kvcanary, command: str) -> None:
    """Every command shows a line to copy; every option says what it is, and in which unit its value counts."""
    shown = kvcanary(command, "--help").stdout
    assert f"\n    kvcanary {command}" in shown or f"\n    KVCANARY_API_KEY=KEY kvcanary {command}" in shown
    loaded = cli.main.get_command(click.Context(cli.main), command)
    for option in loaded.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert option.is_flag or option.metavar or isinstance(option.type, click.Choice), option.name


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)], ids=["bare", *COMMANDS])
def test_help_loads_no_torch(arguments: list[str]) -> None:
    """Help comes at once: no command imports torch before it runs."""
    script = (
        "import sys\n"
        "from kvcanary_tools.cli import main\n"
        f"main({[*arguments, '--help']!r}, standalone_mode=False)\n"
        "print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)), file=sys.stderr)\n"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stderr.strip() == "[]"


@pytest.mark.parametrize("arguments", ["top URL --once", "inject bits.flip --url URL"])
def test_what_asks_a_server_loads_no_torch(arguments: str) -> None:
    """Whoever only talks to one answers in a fraction of a second."""
    script = (
        "import sys\n"
        "from kvcanary_tools.cli import main\n"
        "from kvcanary_tools.console import UsageFailure\n"
        "try:\n"
        f"    main({arguments.replace('URL', 'http://127.0.0.1:1').split()!r}, standalone_mode=False)\n"
        "except UsageFailure as refused:\n"
        "    print(refused)\n"
        "print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))\n"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    refused, loaded = child.stdout.splitlines()[-2:]
    assert "127.0.0.1:1" in refused
    assert loaded == "[]"


def test_version_is_shown(kvcanary) -> None:
    """`--version` names program and version."""
    assert kvcanary("--version").stdout == "kvcanary 0.2.0\n"


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (["nonsense"], "no such command 'nonsense'", "kvcanary --help lists what there is"),
        (["genrate"], "no such command 'genrate'", "did you mean generate?"),
        (
            ["soak", "--minutes", "x"],
            "invalid value for '--minutes': 'x' is not a valid float",
            "kvcanary soak --help lists what there is",
        ),
        (
            ["inject", "--runs", "x"],
            "invalid value for '--runs': 'x' is not a valid integer",
            "kvcanary inject --help lists what there is",
        ),
        (["demo", "--tpk"], "no such option: --tpk", "kvcanary demo --help lists what there is"),
        (["generate", "--tpk", "2"], "no such option: --tpk", "did you mean --dtype or --stop or --topk?"),
        (
            ["generate", "--page-size", "x"],
            "invalid value for '--page-size': 'x' is not a valid integer",
            "kvcanary generate --help lists what there is",
        ),
    ],
)
def test_wrong_usage_ends_with_sentence_and_hint(kvcanary, arguments: list[str], sentence: str, hint: str) -> None:
    """What was wrong, a blank line, what to do; exit code 2, nothing on stdout."""
    result = kvcanary(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"kvcanary: {sentence}\n\nhint: {hint}\n"


@pytest.mark.parametrize("command", ["demo", "doctor", "soak"])
def test_a_fault_that_the_environment_misnames_is_wrong_usage(kvcanary, monkeypatch, command: str) -> None:
    """KVCANARY_REENACT is what an engine reads when it starts; a name that nobody knows is told before, with a hint."""
    monkeypatch.setenv("KVCANARY_REENACT", "bits.flop")
    result = kvcanary(command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "KVCANARY_REENACT: fault must be one of the catalogue, got 'bits.flop': did you mean bits.f" in result.stderr
    assert result.stderr.endswith("hint: kvcanary faults lists them all\n")


@pytest.mark.parametrize("command", [("inject", "bits.flip"), ("soak",), ("faults", "show", "bits.flip")])
def test_no_fault_is_armed_in_twins(kvcanary, monkeypatch, command: tuple[str, ...]) -> None:
    """What the environment re-enacts would be in every engine of a campaign, and in the run that must be without it."""
    monkeypatch.setenv("KVCANARY_REENACT", "draft.parents_dtype")
    result = kvcanary(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "kvcanary: KVCANARY_REENACT would arm draft.parents_dtype in every engine, also in those that must be without "
        "a fault\n\nhint: unset KVCANARY_REENACT; this command makes the faults that it is given\n"
    )


def test_internal_error_is_no_finding(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of our own ends with 3 and its traceback, so that no script takes it for corruption."""

    def fail() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("kvcanary_tools.health.sections", fail)
    result = kvcanary("doctor")
    assert result.exit_code == 3
    assert "kvcanary: internal error: boom" in result.stderr
    assert "Traceback" in result.stderr
    assert "hint: this is a bug in kvcanary, not a finding" in result.stderr


def test_interruption_is_quiet(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C gives one line and the exit code that shells expect."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcanary_tools.health.sections", interrupt)
    result = kvcanary("doctor")
    assert result.exit_code == 130
    assert result.stderr.strip() == "kvcanary: interrupted"


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["doctor", "--json"]], ids=" ".join)
def test_closed_pipe_is_quiet(arguments: list[str]) -> None:
    """When the reader has gone, as `head` does, nothing is said, and the code is not a finding's."""
    command = [sys.executable, "-m", "kvcanary_tools", *arguments]
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (child.returncode, child.stderr) == (141, "")


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_respect_no_color(kvcanary, monkeypatch: pytest.MonkeyPatch, no_color: str, coloured: bool) -> None:
    """On a terminal errors are red; NO_COLOR switches that off, and an empty NO_COLOR does not."""
    monkeypatch.setenv("NO_COLOR", no_color)
    result = kvcanary("nonsense", color=True)
    assert ("\x1b[31m" in result.stderr) is coloured


def test_no_colours_without_a_terminal(kvcanary_process) -> None:
    """A pipe gets plain text."""
    child = kvcanary_process("nonsense")
    assert child.returncode == 2
    assert "\x1b" not in child.stdout + child.stderr


def test_size_reads_well() -> None:
    """Bytes are shown in powers of 1000 with one digit."""
    assert [console.size(n) for n in (0, 999, 1000, 3_400_000, 5 * 10**12)] == [
        "0 B", "999 B", "1.0 kB", "3.4 MB", "5000.0 GB",
    ]  # fmt: skip


def test_usage_failure_carries_its_hint() -> None:
    """The exception holds sentence and hint as data."""
    failure = console.UsageFailure("no", "yes")
    assert isinstance(failure, click.ClickException)
    assert (failure.message, failure.hint, failure.exit_code) == ("no", "yes", 2)


def test_a_sentence_that_begins_with_a_name_keeps_it(kvcanary, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Click's sentences begin in lower case here, names of files stay what they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("no dump")
    assert kvcanary("inspect", "README.md").stderr.startswith("kvcanary: README.md is damaged")
