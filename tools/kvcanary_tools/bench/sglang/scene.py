"""One scheduler of a real SGLang, and what happens to it, act after act; a line of JSON says what the canary saw.

python -m kvcanary_tools.bench.sglang.scene FOLDER '{"eagle": true, "topk": 2, "nodes": 5, "acts": [{"mode": "off"}]}'

Without `acts` there is one, whose settings stand beside those of the scheduler.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcanary_tools.bench.sglang import host as sglang_host
from kvcanary_tools.bench.sglang.events import EVENTS
from kvcanary_tools.bench.sglang.faults import FAULTS, LASTING, Touched
from kvcanary_tools.bench.sglang.misreading import misreading as misread
from kvcanary_tools.bench.sglang.rank_faults import RANK_FAULTS
from kvcanary_tools.bench.sglang.state_faults import OF_STATES

PROMPTS = {
    "a": [1, 5, 9, 13],
    "b": [1, 7, 7, 7, 8],
    "c": [1, 5, 9, 13, 4, 4, 4, 6, 8, 10, 3, 2, 1, *range(3, 30)],  # longer than a chunk
    "d": [1, 5, 9, 13, 4, 4, 4, 6],  # begins as c does
}
OF_AN_ACT = (
    "mode",
    "fault",
    "new",
    "later",
    "prompt",
    "answer",
    "at",
    "abort",
    "content",
    "poison",
    "dump",
    "between",
    "prefix",
    "misreading",
    "of_rank",
    "embeddings",
)


def run() -> None:
    folder, told = Path(sys.argv[1]), json.loads(sys.argv[2])
    acts = told.pop("acts", None)
    only = None if acts else {name: told.pop(name) for name in OF_AN_ACT if name in told}
    interpreted = told.pop("is_interpreted", False) or told.get("attention_backend") == "triton"
    sglang_host.install(interpreted or told.get("eagle", False) or told.get("peer", False))
    import torch

    with torch.no_grad():
        host = sglang_host.Host(folder, **told)
        records = [play(host, **act) for act in acts or [only or {}]]
    print(json.dumps({"acts": records} if acts else records[0]))
    sys.stdout.flush()
    os._exit(0)


def play(
    host: Any,
    mode: str = "log",
    fault: str = "",
    new: int = 8,
    later: int = 0,
    prompt: int = 20,
    answer: int = 40,
    at: int = 3,
    abort: str = "",
    content: str = "full",
    poison: str = "finite",
    dump: str = "",
    between: tuple[str, ...] | list[str] = (),
    prefix: int = 0,
    misreading: str = "",
    of_rank: int = 0,
    embeddings: bool = False,
) -> dict[str, Any]:
    """Requests until none is left. Behind it nothing is cached, and no canary is attached.

    later: how many longer requests come after the first four, so that entries are evicted
    prompt, answer: about how many tokens these have, and are given
    dump:  a folder for dumps
    between: of EVENTS, what happens before each further wave of the first four
    prefix: how many tokens all of these begin with
    misreading: of HARMS, or AS_IT_IS, what attention does while it is asked what it reads; behind OF_DRAFT, the draft's
    of_rank: in which of several the fault strikes
    embeddings: each of the first four has another one for its second token
    at:    the turn of the last requests in which the fault strikes; abort: whom its client leaves in that turn
    """
    said: dict[str, Any] = {
        "mode": mode,
        "fault": fault,
        "misreading": misreading,
        "plugged_in": host.canary is not None,
        "rank": host.rank,
    }
    if mode != "off" and host.canary is None:
        from kvcanary import CanaryConfig
        from kvcanary.adapters.sglang.scheduler import attach

        dumps = Path(dump) if dump else None
        with misread(host, misreading):
            attach(host.scheduler, CanaryConfig(mode=mode, content=content, poison=poison, seed=3, dump_dir=dumps))
    elif mode == "off" and host.canary is not None:
        host.canary.detach()
    before = host.begin()
    shared = [3 + 7 * number % 29 for number in range(prefix)]
    for number, (name, tokens) in enumerate(PROMPTS.items()):
        host.ask(name, shared + tokens, new, number if embeddings else None)
    blow = Blow(host, fault if host.rank in (None, of_rank) else "", at, abort, said)
    try:
        host.run(*((before_nothing, before_nothing) if later or between else blow.turns))
        for wave, event in enumerate(between):
            EVENTS[event](host)
            for name, tokens in PROMPTS.items():
                host.ask(f"{name} again {wave}", shared + tokens, new)
            host.run(*(blow.turns if event is between[-1] else (before_nothing, before_nothing)))
        for number in range(later):
            tokens = [1, 8, number % 29 + 3] + [(7 * number + n) % 32 for n in range(prompt)]
            host.ask(f"x{number}", tokens, answer)
        if later:
            host.run(*blow.turns)
    except Exception as error:
        said["raised"] = type(error).__name__
        said["left"] = sum(len(out) - before.get(name, 0) for name, out in host.outputs.items())
        said["finding"] = error.findings[0].to_dict() if hasattr(error, "findings") else str(error)
    blow.end()
    said["outputs"], said["counts"], said["peer"] = host.outputs, host.counts, list(host.peer_said)
    if host.canary is not None:
        said["reports"] = report(host.canary)
        said["findings"] = [finding.to_dict() for finding in host.canary.findings]
        if "raised" not in said:
            said["flushed"] = host.scheduler.flush_cache()
        host.canary.detach()
    elif "raised" not in said:
        said["flushed"] = host.scheduler.flush_cache()
    return said


def report(canary: Any) -> dict[str, Any]:
    """The certificate; where one pool has ended the step, the other may have something to say of it as well."""
    from kvcanary import KVCorruptionError

    while True:
        try:
            return dict(canary.report())
        except KVCorruptionError:
            continue


def before_nothing(turn: int) -> None:
    """Nobody does anything in this turn."""


class Blow:
    """A fault that strikes before one turn, and is healed behind it, or at the end where it lasts."""

    def __init__(self, host: Any, fault: str, at: int, abort: str, said: dict[str, Any]) -> None:
        self.host, self.fault, self.at, self.abort, self.said = host, fault, at, abort, said
        self.turns = self._before, self._behind
        self._running: Iterator[Touched] | None = None

    def _before(self, turn: int) -> None:
        if turn == self.at and self.abort:
            self.host.leave(self.abort)
        if turn == self.at and self.fault:
            self._running = (FAULTS | OF_STATES | RANK_FAULTS)[self.fault](self.host)
            self.said["touched"] = next(self._running)

    def _behind(self, turn: int) -> None:
        if self.fault not in LASTING:
            self.end()

    def end(self) -> None:
        if self._running is not None:
            next(self._running, None)
            self._running = None


if __name__ == "__main__":
    run()
