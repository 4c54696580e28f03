"""CanaryConfig: what the canary checks, how much of it, and what a finding does."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcanary.codes import CODES
from kvcanary.environment import settings_from
from kvcanary.errors import CanaryConfigError

MODES = ("off", "log", "raise", "abort", "heal")
CONTENTS = ("write", "rolling", "full")
POISONS = ("finite", "nan", "off")
MEMORY, NAMES_FILE, NAMES_URLS = "memory", "file:", ("redis://", "rediss://", "unix://")
#: Steps within which the automatic budget re-reads every committed byte of the running rows.
ROTATION_STEPS = 128
#: Settings that are integers, what they may be, and that in words.
_INTEGERS = (
    ("budget", range(1, 2**63), "a positive number of bytes a step or None"),
    ("quarantine", range(2**63), "a number of steps, 0 or more"),
    ("ring", range(2**63), "a number of steps, 0 or more"),
    ("seed", range(2**64), "an integer in [0, 2^64) or None"),
)
MOST_MODEL = 1024


@dataclass(frozen=True)
class CanaryConfig:
    """Settings of the canary.

    mode: `off` (nothing installed), `log` (a structlog event a finding), `raise` (the engine stops),
        `abort` (the requests that a finding touches end with `kv_corruption`, the others go on), `heal` (those that
        damage touches are computed again from their tokens; what is no damage ends them as in `abort`).
    content: `write` (fingerprints are taken, never compared), `rolling` (a byte budget a step is
        re-read, and all bytes of a request when it ends), `full` (all bytes a forward reads).
    budget: bytes a step of the rolling check; None re-reads the running rows within 128 steps.
    seed: of all keys; None draws a secret one. Fix it to compare two runs.
    show_tokens: whether token ids may appear in findings and reports.
    model: what seals say of the model and its weights, such as a name with a revision; a seal of another is refused.
    disable: codes that are neither reported nor counted; the certificate names them.
    poison: what freed pages are filled with, and looked at for before they are granted again: `finite` (a pattern
        that attention survives), `nan` (a debug mode: one wrong read ruins the output), `off`.
    quarantine: steps that a freed page waits before an engine grants it again.
    ring: steps that the flight recorder keeps, in at most 64 MB; 0: it records nothing.
    dump_dir: folder into which a finding, or SIGUSR1, writes what was recorded; None: nothing is written unasked.
    names: where a plug-in finds what a block was that a connector loads: `memory` (what this process wrote),
        `file:PATH` or `redis://HOST:PORT` (what any process wrote that has the same `seed`, which must be set then).
    share: of a fleet's workers that are watched at a time, by turns of a week (`kvcanary.hardware.turns`); 1: all.
    dump_content: dumps have the token ids as they are, and the bytes of the slots that findings name.
    """

    mode: str = "raise"
    content: str = "rolling"
    budget: int | None = None
    seed: int | None = None
    disable: frozenset[str] = field(default_factory=frozenset)
    poison: str = "finite"
    quarantine: int = 4
    ring: int = 512
    dump_dir: str | None = None
    dump_content: bool = False
    show_tokens: bool = False
    model: str = ""
    names: str = MEMORY
    share: float = 1.0

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("content", CONTENTS), ("poison", POISONS)):
            if getattr(self, name) not in choices:
                raise CanaryConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, allowed, meaning in _INTEGERS:
            value = getattr(self, name)
            if value is not getattr(CanaryConfig, name) and not (type(value) is int and value in allowed):
                raise CanaryConfigError(f"{name} must be {meaning}, got {value!r}")
        if not isinstance(self.model, str) or len(self.model) > MOST_MODEL:
            raise CanaryConfigError(f"model must be a name of at most {MOST_MODEL} characters, got {self.model!r}")
        is_file = str(self.names).startswith(NAMES_FILE) and self.names != NAMES_FILE
        if self.names != MEMORY and not is_file and not str(self.names).startswith(NAMES_URLS):
            raise CanaryConfigError(f"names must be memory, file:PATH or redis://HOST:PORT, got {self.names!r}")
        if self.names != MEMORY and self.seed is None:
            raise CanaryConfigError(
                f"names in {place_of(self.names)} are found by processes with the same seed: set seed (KVCANARY_SEED) "
                "to one number in all of them"
            )
        if not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise CanaryConfigError(f"share must be a number above 0 and at most 1, got {self.share!r}: 0.05 is 5 %")
        if self.dump_dir is not None and not self.ring:
            raise CanaryConfigError(
                f"a ring of 0 steps has nothing to dump into {self.dump_dir!r}: give ring some steps"
            )
        object.__setattr__(self, "disable", _checked_codes(self.disable))

    @property
    def enabled(self) -> bool:
        """Whether a manager should be built at all."""
        return self.mode != "off"

    def drawn_seed(self) -> int:
        """The seed, or a secret one that is another at each call."""
        return secrets.randbits(64) if self.seed is None else self.seed

    def expect_names_in_memory(self, who: str) -> None:
        """CanaryConfigError where other processes should find names of what `who` cannot compare."""
        if self.names != MEMORY:
            raise CanaryConfigError(
                f"names must be memory for {who}, got {place_of(self.names)}: names of other processes are compared "
                "where a connector of vLLM loads (runner V2)"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> CanaryConfig:
        """Settings from the variables KVCANARY_<FIELD> (`dump_dir`: KVCANARY_DUMP); `overrides` win.

        CanaryConfigError for a wrong value, and for a variable of this prefix that nobody reads.
        """
        return cls(**{**settings_from(os.environ if environ is None else environ), **overrides})


def place_of(names: str) -> str:
    """The setting `names` as messages show it, without a password."""
    scheme, _, rest = names.partition("://")
    return f"{scheme}://{rest.split('@')[-1]}" if rest else names


def share_of(count: int, stride: int) -> int:
    """How many of so many to read in a slice every `stride` steps, so that each is read once in a rotation.

    A stride less: what was written behind a slice waits for the next one, and then for all that is older.
    """
    return -(-count * stride // (ROTATION_STEPS - stride))


def _checked_codes(codes: Any) -> frozenset[str]:
    if isinstance(codes, str):
        raise CanaryConfigError(f"disable must be a set of codes such as {{'R5'}}, got the string {codes!r}")
    codes = frozenset(codes)
    unknown = sorted(str(code) for code in codes if code not in CODES)
    if unknown:
        raise CanaryConfigError(f"disable knows {', '.join(CODES)}, got {', '.join(unknown)}")
    return codes
