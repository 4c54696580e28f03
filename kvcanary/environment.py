"""The environment: `KVCANARY_<SETTING>` is a setting of the canary at every door, and other names are refused.

Doors are the commands, the plug-ins of vLLM and SGLang, `attach` of transformers and `CanaryConfig.from_env`. Options
of the engine that comes with kvcanary are `SPEC_ENGINE_<OPTION>`, and belong to its commands alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from kvcanary.errors import CanaryConfigError

PREFIX, OF_THE_ENGINE = "KVCANARY_", "SPEC_ENGINE_"
API_KEY, JSON = f"{PREFIX}API_KEY", f"{PREFIX}JSON"
_OTHERS = (API_KEY, JSON, f"{PREFIX}ACCEPT", f"{PREFIX}REENACT")
#: What Kubernetes gives every pod beside a service of the name kvcanary.
_SERVICE_LINK = re.compile(rf"{PREFIX}(SERVICE|PORT)(_|$)")
_BEFORE = f"{PREFIX}KV_CANARY"  # what names of the commands began with in version 0.1
_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """A size in bytes from `4MiB`, `512 kb` or `65536`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise CanaryConfigError(f"budget must be a size such as 65536, 64KiB or 4MiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_codes(text: str) -> frozenset[str]:
    """Check codes from `R5,W4`."""
    return frozenset(part.strip().upper() for part in text.split(",") if part.strip())


def _integer(name: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return int(text, 0)
        except ValueError:
            raise CanaryConfigError(f"{name} must be an integer, got {text!r}") from None

    return parse


def _switch(name: str) -> Callable[[str], bool]:
    def parse(text: str) -> bool:
        if text.lower() not in _SWITCHES:
            raise CanaryConfigError(f"{name} must be 1 or 0, got {text!r}")
        return _SWITCHES[text.lower()]

    return parse


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CanaryConfigError(f"share must be a number above 0 and at most 1, got {text!r}: 0.05 is 5 %") from None


_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
#: Fields of `CanaryConfig`, and how each is read from text.
PARSERS: dict[str, Callable[[str], Any]] = {
    "mode": str.lower,
    "content": str.lower,
    "budget": lambda text: None if text.lower() == "auto" else parse_bytes(text),
    "seed": _integer("seed"),
    "disable": parse_codes,
    "poison": str.lower,
    "quarantine": _integer("quarantine"),
    "ring": _integer("ring"),
    "dump_dir": str,
    "dump_content": _switch("dump_content"),
    "show_tokens": _switch("show_tokens"),
    "model": str,
    "names": str,
    "share": _share,
}


def variable(field: str) -> str:
    """The name under which a field of `CanaryConfig` is set: `KVCANARY_CONTENT` for `content`."""
    return PREFIX + field.removesuffix("_dir").upper()


def settings_from(environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `CanaryConfig` that are set; blank ones are not. CanaryConfigError for a name or text that is none."""
    expect_known(environ)
    texts = {field: environ.get(variable(field), "").strip() for field in PARSERS}
    return {field: PARSERS[field](text) for field, text in texts.items() if text}


def is_asked_for() -> bool:
    """Whether KVCANARY_MODE wants a canary in this process; CanaryConfigError for a variable that nobody reads."""
    expect_known(os.environ)
    return os.environ.get(variable("mode"), "").strip().lower() not in ("", "off")


def expect_known(environ: Mapping[str, str]) -> None:
    """CanaryConfigError for a name with our prefix that nobody reads: what it was meant to set would stay unset."""
    known = (*map(variable, PARSERS), *_OTHERS)
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and not _SERVICE_LINK.match(name):
            raise CanaryConfigError(f"{name} sets nothing: {_instead(name, known)}")


def _instead(name: str, known: tuple[str, ...]) -> str:
    if name == _BEFORE:
        return f"it is {variable('mode')} now"
    renamed = name.replace(_BEFORE, PREFIX.removesuffix("_"))
    if name.startswith(_BEFORE) and renamed in known:
        return f"it is {renamed} now"
    if close := get_close_matches(name, known, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    option = name.removeprefix(PREFIX)
    return f"unset it, or say {OF_THE_ENGINE}{option} where it is an option of kvcanary generate or serve"
