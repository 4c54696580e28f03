"""`kvcanary codes`: the list in order, all about one code, places that are where they say, and wrong usage."""

from __future__ import annotations

import inspect
import json
import linecache
from pathlib import Path

import pytest

import kvcanary as package
import kvcanary_kernels
from kvcanary.checks.content import find_changed
from kvcanary.codes import CODES, DEVICE, HOST, KINDS, OBSERVED
from kvcanary_tools.advice import ADVICE
from kvcanary_tools.places import find_place

ROOTS = {one.__name__: Path(one.__file__).parent.parent for one in (package, kvcanary_kernels)}


def test_the_list_has_every_code_in_order(kvcanary) -> None:
    """Code, name and sentence, a line each, as findings speak; what a code means besides stands behind it."""
    result = kvcanary("codes")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [code.code for code in KINDS.values()]
    for line, code in zip(lines, KINDS.values(), strict=True):
        assert line.endswith(f"  {code.sentence}")
        assert f" {code.name} " in line


def test_one_code_is_told_in_full(kvcanary) -> None:
    """Sentence, what it means, what to do, and each place as file, line and name."""
    result = kvcanary("codes", "R9")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    assert shown.startswith(f"R9 content changed {CODES['R9'].sentence} means {ADVICE['R9'].consequence} to do ")
    assert ADVICE["R9"].remedy in shown
    line = inspect.getsourcelines(find_changed)[1]
    assert f"    kvcanary/checks/content.py:{line}  find_changed\n" in result.stdout
    assert "judged on the host" in shown
    assert "judged on the device" in shown
    assert "judged in watched caches" in shown
    assert "R9 content not finite" in result.stdout  # its other meaning


def test_several_codes_in_any_case(kvcanary) -> None:
    """They come as they were asked for, each once; nothing is said of where nobody judges one."""
    shown = kvcanary("codes", "r13", "L1", "R13").stdout
    assert [line for line in shown.splitlines() if line and line[0] != " "] == ["R13 tree mask", "L1 contradiction"]
    assert "on the device" not in shown.partition("L1")[0]


def test_a_second_meaning_alone(kvcanary) -> None:
    """U1, as dumps call it, is the second meaning of R9 without the first."""
    shown = kvcanary("codes", "u1").stdout
    assert shown.startswith("R9 content not finite\n")
    assert "content changed" not in shown


@pytest.mark.parametrize("name", ["Q1", "R99", "R", ""])
def test_an_unknown_code_is_wrong_usage(kvcanary, name: str) -> None:
    """Value, rule and what there is; exit code 2, nothing on stdout, though another code is right."""
    result = kvcanary("codes", "R9", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"kvcanary: CODE must be a code of the canary, got {name!r}\n\nhint: one of {' '.join(KINDS)}\n"
    )


def test_json_has_the_same(kvcanary) -> None:
    """One object with stable keys, for one code and for all."""
    [t1, back] = json.loads(kvcanary("codes", "T1", "--json").stdout)["codes"]
    assert list(t1) == ["code", "kind", "name", "sentence", "consequence", "remedy", "host", "device", "observed"]
    assert (t1["code"], t1["kind"], back["code"], back["kind"]) == ("T1", "T1", "T1", "A1")
    assert t1["remedy"] == ADVICE["T1"].remedy
    assert list(t1["host"][0]) == ["path", "line", "name"]
    assert len(json.loads(kvcanary("codes", "--json").stdout)["codes"]) == len(KINDS)


@pytest.mark.parametrize(("variables", "is_bold"), [({}, True), ({"NO_COLOR": "1"}, False)], ids=["plain", "NO_COLOR"])
def test_titles_are_bold_unless_nobody_wants_it(kvcanary, variables: dict[str, str], is_bold: bool) -> None:
    """On a terminal; NO_COLOR is respected."""
    assert ("\x1b[1m" in kvcanary("codes", "R9", color=True, env={"NO_COLOR": "", **variables}).stdout) is is_bold


@pytest.mark.parametrize("dotted", [*HOST, *DEVICE, *OBSERVED])
def test_the_line_is_where_the_name_is_defined(dotted: str) -> None:
    """Path and line lead to `def` or `class` of the last part of the name."""
    place = find_place(dotted)
    package_name, last = dotted.partition(".")[0], place.name.rpartition(".")[2]
    line = linecache.getline(str(ROOTS[package_name] / place.path), place.line).strip()
    assert line.startswith((f"def {last}(", f"class {last}:", f"class {last}("))


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("kvcanary.checks.content:find_nothing", "kvcanary/checks/content.py has no 'find_nothing'"),
        ("kvcanary.checks.rows:Reader.nothing", "kvcanary/checks/rows.py has no 'Reader.nothing'"),
        ("kvcanary.nowhere:find", "there is no module 'kvcanary.nowhere'"),
        ("nobody.has:this", "there is no package 'nobody'"),
    ],
)
def test_a_place_that_is_not_there_is_told(dotted: str, message: str) -> None:
    """A name that was moved away is an error, and no line of another function."""
    with pytest.raises(LookupError, match=message):
        find_place(dotted)
