"""What can be asked of an engine that is only watched, and what cannot."""

from __future__ import annotations

from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError

#: Codes that block tables, lengths, tokens and slots can feed (nobody tells of grants and frees: R7, R8, W2, W3, P1).
PAGED_FED = frozenset({"R1", "R2", "R3", "R4", "R5", "R6", "R9", "R10", "R12", "T1", "N1", "W1", "W4", "W5", "W6"})


def expect_watching(config: CanaryConfig, one: str, can_heal: bool = False) -> None:
    """AdapterError where the mode asks for what nobody can do from outside an engine: to end `one` thing of many.

    can_heal: the engine computes loads again that it is told have failed
    """
    if config.mode not in ("log", "raise", *(["heal"] if can_heal else [])):
        modes = "'log', 'raise' or 'heal'" if can_heal else "'log' or 'raise'"
        raise AdapterError(f"mode must be {modes} here, got {config.mode!r}: nobody can end {one}")
