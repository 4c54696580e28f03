"""The command line's options are the settings of engine, sampling and canary: same names, same defaults."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import click
import pytest

from kvcanary import CanaryConfig
from kvcanary.environment import variable
from kvcanary_tools.commands.generate import command
from kvcanary_tools.engine_options import engine_config, sampling_params
from spec_engine import EngineConfig, SamplingParams


def options(*arguments: str) -> dict[str, object]:
    """What click makes of a command line of `generate`."""
    return dict(command.make_context("generate", list(arguments)).params)


# Every flag of the command line, as published; adding one means adding it here and to the documentation.
FLAGS = {
    *("--prompt", "--prompt-file", "--model", "--draft", "--draft-model", "--dtype", "--device", "--kv-cache-dtype"),
    *("--page-size", "--topk", "--num-steps", "--num-draft-tokens"),
    *("--speculative-eagle-topk", "--speculative-num-steps", "--speculative-num-draft-tokens"),
    *("--max-new-tokens", "--temperature", "--sample-top-k", "--sample-top-p", "--seed"),
    *("--sample-min-p", "--repetition-penalty", "--presence-penalty", "--frequency-penalty", "--logit-bias"),
    *("--stop", "--stop-token-id", "--logprobs", "--acceptance", "--threshold-single", "--threshold-acc"),
    *("--adaptive-steps", "--attend", "--attention-backend", "--graphs", "--schedule", "--max-total-tokens"),
    *("--max-running-requests", "--context-length", "--host-pages", "--max-window-tokens", "--max-device-tokens"),
    *("--device-turn", "--new-token-ratio"),
    *("--kv-canary", "--kv-canary-content", "--kv-canary-budget", "--kv-canary-seed"),
    *("--kv-canary-poison", "--kv-canary-quarantine", "--kv-canary-show-tokens"),
    *("--kv-canary-ring", "--kv-canary-dump", "--kv-canary-dump-content", "--kv-canary-disable", "--kv-canary-model"),
    "--kv-canary-share",
    *("--reenact", "--dump", "--json"),
}


def test_generate_has_exactly_the_published_flags() -> None:
    """Scripts lean on these names."""
    assert {name for param in command.params if isinstance(param, click.Option) for name in param.opts} == FLAGS


def test_no_options_give_the_defaults() -> None:
    """Without options the engine is EngineConfig() with the canary off, the sampling SamplingParams()."""
    made = engine_config(options())
    assert made.canary == CanaryConfig(mode="off")
    for field in fields(EngineConfig):
        assert getattr(made, field.name) == getattr(EngineConfig(), field.name), field.name
    assert sampling_params(options()) == SamplingParams()


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [([], "off"), (["--kv-canary"], "raise"), (["--kv-canary", "log"], "log"), (["--kv-canary=raise"], "raise")],
)
def test_kv_canary_alone_means_raise(arguments: list[str], mode: str) -> None:
    """The bare switch is the strict one, also in front of another option."""
    assert engine_config(options(*arguments)).canary.mode == mode
    assert engine_config(options(*arguments, "--page-size", "4")).canary.mode == mode


def test_canary_options_reach_the_canary() -> None:
    """Content, budget and seed are handed on; a budget may be written with a unit."""
    made = engine_config(
        options(
            "--kv-canary",
            "--kv-canary-content",
            "full",
            "--kv-canary-budget",
            "64KiB",
            "--kv-canary-seed",
            "7",
            "--kv-canary-share",
            "0.05",
        )
    )
    assert made.canary == CanaryConfig(mode="raise", content="full", budget=65536, seed=7, share=0.05)
    made = engine_config(
        options("--kv-canary", "--kv-canary-ring", "64", "--kv-canary-dump", "dumps", "--kv-canary-dump-content")
    )
    assert made.canary == CanaryConfig(ring=64, dump_dir="dumps", dump_content=True)
    made = engine_config(options("--kv-canary", "LOG", "--kv-canary-disable", "t1,R5", "--kv-canary-model", "m@7"))
    assert made.canary == CanaryConfig("log", disable=frozenset({"T1", "R5"}), model="m@7")


def test_dumps_go_into_a_folder(tmp_path: Path) -> None:
    """A file of that name is refused when the options are read, not when the first finding wants to write."""
    (tmp_path / "dumps").touch()
    with pytest.raises(click.BadParameter, match="is a file"):
        options("--kv-canary", "--kv-canary-dump", str(tmp_path / "dumps"))


@pytest.mark.parametrize(
    ("ours", "alias", "name"),
    [
        ("--topk", "--speculative-eagle-topk", "topk"),
        ("--num-steps", "--speculative-num-steps", "num_steps"),
        ("--num-draft-tokens", "--speculative-num-draft-tokens", "num_draft_tokens"),
    ],
)
def test_aliases_mean_the_same(ours: str, alias: str, name: str) -> None:
    """The names that other engines use for the draft tree work here."""
    assert getattr(engine_config(options(ours, "3")), name) == getattr(engine_config(options(alias, "3")), name) == 3


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("SPEC_ENGINE_PAGE_SIZE", "4", lambda made, _: made.page_size == 4),
        ("SPEC_ENGINE_TOPK", "2", lambda made, _: made.topk == 2),
        ("KVCANARY_MODE", "log", lambda made, _: made.canary.mode == "log"),
        ("KVCANARY_SEED", "9", lambda made, _: made.canary.seed == 9),
        ("SPEC_ENGINE_SEED", "9", lambda _, params: params.seed == 9),
        ("SPEC_ENGINE_SAMPLE_TOP_P", "0.5", lambda _, params: params.top_p == 0.5),
    ],
)
def test_environment_gives_options(monkeypatch: pytest.MonkeyPatch, name: str, value: str, read) -> None:
    """SPEC_ENGINE_<NAME> stands for --name; the canary's settings have the names that they have at every door."""
    assert not read(engine_config(options()), sampling_params(options()))
    monkeypatch.setenv(name, value)
    assert read(engine_config(options()), sampling_params(options()))


