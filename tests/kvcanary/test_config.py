"""CanaryConfig: its settings, those of the environment, and the words with which bad ones are refused."""

from __future__ import annotations

import dataclasses

import pytest

from kvcanary import CanaryConfig, CanaryConfigError, CanaryManager, KVCanaryError
from kvcanary.codes import CODES
from kvcanary.environment import parse_bytes, parse_codes, variable


def refusal(**settings: object) -> str:
    """The words with which these settings are refused."""
    with pytest.raises(CanaryConfigError) as caught:
        CanaryConfig(**settings)
    return str(caught.value)


def test_defaults_raise_and_roll_with_a_secret_seed():
    """Without settings the canary stops the engine, re-reads in turn, checks everything and draws its seed."""
    config = CanaryConfig()
    assert dataclasses.asdict(config) == {
        "mode": "raise",
        "content": "rolling",
        "budget": None,
        "seed": None,
        "poison": "finite",
        "quarantine": 4,
        "ring": 512,
        "dump_dir": None,
        "dump_content": False,
        "show_tokens": False,
        "model": "",
        "names": "memory",
        "share": 1.0,
        "disable": frozenset(),
    }


ENABLED = [("off", False), *((mode, True) for mode in ("log", "raise", "abort", "heal"))]


@pytest.mark.parametrize(("mode", "enabled"), ENABLED)
def test_enabled_is_every_mode_but_off(mode, enabled):
    """Only `off` says that no manager should be built."""
    assert CanaryConfig(mode=mode).enabled is enabled


def test_an_unknown_mode_names_the_known_ones():
    """A misspelt mode is answered with the list of modes."""
    assert refusal(mode="warn") == "mode must be one of off, log, raise, abort, heal, got 'warn'"


def test_an_unknown_content_names_the_known_ones():
    """A misspelt content setting is answered with the list of settings."""
    assert refusal(content="all") == "content must be one of write, rolling, full, got 'all'"


def test_ring_and_dump_come_from_the_environment():
    """KVCANARY_RING and KVCANARY_DUMP are the recorder's settings."""
    config = CanaryConfig.from_env({"KVCANARY_RING": "32", "KVCANARY_DUMP": "/var/dumps"})
    assert (config.ring, config.dump_dir) == (32, "/var/dumps")


def test_a_manager_refuses_mode_off():
    """A manager of a canary that is off is a mistake, and says what to pass instead."""
    with pytest.raises(CanaryConfigError) as caught:
        CanaryManager(CanaryConfig(mode="off"), [])
    assert "build no manager and pass canary=None" in str(caught.value)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "4MiB"])
def test_a_budget_is_a_positive_number(budget):
    """Zero, negatives, fractions, booleans and text are no number of bytes."""
    assert refusal(budget=budget) == f"budget must be a positive number of bytes a step or None, got {budget!r}"


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5, False, "7"])
def test_a_seed_is_an_integer_of_64_bits(seed):
    """Seeds outside 64 bits and values that are no integers are refused."""
    assert refusal(seed=seed) == f"seed must be an integer in [0, 2^64) or None, got {seed!r}"


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_ends_of_the_seed_range_are_accepted(seed):
    """Zero and the largest 64-bit integer are seeds."""
    assert CanaryConfig(seed=seed).seed == seed


def test_disable_names_unknown_codes_and_the_known_ones():
    """An unknown code is refused by name; all known ones are listed."""
    words = refusal(disable={"R5", "R77", "X9"})
    assert words.endswith("got R77, X9")
    assert words.startswith(f"disable knows {', '.join(CODES)}")


def test_disable_refuses_a_string():
    """A bare string would be read letter by letter, so it is refused with an example."""
    assert refusal(disable="R5") == "disable must be a set of codes such as {'R5'}, got the string 'R5'"


@pytest.mark.parametrize("codes", [["R5", "W4"], ("W4", "R5"), {"R5", "W4"}])
def test_disable_becomes_a_frozenset(codes):
    """Any collection of codes is kept as a frozenset."""
    disable = CanaryConfig(disable=codes).disable
    assert disable == frozenset({"R5", "W4"})
    assert isinstance(disable, frozenset)


def test_a_config_cannot_be_changed():
    """Settings are fixed once the canary may have read them."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        CanaryConfig().mode = "log"


def test_errors_of_settings_are_value_errors_of_the_package():
    """Callers may catch ValueError or the base of the package."""
    assert issubclass(CanaryConfigError, ValueError)
    assert issubclass(CanaryConfigError, KVCanaryError)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536),
        ("4MiB", 4 * 2**20),
        ("64 KiB", 64 * 2**10),
        ("512 kb", 512_000),
        ("1.5MB", 1_500_000),
        ("2gib", 2 * 2**30),
        (" 7b ", 7),
    ],
)
def test_parse_bytes_reads_binary_and_decimal_units(text, size):
    """KiB counts by 1024, kB by 1000; case and spaces do not matter."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "four", "4 apples", "-4MiB", "MiB", "1e6"])
def test_parse_bytes_refuses_what_is_no_size(text):
    """The refusal shows sizes that would do, and the text."""
    with pytest.raises(CanaryConfigError) as caught:
        parse_bytes(text)
    assert str(caught.value) == f"budget must be a size such as 65536, 64KiB or 4MiB, got {text!r}"


def test_parse_codes_takes_commas_spaces_and_small_letters():
    """A list of codes may be written loosely."""
    assert parse_codes(" r5, W4 ,,") == frozenset({"R5", "W4"})


