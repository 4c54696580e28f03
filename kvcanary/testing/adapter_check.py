"""Check of an adapter: a toy workload over a sound engine, and what the canary was not told of it.

The engine is taken for right, so whatever fires, is refused or stays open at the end is a call that the adapter forgot,
made in the wrong order, or made with other arguments than the engine's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from kvcanary.errors import KVCanaryError, KVCorruptionError
from kvcanary.manager.manager import CanaryManager
from kvcanary.report.finding import Finding


class Drivable(Protocol):
    """An engine with its adapter, as the workload drives it; tokens are below 97.

    manager: what the adapter tells; in mode `raise` the workload ends at the first mistake, in `log` it goes on
    An engine that can do it also has `fork(request_id, child_id)`, and `evict()`, by which its prefix cache gives up a
    page that no row names.
    """

    manager: CanaryManager

    def begin(self, request_id: str, prompt: list[int]) -> object:
        """Admit a request and compute its prompt."""

    def step(self, fed: dict[str, list[int]]) -> object:
        """One forward: each of these rows goes on with these tokens."""

    def end(self, request_id: str) -> object:
        """The request is over; its pages go back."""


@dataclass(frozen=True)
class AdapterCheck:
    """What `check_adapter` found.

    missing: what was not told, or told wrongly, a sentence each
    advice:  what may be told, too
    calls:   how many were made, by name
    """

    missing: tuple[str, ...]
    advice: tuple[str, ...]
    calls: Mapping[str, int]

    def text(self) -> str:
        """For people: a line for each."""
        lines = [*(f"missing  {sentence}" for sentence in self.missing), *(f"advice   {own}" for own in self.advice)]
        return "\n".join(lines if self.missing else ["nothing is missing", *lines])


#: Calls without which something cannot be judged, in the order in which they are first due: any one of the names.
NEEDED = (
    (("admit",), "admit(id, prompt) when a request comes"),
    (("begin_step",), "begin_step(number) when a step begins"),
    (("on_alloc", "on_alloc_all"), "on_alloc(id, pages) when pages are granted, before their first write"),
    (("forward", "substep", "launch_group"), "forward(kind, index, pool) around every forward"),
    (("commit", "commit_all", "launch_accepted"), "commit(id, length) when entries are final"),
    (("check", "collect"), "check() before tokens leave"),
    (("append", "append_all", "launch_accepted"), "append(id, tokens) when tokens are accepted"),
    (("release",), "release(id) when a request ends, before its pages go"),
    (("on_free",), "on_free(id, pages) when a row gives pages back"),
)
#: The same of what only some engines can do, by their method.
WHERE = {
    "fork": (("on_fork",), "on_fork(id, child, pages) behind the child's admit(child, tokens)"),
    "evict": (("on_evict",), "on_evict(pages) when the prefix cache gives pages up"),
}
#: By code, what a finding over a sound engine most often means.
LIKELY = {
    "W1": "the write plan has slots outside of the pool",
    "W2": "on_alloc was not told, or too late",
    "W3": "on_copy was not told when a shared page was copied, or on_free when a row gave it up",
    "W8": "a final page was written: commit was told too early, or on_alloc not again",
    "R2": "the read plan names null slots",
    "R4": "the indices of the read plan are not in the order of positions",
    "R6": "append was told other tokens than the forward was fed, or twice, or admit without those of the row",
    "W6": "append was told other tokens than the forward was fed, or twice, or not before it",
    "R5": "the tokens or positions of the write plan are not those of the forward",
    "R7": "on_acquire or on_alloc was not told, or on_free too early",
    "R8": "on_acquire, on_fork or on_alloc was not told of a page that the row reads",
    "R9": "bytes moved without on_move, or were stored elsewhere than the write plan says",
    "R10": "the lengths of the read plan, or commit, are not the engine's",
    "R12": "store was not called for a layer, or bytes moved without on_move",
    "T1": "on_move came before the bytes were there, or names other slots",
    "H1": "a forward ran without open and close",
}
_VERBS = {name for names, _ in (*NEEDED, *WHERE.values()) for name in names}
_UNKNOWN_TOKENS = "truth not known to the host"


def check_adapter(engine: Drivable) -> AdapterCheck:
    """Drive prefix hits, batches, forks, ends and evictions through an engine that is watched and idle.

    Nothing is raised but what the engine itself raises; `assert check_adapter(engine).missing == ()` is a whole test.
    """
    calls, manager = Counter[str](), engine.manager
    with _listening(manager, calls):
        missing, is_whole = _run(engine)
    missing += _never_told(engine, calls, is_whole)
    missing += _meanings(manager.findings)
    certificate = manager.certificate()
    if count := certificate["unchecked"].get(_UNKNOWN_TOKENS):
        missing.append(f"append(id, tokens): the tokens of {count} entries are not known; W6 and R6 judge none")
    return AdapterCheck(tuple(missing), tuple(_advice(certificate)), dict(calls))


@contextmanager
def _listening(manager: CanaryManager, calls: Counter[str]) -> Iterator[None]:
    """Count the calls that an adapter makes meanwhile."""
    own = {name: getattr(manager, name) for name in _VERBS}
    for name, method in own.items():
        setattr(manager, name, _counted(calls, name, method))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(manager, name, method)


def _run(engine: Drivable) -> tuple[list[str], bool]:
    """What was refused or is still open, and whether the workload came to its end."""
    try:
        open_ends = list(_open_ends(engine))
        engine.manager.drain()
    except KVCorruptionError:
        return [], False  # the findings say why
    except KVCanaryError as error:
        return [f"the canary refused a call: {error}"], False
    return open_ends, True


def _never_told(engine: Drivable, calls: Counter[str], is_whole: bool) -> list[str]:
    """Of a workload that was cut short only what was due before the last call that came."""
    needs = [*NEEDED, *(need for method, need in WHERE.items() if is_whole and hasattr(engine, method))]
    came = [any(calls[name] for name in names) for names, _ in needs]
    due = len(needs) if is_whole else max((place for place, is_told in enumerate(came) if is_told), default=0)
    return [f"{needs[place][1]} was never told" for place in range(due) if not came[place]]


def _meanings(findings: Sequence[Finding]) -> Iterator[str]:
    """A sentence for each code, of its first finding."""
    counts = Counter(finding.code for finding in findings)
    for code, count in counts.items():
        first = next(finding for finding in findings if finding.code == code)
        likely = first.causes[0].text if code == "L1" and first.causes else LIKELY.get(code, "see kvcanary codes")
        times = "" if count == 1 else f"{count} times, first "
        place = f"{times}at slot {first.slot}, step {first.step}"
        yield f"{first.name} ({code}) {place}, though the engine is sound: {likely}"


def _counted(calls: Counter[str], name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return own(*args, **kwargs)

    return counted


def _open_ends(engine: Drivable) -> Iterator[str]:
    """Run the workload; what is still open of requests that are over."""
    page = engine.manager.page_map()["page_size"]
    prompt = [(7 * n + 1) % 97 for n in range(2 * page + 1)]
    names = ["kvcanary-a", "kvcanary-b"]
    engine.begin(names[0], prompt)
    engine.begin(names[1], [*prompt[: 2 * page], 90, 91])
    _go_on(engine, names, page + 1)
    if hasattr(engine, "fork"):
        names.append("kvcanary-c")
        engine.fork(*names[1:])
    _go_on(engine, names, page + 1)
    yield from _uncommitted(engine.manager, names, len(prompt))
    for name in names:
        engine.end(name)
    engine.begin("kvcanary-d", prompt)  # what a prefix cache kept
    engine.end("kvcanary-d")
    if hasattr(engine, "evict"):
        engine.evict()
    yield from _left_behind(engine.manager)


def _go_on(engine: Drivable, names: Sequence[str], num_steps: int) -> None:
    for n in range(num_steps):
        engine.step({name: [(n + 30 * place) % 97] for place, name in enumerate(names)})


def _uncommitted(manager: CanaryManager, names: Sequence[str], length: int) -> Iterator[str]:
    known = manager.session.ledger.requests
    short = [name for name in names if name in known and known[name].committed_len < length]
    if short:
        yield f"commit(id, length): prompts of {len(short)} requests are not committed after many steps"


def _left_behind(manager: CanaryManager) -> Iterator[str]:
    if any(not request.released for request in manager.session.ledger.requests.values()):
        yield "release(id): requests that are over run on in the ledger"
    held = [page for page, count in enumerate(manager.page_map()["references"]) if count]
    if held:
        yield f"on_free(id, pages): {len(held)} pages are still those of requests that are over, such as page {held[0]}"


def _advice(certificate: Mapping[str, Any]) -> Iterator[str]:
    if certificate["store"] != "proved":
        yield "forward(..., puts=True) and put() prove where values go; what store() misplaces is found when it is read"
    if not isinstance(certificate["announced"], int):
        yield "expect(forwards, ids) where the engine decides on them: a forward without its hooks is found then"
    if not isinstance(certificate["reader_probes"], int):
        yield "probe_reader(pool, attend, pages, num_heads) shows what attention really reads"
