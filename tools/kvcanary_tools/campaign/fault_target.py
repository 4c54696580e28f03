"""The engine of a server as faults in its state see it; loaded when one is armed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcanary.faults.target import Target
    from spec_engine import Engine


def target_of(engine: Engine) -> Target:
    """The engine as faults in its state see it."""
    from random import Random

    from kvcanary.faults.target import Setup
    from kvcanary_tools.campaign.harness import EngineTarget

    config = engine.config
    setup = Setup(
        model=config.model,
        page_size=config.page_size,
        drafts=engine.drafter is not None,
        topk=config.topk,
        num_steps=config.num_steps,
        num_draft_tokens=config.num_draft_tokens,
        attend=config.attend,
        backend=config.attention_backend,
        schedule=config.schedule,
        content=config.canary.content,
    )
    return EngineTarget(engine, setup, Random(config.canary.seed))
