"""What all ranks of an engine must have alike: once, its sizes; each step, lengths, tokens, pages, and copied bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from kvcanary import CanaryConfig
from kvcanary.ranks import Agreement, Levels, RanksDisagreeError, StateSum, level
from spec_engine.memory.kv_memory import KVMemory
from spec_engine.memory.sizes import Sizes
from spec_engine.models.decoder import Decoder, DecoderOutput
from spec_engine.request import Request
from spec_engine.step.runner import StepResult

if TYPE_CHECKING:
    from kvcanary import CanaryManager

HIDDEN = "hidden states"
PLANNED, COLLECTED = 0, 1  # phases of a step
_events = structlog.get_logger("kvcanary")


def with_common_seed(config: CanaryConfig, group: dist.ProcessGroup) -> CanaryConfig:
    """The same, where it has no seed with one that the first rank draws: fingerprints of ranks are compared."""
    seeds = [config.drawn_seed()]
    dist.broadcast_object_list(seeds, dist.get_global_rank(group, 0), group)
    return config if config.seed is not None else replace(config, seed=seeds[0])


class RankWatch:
    """Compares each step of an engine with those of the other ranks, for its canary."""

    def __init__(
        self,
        canary: CanaryManager,
        group: dist.ProcessGroup,
        model: Decoder,
        memory: KVMemory,
        sizes: Sizes,
    ) -> None:
        """RanksDisagreeError where ranks were started otherwise.

        Hidden states are compared where all ranks compute the same ones of known tokens: else a warning says so.
        """
        self._canary, self._agreement, self._model, self._memory = canary, Agreement(group), model, memory
        self._device = model.norm_weight.device
        self._copies = canary.copies(self._agreement.num_ranks)
        self._hidden: StateSum | None = StateSum(model.config.hidden_size, model.norm_weight.dtype, self._device)
        self._check(0, self._shape(sizes), PLANNED)
        self._arm(self._hidden)

    @property
    def num_sums(self) -> int:
        """That `take` gives."""
        return len(self._copies.pools) + (self._hidden is not None)

    def take(self) -> list[Tensor]:
        """Sums of all that was launched, [] int64 on the device; some go on from there with the next launch."""
        return [*self._copies.take(), *([] if self._hidden is None else [self._hidden.total])]

    def planned(self, step: int, requests: Sequence[Request], ends: Sequence[int]) -> None:
        """What the forward that is next is of, with all its pages: ranks that differ there would hang in its sums.

        ends: by request, the end of its prompt chunk, 0 where it decodes. Raises as `check` does.
        """
        own = list(zip(requests, ends, strict=True))
        free = [self._memory.allocator.num_free, self._memory.num_free_places]
        rows = {request.request_id: [request.committed_len, request.cached_len, end] for request, end in own}
        pages = {request.request_id: request.pages for request in requests}
        self._check(step, {"rows": level(rows), "pages": level({"": free} | pages)}, PLANNED)

    def check(self, step: int, result: StepResult) -> None:
        """Of a step that the host has collected. KVCorruptionError where the canary's mode stops the engine.

        RanksDisagreeError in every mode for ranks that decided otherwise (X1): they have other histories.
        """
        own = [(part.request.request_id, part) for part in result.parts]
        levels = {
            "lengths": level({name: [part.committed_len] for name, part in own}),
            "tokens": level({name: part.tokens for name, part in own}, is_private=True),
            **self._copies.levels(result.sums[: len(self._copies.pools)]),
        }
        if self._hidden is not None:
            levels[HIDDEN] = self._hidden.level(result.sums[-1])
        self._check(step, levels, COLLECTED)

    def _check(self, step: int, levels: Levels, phase: int) -> None:
        try:
            self._agreement.check(step, levels, phase)
        except RanksDisagreeError as error:
            self._canary.ranks_differ(error)
            if error.code == "X1":
                raise

    def _shape(self, sizes: Sizes) -> Levels:
        """Pages, page size and rows of the engine, layers and vocabulary of its model, and the canary's seed."""
        model, tier = self._model.config, self._memory.tier
        shape = [sizes.num_pages, sizes.page_size, sizes.num_rows, sizes.reserve, model.num_layers, model.vocab_size]
        shape.append(0 if tier is None else tier.num_pages)
        return {"shape": level({"": shape}), "seed": level({"": list(self._canary.seed_id.encode())}, is_private=True)}

    def watched(self, model: Decoder) -> Decoder:
        """The same model for one engine, whose hidden states are compared."""
        return model if self._hidden is None else cast(Decoder, _Watched(model, self._hidden))

    @torch.inference_mode()
    def _arm(self, hidden: StateSum) -> None:
        """The self-test: known tokens, whose attention gives back its queries."""
        tokens = torch.arange(8, device=self._device)
        hidden(self._model(tokens, tokens, _Queries()).hidden)
        try:
            self._agreement.check(0, {HIDDEN: hidden.level(int(hidden.total))})
        except RanksDisagreeError as error:
            self._hidden = None
            _events.warning("kvcanary.hidden_states_not_compared", reason=str(error))


class _Watched:
    """What an engine runs in the place of its model: other engines of the same model are not touched."""

    def __init__(self, model: Decoder, hidden: StateSum) -> None:
        self._model, self._hidden = model, hidden

    def __call__(self, *args: Any, **kwargs: Any) -> DecoderOutput:
        output: DecoderOutput = self._model(*args, **kwargs)
        self._hidden(output.hidden)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Queries:
    """Attention of the self-test."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q
