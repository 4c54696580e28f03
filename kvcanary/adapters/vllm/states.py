"""vLLM's recurrent states: a block of such a group is one state, of a request or of a prefix in the prefix cache.

In mode `none` a request has one block for all its tokens. In mode `align`, that of the prefix cache, columns of its
table stand for positions: a forward goes on in the column of its last token, and where that is another than the one
before it, the state is copied there first. What was left at the end of a full block is what a hit begins from. Kernels
of some models leave one more on their way through a prompt, in the last full block before its end.

A server that drafts gives a request a block more for each draft. A forward leaves the state behind its n-th token in
column n, and the next one goes on from that of the last token that was accepted. Which of its rows do so its metadata
says, by which the kernels run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.hosted.states import NOT_WATCHED, WatchedStates
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Forward, described
from kvcanary.adapters.vllm.owners import NULL_BLOCK, Given
from kvcanary.errors import PlanError
from kvcanary.pools.state_views import StateView
from kvcanary_kernels.watch.state_rows import Draft

NONE, ALIGN = "none", "align"


@dataclass(eq=False)
class StateGroup:
    """The states of one group of layers.

    number: of vLLM's group;  block_size: tokens of a block;  is_aligned: columns of its table are positions
    checkpoints: tokens of which a state that is left within a forward has absorbed a multiple; 0: none is left
    layer: the name of one
    """

    number: int
    block_size: int
    is_aligned: bool
    checkpoints: int
    watched: WatchedStates
    layer: str = ""


class BlockStates:
    """The states of one worker, in every group of them."""

    def __init__(self, groups: Sequence[StateGroup], block_sizes: Sequence[int]) -> None:
        """block_sizes: of all groups of vLLM, tokens of a block"""
        self.groups, self._block_sizes = groups, block_sizes

    @property
    def described(self) -> list[dict[str, Any]]:
        """As the certificate says what is watched."""
        return [described(group.watched.view.whole) for group in self.groups]

    def given(self, given: Iterable[Given]) -> None:
        """Requests are given blocks: those whose entries they do not have yet are no state that anybody left, in
        whichever group.
        """
        blocks = {block for one in given for block in self._new(*one)}
        for group in self.groups if blocks else ():
            group.watched.granted(group.watched.canary.memory.upload(torch.tensor(sorted(blocks))))

    def _new(self, _: str, blocks: Sequence[Sequence[int]], length: int | None) -> Iterator[int]:
        for own, size in zip(blocks, self._block_sizes, strict=True):
            yield from (block for block in own[(length or 0) // size :] if block != NULL_BLOCK)

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied, (from, to)."""
        for group in self.groups:
            sources, entries = group.watched.canary.memory.upload(torch.tensor(pairs)).unbind(1)
            group.watched.copied(sources, entries)

    def taken(self, forward: Forward, tables: Sequence[Tensor], metadata: Mapping[str, Any] | None = None) -> None:
        """A forward that was read goes on from its rows' states.

        tables: by vLLM's group, in batch order;  metadata: of a server that drafts, by layer
        """
        for group in self.groups:
            group.watched.begin(forward)
            if metadata is not None:
                group.watched.taken_by(draft_of(metadata[group.layer]))
                continue
            block_size = group.block_size if group.is_aligned else 0
            group.watched.taken(tables[group.number], block_size, group.checkpoints)

    def left(self) -> None:
        """The forward has run."""
        for group in self.groups:
            group.watched.left()


def is_state(spec: Any) -> bool:
    """Whether what a group of layers keeps is a state, and not K and V."""
    return hasattr(one_of(spec), "mamba_cache_mode")


def one_of(spec: Any) -> Any:
    """The spec of one layer, where a group's says them all."""
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


def not_followed(spec: Any, drafts: bool, connector: bool) -> str | None:
    """Why the states of such a group are not watched; None: they are."""
    own, mode = one_of(spec), one_of(spec).mamba_cache_mode
    if mode not in (NONE, ALIGN):
        return f"{NOT_WATCHED}with --mamba-cache-mode {mode} kernels leave further ones within a forward"
    if connector:
        return f"{NOT_WATCHED}a connector loads them, and tells which only in entries"
    if (drafts or own.num_speculative_blocks) and not (mode == NONE and is_delta(own)):
        return f"{NOT_WATCHED}where a server drafts, only those of gated delta nets are, without the prefix cache"
    return None


def is_delta(spec: Any) -> bool:
    """Whether the layers are gated delta nets, of which metadata name the blocks of each draft."""
    return str(getattr(getattr(spec, "mamba_type", None), "name", "")) == "GDN_ATTN"


def draft_of(metadata: Any) -> Draft:
    """Which states the kernels of gated delta nets are told that rows have."""
    columns, accepted = metadata.spec_state_indices_tensor, metadata.num_accepted_tokens
    return Draft(metadata.spec_sequence_masks, columns, accepted, metadata.non_spec_state_indices_tensor)


def group_of(
    canary: PagedCanary, number: int, place: int, spec: Any, layers: Sequence[Any], alignment: int, layer: str = ""
) -> StateGroup:
    """The watched states of these layers. PlanError where they are no dense rows of whole words.

    number: of vLLM's group;  place: of it among those of states;  alignment: of tokens that may be hit
    layer:  the name of one
    """
    own = one_of(spec)
    drafts = int(own.num_speculative_blocks)
    parts = list(zip(*(layer.kv_cache for layer in layers), strict=True))
    names = ("conv", "ssm") if len(parts) == 2 else [f"state {part}" for part in range(len(parts))]
    name, named = f"states {place}" if place else "states", dict(zip(names, map(list, parts), strict=True))
    if drafts:  # windows stay in the first column, and are moved within it by what was accepted
        named.pop("conv", None)
    try:
        view = StateView(name, named)
    except PlanError as error:
        raise PlanError(f"{NOT_WATCHED}{error}") from error
    is_aligned = own.mamba_cache_mode == ALIGN
    checkpoints = alignment if is_aligned and getattr(own, "num_prefill_checkpoint_blocks", 0) else 0
    watched = WatchedStates(canary, view, place, 1 + drafts)
    return StateGroup(number, own.block_size, is_aligned, checkpoints, watched, layer)


def states_of(canary: PagedCanary, groups: Sequence[Any], context: Mapping[str, Any], alignment: int) -> BlockStates:
    """The states of all of vLLM's groups that keep some; context: layers by name, alignment as in `group_of`."""
    own = list[StateGroup]()
    for number, group in enumerate(groups):
        if is_state(group.kv_cache_spec):
            layers = [context[name] for name in group.layer_names]
            spec, layer = group.kv_cache_spec, group.layer_names[0]
            own.append(group_of(canary, number, len(own), spec, layers, alignment, layer))
    return BlockStates(own, [one_of(group.kv_cache_spec).block_size for group in groups])
