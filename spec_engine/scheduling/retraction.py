"""Whom to send back to the queue when running requests need more pages than can be had: the policy, without the doing.

Order and ratio are those of SGLang's scheduler; a request that does not fit even alone is aborted, never the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

STEPS_AHEAD = 20  # decode steps that a request is expected to run on undisturbed after a retraction


class Retractable(Protocol):
    """A running request: lengths in tokens; a higher ``priority`` is retracted later."""

    @property
    def output_len(self) -> int: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def priority(self) -> int: ...


RequestT = TypeVar("RequestT", bound=Retractable)


@dataclass(frozen=True)
class Retraction(Generic[RequestT]):
    """What becomes of the running requests: ``kept`` in their order, ``retracted`` in the order of their choice.

    aborted: the one that was left and does not fit; then nothing is kept.
    """

    kept: list[RequestT]
    retracted: list[RequestT]
    aborted: RequestT | None = None


def victims(requests: Sequence[RequestT]) -> list[RequestT]:
    """First to be retracted first: lowest priority, fewest outputs, longest prompt, then the latest of ``requests``.

    Fewest outputs lose the least work; of those the longest prompt gives back the most pages.
    """
    order = list(reversed(requests))
    order.sort(key=lambda request: (request.priority, request.output_len, -request.prompt_len))
    return order


def plan_retraction(
    requests: Sequence[RequestT], fits: Callable[[Sequence[RequestT], Sequence[RequestT]], bool]
) -> Retraction[RequestT]:
    """Retract at least one of several requests, and more until ``fits(kept, retracted)``, but never the last one.

    Called when the next step does not fit. Requests whose results are about to end them are not to be passed.
    """
    order = victims(requests)
    retracted: list[RequestT] = []
    while len(order) > 1:
        retracted.append(order.pop(0))
        if fits(order, retracted):
            break
    left = {id(request) for request in order}
    kept = [request for request in requests if id(request) in left]
    if len(kept) == 1 and not fits(kept, retracted):
        return Retraction([], retracted, aborted=kept[0])
    return Retraction(kept, retracted)


def new_token_ratio(output_lens: Sequence[int], max_new_tokens: Sequence[int], steps_ahead: int = STEPS_AHEAD) -> float:
    """The share of their ``max_new_tokens`` that running requests are now expected to use, at most 1.

    After a retraction this many outputs are admitted: what was decoded, and ``steps_ahead`` tokens more for each.
    """
    expected = sum(output_lens) + steps_ahead * len(output_lens)
    return min(1.0, expected / (sum(max_new_tokens) + 1))
