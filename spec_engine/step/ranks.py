"""What all ranks of an engine must have alike: once, its sizes; each step, lengths, tokens and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvcanary.ranks import Levels
from spec_engine.step.runner import StepResult

if TYPE_CHECKING:
    from spec_engine.assembly import Assembly


class CountsPages(Protocol):
    @property
    def num_free(self) -> int: ...


def shape_levels(engine: Assembly) -> Levels:
    """Pages, page size and rows of the engine, layers and vocabulary of its model."""
    sizes, model = engine.sizes, engine.model.config
    shape = [sizes.num_pages, sizes.page_size, sizes.num_rows, sizes.reserve, model.num_layers, model.vocab_size]
    return {"shape": {"": shape}}


def step_levels(result: StepResult, allocator: CountsPages) -> Levels:
    """Of a step that the host has collected, by request: how long it is, what it drew, and its pages."""
    own = [(part.request.request_id, part) for part in result.parts]
    return {
        "lengths": {"": [int(result.is_decode)]} | {name: [part.committed_len] for name, part in own},
        "tokens": {name: part.tokens for name, part in own},
        "pages": {"": [allocator.num_free]} | {name: part.request.pages for name, part in own},
    }