def test_names_of_other_processes_are_refused(kvcanary, monkeypatch: pytest.MonkeyPatch) -> None:
    """This engine has no connector whose loads could be compared: the setting would do nothing in silence."""
    monkeypatch.setenv("KVCANARY_NAMES", "memory")
    assert engine_config(options()).canary.names == "memory"
    monkeypatch.setenv("KVCANARY_NAMES", "file:/tier/names")
    result = kvcanary("generate", "--prompt", "x")
    assert result.exit_code == 2
    assert "names must be memory for this engine, got file:/tier/names" in result.stderr


def test_every_setting_of_the_canary_is_an_option_under_its_variable() -> None:
    """What a plug-in reads from the environment, the commands read under the same name, and under no other.

    But for `names`: the commands have no connector.
    """
    shown = [param for param in command.params if isinstance(param, click.Option)]
    variables = {param.name: (param.envvar, param.allow_from_autoenv) for param in shown}
    of_canary = {own for name, own in variables.items() if name.startswith("kv_canary")}
    assert of_canary == {(variable(field.name), False) for field in fields(CanaryConfig) if field.name != "names"}


@pytest.mark.parametrize(
    ("name", "sentence", "hint"),
    [
        ("KVCANARY_KV_CANARY", "KVCANARY_KV_CANARY sets nothing: it is KVCANARY_MODE now", "kvcanary --help has"),
        ("KVCANARY_TOPK", "unset it, or say SPEC_ENGINE_TOPK where it is an option", "kvcanary --help has"),
        ("SPEC_ENGINE_PAGESIZE", "SPEC_ENGINE_PAGESIZE sets nothing", "did you mean SPEC_ENGINE_PAGE_SIZE?"),
    ],
)
def test_variables_that_set_nothing_are_refused(kvcanary, monkeypatch, name: str, sentence: str, hint: str) -> None:
    """A sentence, the name that was meant, exit code 2, before an engine starts; options of other commands pass."""
    monkeypatch.setenv(name, "log")
    monkeypatch.setenv("SPEC_ENGINE_PORT", "0")
    result = kvcanary("generate", "--prompt", "x")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert f"hint: {hint}" in result.stderr
    assert "SPEC_ENGINE_PORT" not in result.stderr


def test_sampling_options_reach_the_parameters() -> None:
    """Each option of the draws and of the end sets its own field, and what may be given again adds up."""
    given = options(
        *("--sample-min-p", "0.1", "--repetition-penalty", "1.2", "--presence-penalty", "0.3"),
        *("--frequency-penalty", "0.4", "--logit-bias", "5=-inf", "--logit-bias", "6=1.5"),
        *("--stop", "a b", "--stop", "\n", "--stop-token-id", "7", "--stop-token-id", "8", "--logprobs", "2"),
    )
    assert sampling_params(given) == SamplingParams(
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={5: float("-inf"), 6: 1.5},
        stop=("a b", "\n"),
        stop_token_ids=(7, 8),
        logprobs=2,
    )


