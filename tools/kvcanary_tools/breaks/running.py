"""Running breaks: each in a process of its own, which imports the engine anew, after what its cases give unbroken."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import structlog
import torch

from kvcanary import CanaryConfig, KVCanaryError, KVCorruptionError
from kvcanary_tools.breaks.broken import Break, import_broken
from kvcanary_tools.breaks.cases import Case, Outcome, play
from kvcanary_tools.breaks.catalogue import BREAKS

OFF, FULL, ROLLING = "off", "full", "rolling"
CANARIES = {
    OFF: CanaryConfig(mode="off"),
    FULL: CanaryConfig(mode="raise", content="full", seed=1),
    ROLLING: CanaryConfig(mode="raise", seed=1),
}
MOST_SECONDS = 300  # of one break
PLAIN = {"attention_backend", "prefill_chunk_tokens", "new_token_ratio", "graphs", "graph_buckets", "schedule"}
PLAIN |= {"host_pages", "max_device_tokens", "device_turn", "adaptive_steps", "context_length"}


@dataclass(frozen=True)
class Unbroken:
    """What a case gives without drafts, and whether it gives the same with them and no check fires.

    accepted_len: tokens a verify with drafts;  complaint: what is wrong of it, "" for nothing
    """

    tokens: Mapping[str, Sequence[int]]
    accepted_len: float
    complaint: str


@dataclass(frozen=True)
class Row:
    """One run of a break.

    ends:  code of the finding or name of the error that ended it, "" where nothing did; typed: an error of our own
    wrong: tokens that left and are not those of undrafted decoding;  step: in which it ended
    cause, says: family and text of the finding's first cause;  message: first line of the error
    """

    name: str
    case: str
    canary: str
    ends: str
    typed: bool
    step: int
    wrong: int
    accepted_len: float
    unbroken_len: float
    cause: str
    says: str
    message: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(names: Sequence[str], workers: int = 1) -> Iterator[list[Row]]:
    """All runs of these breaks, break by break; RuntimeError where a case is not clean without a break."""
    cases = {repr(case): case for name in names for case in BREAKS[name].cases}
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        unbroken = dict(zip(cases, pool.map(_play_unbroken, cases.values(), 1), strict=True))
        for case, known in unbroken.items():
            if known.complaint:
                raise RuntimeError(f"{case} must be clean where nothing is broken: {known.complaint}")
        yield from pool.imap(_play_broken, [(name, unbroken) for name in names], 1)


def _play_unbroken(case: Case) -> Unbroken:
    _begin(None)
    plain = replace(case, draft="none", pages=None)
    plain = replace(plain, engine={name: value for name, value in case.engine.items() if name not in PLAIN})
    reference, alone, watched = (play(one, CANARIES[label]) for one, label in _clean_runs(plain, case))
    complaint = str(reference.error or alone.error or watched.error or "")
    if not complaint and not reference.left == alone.left == watched.left:
        complaint = "drafting changes its tokens"
    return Unbroken(reference.left, alone.accepted_len, complaint)


def _clean_runs(plain: Case, case: Case) -> Iterator[tuple[Case, str]]:
    yield plain, OFF
    yield case, OFF
    yield case, FULL


def _play_broken(given: tuple[str, Mapping[str, Unbroken]]) -> list[Row]:
    name, unbroken = given
    broken = BREAKS[name]
    _begin(broken)
    rows = []
    for number, case in enumerate(broken.cases):
        for label in CANARIES:
            if label != ROLLING or not number:
                rows.append(_row(broken, case, label, play(case, CANARIES[label]), unbroken[repr(case)]))
    return rows


def _begin(broken: Break | None) -> None:
    """In a process that ends with this task."""
    torch.set_num_threads(1)  # two beside another busy process wait for each other
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    signal.alarm(MOST_SECONDS)
    import_broken(broken)


def _row(broken: Break, case: Case, label: str, outcome: Outcome, unbroken: Unbroken) -> Row:
    error = outcome.error
    ends, cause, says = "" if error is None else type(error).__name__, "", ""
    if isinstance(error, KVCorruptionError):
        finding = error.findings[0]
        ends, (cause, says) = finding.code, (finding.causes[0].family, finding.causes[0].text)
    return Row(
        broken.name,
        str(case),
        label,
        ends,
        error is None or isinstance(error, KVCanaryError),
        outcome.step,
        _wrong_tokens(outcome.left, unbroken.tokens),
        round(outcome.accepted_len, 2),
        round(unbroken.accepted_len, 2),
        cause,
        says,
        "" if error is None else str(error).splitlines()[0],
    )


def _wrong_tokens(left: Mapping[str, Sequence[int]], right: Mapping[str, Sequence[int]]) -> int:
    """Tokens that are not there, or not those, in a run without a break."""
    wrong = 0
    for name, tokens in left.items():
        own = right.get(name, ())
        wrong += sum(a != b for a, b in zip(tokens, own, strict=False)) + max(0, len(tokens) - len(own))
    return wrong
