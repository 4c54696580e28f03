"""What `kvcanary demo` does: complete held-out code under the canary, then damage the cache in two ways.

The faults are made from outside, on the engine's tensors, as a stray write would make them: neither the engine nor
the canary is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvcanary import CanaryConfig, Finding, KVCorruptionError
from kvcanary_tools.runs.generation import Generation, generate
from spec_engine import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from kvcanary import Report
    from kvcanary_tools.runs.generation import Completion
    from spec_engine import TokenEvent
    from spec_engine.request import Request

#: Tokens that leave before a fault is made: it strikes in mid-run, in bytes that many forwards have read already.
TOKENS_BEFORE_FAULT = 24


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: a model this small gains a quarter from a second one, and where another process holds
    that core it becomes ten times slower, because torch's threads wait by spinning."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Comparison:
    """The same prompts with and without drafting, taken in turns, canary on in both."""

    drafted: Generation
    plain: Generation

    @property
    def speedup(self) -> float:
        return self.drafted.tokens_per_second / self.plain.tokens_per_second

    @property
    def num_equal(self) -> int:
        """Prompts whose tokens are the same: drafting changes the speed, not the text."""
        pairs = zip(self.drafted.completions, self.plain.completions, strict=True)
        return sum(drafted.token_ids == plain.token_ids for drafted, plain in pairs)


@dataclass(frozen=True)
class Damage:
    """One fault: what was done, and what the first finding must name: `place` holds attributes of Finding."""

    what: str
    code: str
    slots: frozenset[int]
    place: dict[str, Any] = field(default_factory=dict)

    def named_by(self, finding: Finding) -> bool:
        """Right code, right slot, and right in every attribute of the place."""
        right_place = all(getattr(finding, name) == value for name, value in self.place.items())
        return finding.code == self.code and finding.slot in self.slots and right_place


@dataclass(frozen=True)
class Outcome:
    """What came of a fault; `tokens_leaked` counts tokens that left after it was made."""

    damage: Damage
    report: Report | None
    findings: Sequence[Finding]
    tokens_leaked: int

    @property
    def named(self) -> bool:
        """Whether the first finding has the right code at the right place."""
        return bool(self.findings) and self.damage.named_by(self.findings[0])

    @property
    def caught(self) -> bool:
        """Found, named, and before any token left that the fault could have touched."""
        return self.named and not self.tokens_leaked


def compare(
    prompts: Sequence[str], num_tokens: int, listener: Callable[[Completion, TokenEvent], None] | None = None
) -> Comparison:
    """Complete each prompt with drafting, heard by `listener`, then again without; both engines are warmed up."""
    params = SamplingParams(max_new_tokens=num_tokens)
    drafted, plain = _engine("auto"), _engine("none")
    for engine in (drafted, plain):
        generate(engine, [prompts[0]], SamplingParams(max_new_tokens=8))
    runs: dict[str, list[Generation]] = {"drafted": [], "plain": []}
    for prompt in prompts:
        runs["drafted"].append(generate(drafted, [prompt], params, listener))
        runs["plain"].append(generate(plain, [prompt], params))
    return Comparison(drafted=_joined(runs["drafted"]), plain=_joined(runs["plain"]))


def flip_bit(engine: Engine, request: Request) -> Damage:
    """Flip one bit of V, in one layer, in the middle of what the request has committed."""
    pool = engine.pools["target"].kv
    position, layer = request.committed_len // 2, pool.shape[0] // 2
    slot = int(engine.request_table.table[request.row, position])
    head, dim, bit = 0, 21, 12
    byte = dim * pool.element_size() + bit // 8
    pool[layer, slot, 1, head].view(torch.uint8)[byte] ^= 1 << bit % 8
    return Damage(
        what=f"one bit flipped in mid-run: slot {slot} (position {position} of {request.request_id}), layer {layer}, "
        f"V, head {head}, dim {dim}, bit {bit}",
        code="R9",
        slots=frozenset({slot}),
        place={"pool": "target", "layer": layer, "part": "V", "head": head, "dim": dim, "bit": bit},
    )


def swap_pages(engine: Engine, request: Request) -> Damage:
    """Exchange two entries of the request's page table: its second page is looked for where the fourth lies.

    Target and draft pool share the table, so the first forward that reads may be one of either.
    """
    page_size, row = engine.config.page_size, engine.request_table.table[request.row]
    first, second = (slice(page * page_size, (page + 1) * page_size) for page in (1, 3))
    there, here = row[first].tolist(), row[second].tolist()
    row[first], row[second] = torch.tensor(here), torch.tensor(there)
    return Damage(
        what=f"two page-table entries swapped in mid-run: pages {there[0] // page_size} and {here[0] // page_size} "
        f"of {request.request_id}",
        code="R4",
        slots=frozenset(there + here),
    )


def strike(prompt: str, num_tokens: int, fault: Callable[[Engine, Request], Damage]) -> Outcome:
    """Complete a prompt, make the fault in mid-run, and see what the canary says, and when."""
    engine = _engine("auto", content="full")
    engine.submit(prompt, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
    while not engine.running or len(engine.running[0].output_ids) < TOKENS_BEFORE_FAULT:
        engine.step()
    damage = fault(engine, engine.running[0])
    leaked = 0
    try:
        while engine.has_work:
            leaked += sum(len(event.token_ids) for event in engine.step())
    except KVCorruptionError as error:
        return Outcome(damage, error.report, error.findings, leaked)
    return Outcome(damage, None, (), leaked)


def as_dict(comparison: Comparison, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """The object that `demo --json` prints."""
    return {
        "clean": {
            **comparison.drafted.as_dict(),
            "tokens_per_second_without_drafting": comparison.plain.tokens_per_second,
            "speedup": comparison.speedup,
            "equal_outputs": comparison.num_equal,
        },
        "faults": {
            name: {
                "what": outcome.damage.what,
                "expected": outcome.damage.code,
                "named": outcome.named,
                "caught": outcome.caught,
                "tokens_leaked": outcome.tokens_leaked,
                "report": outcome.report.to_dict() if outcome.report else None,
            }
            for name, outcome in outcomes.items()
        },
    }


def _engine(draft: str, content: str = "rolling") -> Engine:
    return Engine(EngineConfig(draft=draft, max_total_tokens=2048, canary=CanaryConfig(mode="raise", content=content)))


def _joined(runs: Sequence[Generation]) -> Generation:
    """Runs of one engine as one; its certificate grows from run to run, so that the last one speaks for all."""
    return Generation(
        completions=[completion for run in runs for completion in run.completions],
        tokens_emitted=sum(run.tokens_emitted for run in runs),
        verify_forwards=sum(run.verify_forwards for run in runs),
        decode_seconds=sum(run.decode_seconds for run in runs),
        num_retractions=sum(run.num_retractions for run in runs),
        restored_tokens=sum(run.restored_tokens for run in runs),
        certificate=runs[-1].certificate,
        report=next((run.report for run in runs if run.report is not None), None),
    )