def test_acceptance_options_reach_the_engine() -> None:
    """The rule and both of its thresholds are handed on."""
    made = engine_config(options("--acceptance", "tree", "--threshold-single", "0.9", "--threshold-acc", "0.8"))
    assert (made.acceptance, made.threshold_single, made.threshold_acc) == ("tree", 0.9, 0.8)


def test_command_line_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is typed counts more than what is set."""
    monkeypatch.setenv("SPEC_ENGINE_PAGE_SIZE", "4")
    assert engine_config(options("--page-size", "16")).page_size == 16


def test_prompt_in_the_environment_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt has blanks and line ends; it is not cut there."""
    monkeypatch.setenv("SPEC_ENGINE_PROMPT", "def f(x):\n    return x")
    assert options()["prompt"] == ("def f(x):\n    return x",)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--draft", "medusa"], r"draft must be one of auto, eagle3, eagle, standalone, none, got 'medusa'"),
        (["--adaptive-steps"], r"adaptive_steps needs topk 1, got 4"),
        (["--attend", "siblings"], r"attend must be one of ancestors, columns, got 'siblings'"),
        (["--page-size", "12"], r"page_size must be a power of two, got 12"),
        (["--topk", "1", "--num-draft-tokens", "3"], r"num_draft_tokens must be num_steps \+ 1 = 6 where topk is 1"),
        (["--schedule", "async"], "schedule must be one of sync, overlap, got 'async'"),
        (["--attention-backend", "flash"], r"attention_backend must be one of torch, .*, got 'flash'"),
        (["--kv-canary", "loud"], r"mode must be one of off, log, raise, abort, heal, got 'loud'"),
        (["--kv-canary-content", "some"], r"content must be one of write, rolling, full, got 'some'"),
        (["--kv-canary-content", "full"], "--kv-canary-content needs a canary, got none\n\nhint: add --kv-canary"),
        (["--model", "nobody/nothing"], "nobody/nothing is no folder: download the checkpoint first"),
        (["--page-size", "0"], r"page_size must be a positive whole number, got 0"),
        (["--num-draft-tokens", "99"], r"num_draft_tokens must lie in \[2, 69\], got 99"),
        (["--dtype", "int8"], r"dtype must be one of .*, got 'int8'"),
        (["--temperature", "-1"], r"temperature must be finite and not negative, got -1.0"),
        (["--acceptance", "guess"], "acceptance must be one of match, tree, rejection, got 'guess'"),
        (
            ["--acceptance", "rejection"],
            "topk must be 1 with acceptance 'rejection', got 4: drafts are",
        ),
        (["--acceptance", "tree", "--draft", "none"], "acceptance 'tree' needs drafts to accept, got draft 'none'"),
        (["--threshold-acc", "0.5"], "threshold_single and threshold_acc must be 1 with acceptance 'match'"),
        (["--acceptance", "tree", "--threshold-single", "2"], r"threshold_single must lie in \[0, 1\], got 2.0"),
        (["--logit-bias", "5"], "a bias must be ID=VALUE such as 42=-1.5, got '5'"),
        (["--logit-bias", "5=inf"], "logit_bias must map token ids to finite numbers or -inf, got 5: inf"),
        (["--stop", ""], "stop must hold strings of at least one character, got ''"),
        (["--logprobs", "-1"], r"logprobs must be at least 0 \(the chosen token alone\), got -1"),
        (["--sample-top-p", "2"], r"top_p must lie in \(0, 1\], got 2.0"),
        (["--kv-canary-budget", "3 apples"], r"budget must be a size such as 65536, 64KiB or 4MiB, got '3 apples'"),
        (["--kv-canary-poison", "rat"], r"poison must be one of finite, nan, off, got 'rat'"),
        (["--kv-canary-quarantine", "-1"], r"quarantine must be a number of steps, 0 or more, got -1"),
        (["--kv-canary-seed", "-1"], r"seed must be an integer in \[0, 2\^64\) or None, got -1"),
    ],
)
def test_refused_values_end_with_a_sentence(kvcanary, arguments: list[str], sentence: str) -> None:
    """What does not exist yet, or makes no sense, is refused before a model is loaded; exit code 2 and a hint."""
    result = kvcanary("generate", "--prompt", "x", *arguments)
    assert result.exit_code == 2, result.stderr
    assert re.search(sentence, result.stderr), result.stderr
    assert "\n\nhint: " in result.stderr
    assert result.stdout == ""
