"""Rules about ranks of one engine: what one of them did otherwise."""

from __future__ import annotations

from kvcanary.report.evidence import Evidence
from kvcanary.report.finding import Cause

#: By what the name of a level begins with.
_TEXTS = {
    "shape": "ranks were started with other settings, or each sized its pools by its own free memory",
    "seed": "ranks were started with other seeds of the canary: leave it out, and the first rank's is everybody's",
    "step": "a rank ran another forward, or none: a load, a completion or room that only it had or lacked",
    "rows": "a rank took other requests into the step, or found another number of entries in its prefix cache or host "
    "tier",
    "lengths": "a rank accepted another number of tokens",
    "tokens": "a rank drew another token: its logits, its settings or its coins differ",
    "pages": "a rank granted, freed or evicted pages in another order, or consumed another number of completions",
    "hidden states": "a rank computed other bits: a sum over ranks that arrived otherwise, a kernel, or its GPU",
    "copies": "a rank computed or stored other bits of the same K and V: a kernel, another shard, or its GPU",
    "report": "a rank has ended, hangs, or waits in another collective",
}


def differs(facts: Evidence) -> Cause:
    """What the level says."""
    level = (facts.violation.found or {}).get("level", "report")
    text = next((text for begin, text in _TEXTS.items() if level.startswith(begin)), "ranks hold other numbers")
    return Cause("ranks", text, "inferred")