def test_from_env_reads_every_setting():
    """Every field has a variable, which is read in any case."""
    environ = {
        "KVCANARY_MODE": "LOG",
        "KVCANARY_CONTENT": "Full",
        "KVCANARY_BUDGET": "4MiB",
        "KVCANARY_SEED": "0x10",
        "KVCANARY_DISABLE": "r5,w4",
        "KVCANARY_POISON": "NaN",
        "KVCANARY_QUARANTINE": "2",
        "KVCANARY_RING": "3",
        "KVCANARY_DUMP": "dumps",
        "KVCANARY_DUMP_CONTENT": "1",
        "KVCANARY_SHOW_TOKENS": "True",
        "KVCANARY_MODEL": "m@7",
        "KVCANARY_NAMES": "file:/tier/names",
        "KVCANARY_SHARE": "0.05",
    }
    expected = CanaryConfig(
        "log",
        "full",
        4 << 20,
        16,
        frozenset({"R5", "W4"}),
        poison="nan",
        quarantine=2,
        ring=3,
        dump_dir="dumps",
        dump_content=True,
        show_tokens=True,
        model="m@7",
        names="file:/tier/names",
        share=0.05,
    )
    assert CanaryConfig.from_env(environ) == expected
    assert {variable(field.name) for field in dataclasses.fields(CanaryConfig)} == set(environ)


@pytest.mark.parametrize("share", ["0", "1.5", "-1", "five", "nan"])
def test_a_share_is_a_part_of_one(share):
    """The message has the value, the rule and an example."""
    with pytest.raises(CanaryConfigError) as caught:
        CanaryConfig.from_env({"KVCANARY_SHARE": share})
    assert "share must be a number above 0 and at most 1" in str(caught.value)
    assert "0.05 is 5 %" in str(caught.value)


def test_from_env_without_variables_is_the_default():
    """Empty variables count as unset, and other variables are not looked at."""
    assert CanaryConfig.from_env({"KVCANARY_MODE": "  ", "MODE": "log"}) == CanaryConfig()


def test_from_env_reads_the_process_environment(monkeypatch):
    """Without a mapping the variables of the process are read."""
    monkeypatch.setenv("KVCANARY_MODE", "off")
    assert not CanaryConfig.from_env().enabled


def test_from_env_lets_overrides_win():
    """What the caller says goes before what the environment says."""
    config = CanaryConfig.from_env({"KVCANARY_MODE": "off", "KVCANARY_SEED": "3"}, mode="raise")
    assert (config.mode, config.seed) == ("raise", 3)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("KVCANARY_KV_CANARY", "it is KVCANARY_MODE now"),
        ("KVCANARY_KV_CANARY_SEED", "it is KVCANARY_SEED now"),
        ("KVCANARY_KV_CANARY_DUMP_CONTENT", "it is KVCANARY_DUMP_CONTENT now"),
        ("KVCANARY_CONTNT", "did you mean KVCANARY_CONTENT?"),
        (
            "KVCANARY_PAGE_SIZE",
            "unset it, or say SPEC_ENGINE_PAGE_SIZE where it is an option of kvcanary generate or serve",
        ),
    ],
)
def test_from_env_refuses_names_that_set_nothing(name, remedy):
    """A name of before is refused with the new one, a misspelt one with what was probably meant."""
    with pytest.raises(CanaryConfigError) as caught:
        CanaryConfig.from_env({name: "log"})
    assert str(caught.value) == f"{name} sets nothing: {remedy}"


def test_from_env_takes_what_others_set():
    """What commands read, and the links that Kubernetes makes for a service of our name, are no mistake."""
    others = {"KVCANARY_PORT": "tcp://10.0.0.1:80", "KVCANARY_SERVICE_HOST": "10.0.0.1", "KVCANARY_API_KEY": "k"}
    assert CanaryConfig.from_env(others) == CanaryConfig()


def test_from_env_knows_the_automatic_budget():
    """`auto` is the default budget, to be said aloud."""
    assert CanaryConfig.from_env({"KVCANARY_BUDGET": "Auto"}).budget is None


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("MODE", "mend", "mode must be one of off, log, raise, abort, heal, got 'mend'"),
        ("CONTENT", "some", "content must be one of write, rolling, full, got 'some'"),
        ("BUDGET", "much", "budget must be a size such as 65536, 64KiB or 4MiB, got 'much'"),
        ("BUDGET", "0", "budget must be a positive number of bytes a step or None, got 0"),
        ("SEED", "seven", "seed must be an integer, got 'seven'"),
        ("SEED", "-1", "seed must be an integer in [0, 2^64) or None, got -1"),
        ("POISON", "rat", "poison must be one of finite, nan, off, got 'rat'"),
        ("QUARANTINE", "-1", "quarantine must be a number of steps, 0 or more, got -1"),
        ("QUARANTINE", "long", "quarantine must be an integer, got 'long'"),
        ("DISABLE", "R5,R99", "got R99"),
        ("SHOW_TOKENS", "maybe", "show_tokens must be 1 or 0, got 'maybe'"),
    ],
)
def test_from_env_refuses_bad_values_by_words(variable, text, words):
    """A bad variable is refused with the words of the setting."""
    with pytest.raises(CanaryConfigError) as caught:
        CanaryConfig.from_env({f"KVCANARY_{variable}": text})
    assert words in str(caught.value)
