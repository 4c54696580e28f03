"""vLLM's recurrent states: a block of such a group is one state, of a request or of a prefix in the prefix cache.

In mode `none` a request has one block for all its tokens. In mode `align`, that of the prefix cache, columns of its
table stand for positions: a forward goes on in the column of its last token, and where that is another than the one
before it, the state is copied there first. What was left at the end of a full block is what a hit begins from. Kernels
of some models leave one more on their way through a prompt, in the last full block before its end.

A server that drafts gives a request a block more for each draft. A forward leaves the state behind its n-th token in
the n-th column from its own on, and the next one goes on from that of the last token that was accepted. Which of its
rows do so its metadata says, by which the kernels run. Where accepted tokens fill a block, vLLM copies the state behind
the last of them into that block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvcanary.adapters.hosted.states import NOT_WATCHED, DraftedStates, WatchedStates
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Forward, described
from kvcanary.adapters.vllm.owners import NULL_BLOCK, Given
from kvcanary.errors import PlanError
from kvcanary.pools.state_views import StateView
from kvcanary_kernels.watch.drafted_states import Blocks, Draft

NONE, ALIGN = "none", "align"
#: Layers of which metadata name the blocks of each draft.
DRAFTING = ("GDN_ATTN", "MAMBA2")


@dataclass(eq=False)
class StateGroup:
    """The states of one group of layers.

    number: of vLLM's group;  block_size: tokens of a block;  is_aligned: columns of its table are positions
    checkpoints: tokens of which a state that is left within a forward has absorbed a multiple; 0: none is left
    layer: the name of one
    drafted: where the server drafts
    """

    number: int
    block_size: int
    is_aligned: bool
    checkpoints: int
    watched: WatchedStates
    layer: str = ""
    drafted: DraftedStates | None = None

    @property
    def every(self) -> list[WatchedStates]:
        """All that lies in its blocks."""
        return [self.watched] if self.drafted is None else [self.watched, self.drafted.windows]


class BlockStates:
    """The states of one worker, in every group of them."""

    def __init__(self, groups: Sequence[StateGroup], block_sizes: Sequence[int]) -> None:
        """block_sizes: of all groups of vLLM, tokens of a block"""
        self.groups, self._block_sizes = groups, block_sizes
        canary = groups[0].watched.canary
        self._drafts = DraftReader(canary.num_rows, canary.memory.device)
        self._gone = set[int]()  # blocks that the scheduler's pool has taken back for the step that is next

    @property
    def described(self) -> list[dict[str, Any]]:
        """As the certificate says what is watched."""
        return [described(own.view.whole) for group in self.groups for own in group.every]

    def given(self, given: Iterable[Given]) -> None:
        """A step begins that gives blocks to requests: in those whose entries they do not have yet nobody has left a
        state, and a row may go on from those of its own group alone.
        """
        blocks = [set[int]() for _ in self._block_sizes]
        for one in given:
            for own, new in zip(blocks, self._new(*one), strict=True):
                own |= new
        every, gone = frozenset[int]().union(*blocks), frozenset(self._gone)
        self._gone.clear()
        uploaded = cache(self._uploaded)
        for group in self.groups:
            granted, free = frozenset(blocks[group.number]), every if group.is_aligned else every | gone
            for state in group.every if free else ():
                state.freed(uploaded(free))
                if granted:
                    state.granted(uploaded(granted))

    def _uploaded(self, blocks: frozenset[int]) -> Tensor:
        return self.groups[0].watched.canary.memory.upload(torch.tensor(sorted(blocks)))

    def freed(self, blocks: Sequence[int]) -> None:
        """The scheduler's pool has taken these back, before `given` is told of the step: whoever goes on from one of
        them has no right to. In mode `align` somebody may be given it as a prefix.
        """
        self._gone.update(blocks)

    @property
    def _every(self) -> list[WatchedStates]:
        return [own for group in self.groups for own in group.every]

    def _new(self, _: str, blocks: Sequence[Sequence[int]], length: int | None) -> Iterator[set[int]]:
        """By group, those whose entries the request does not have yet."""
        for own, size in zip(blocks, self._block_sizes, strict=True):
            yield set(own[(length or 0) // size :]) - {NULL_BLOCK}

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied, (from, to)."""
        for own in self._every:
            own.copied(*own.canary.memory.upload(torch.tensor(pairs)).unbind(1))

    def taken(self, forward: Forward, tables: Sequence[Tensor], metadata: Mapping[str, Any] | None = None) -> None:
        """A forward that was read goes on from its rows' states.

        tables: by vLLM's group, in batch order;  metadata: of a server that drafts, by layer
        """
        for group in self.groups:
            for own in group.every:
                own.begin(forward)
            if group.drafted is not None and metadata is not None:
                group.drafted.taken(self._drafts.read(metadata[group.layer]), tables[group.number])
                continue
            block_size = group.block_size if group.is_aligned else 0
            group.watched.taken(tables[group.number], block_size, group.checkpoints)

    def prepare(self, forward: Forward, tables: Sequence[Tensor]) -> None:
        """Compile and capture what forwards of every size launch; `forward`: an empty one, behind
        `PagedCanary.prepare`; tables: as of `taken`
        """
        for group in (*self.groups, *self.groups):  # as they are, captured
            if group.drafted is not None:
                group.drafted.prepare(forward, tables[group.number])
                continue
            block_size = group.block_size if group.is_aligned else 0
            group.watched.prepare(forward, tables[group.number], block_size, group.checkpoints)
        for own in self._every:
            own.forget()

    def left(self) -> None:
        """The forward has run."""
        for own in self._every:
            own.left()

    def accepted(self, counts: Tensor) -> None:
        """Of a server that drafts, how many tokens of each row were, [n] in batch order; copies for it were made."""
        for group in self.groups:
            if group.drafted is not None:
                group.drafted.accepted(counts)


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
    blocks = own.num_speculative_blocks
    if (drafts or blocks) and not (blocks and kind_of(spec) in DRAFTING):
        return f"{NOT_WATCHED}where a server drafts, only those of gated delta nets and Mamba 2 are, a block a draft"
    return None


def kind_of(spec: Any) -> str:
    """Which layers these are, as vLLM calls them."""
    return str(getattr(getattr(one_of(spec), "mamba_type", None), "name", ""))


class DraftReader:
    """What metadata say of where the states of a server that drafts are."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows, self._one = num_rows, torch.ones(num_rows, dtype=torch.int32, device=device)
        self._are_first = torch.cat((self._one, torch.zeros_like(self._one))).bool()

    def read(self, metadata: Any) -> Draft:
        """Of gated delta nets, whose rows may lie in any order, or of Mamba 2, with rows that decode in front."""
        if hasattr(metadata, "spec_sequence_masks"):
            columns, accepted = metadata.spec_state_indices_tensor, metadata.num_accepted_tokens
            return Draft(metadata.spec_sequence_masks, columns, accepted, metadata.non_spec_state_indices_tensor)
        count, accepted = metadata.num_decodes, metadata.num_accepted_tokens
        accepted = self._one if accepted is None else accepted
        is_draft = self._are_first[self._num_rows - count :] if count else None
        return Draft(is_draft, metadata.state_indices_tensor_d, accepted, metadata.state_indices_tensor_p)


def group_of(
    canary: PagedCanary, number: int, place: int, spec: Any, layers: Sequence[Any], alignment: int, layer: str = "",
    num_groups: int = 1,
) -> StateGroup:  # fmt: skip
    """The watched states of these layers. PlanError where they are no dense rows of whole words.

    number: of vLLM's group;  place: of it among those of states, of which there are num_groups
    alignment: of tokens that may be hit;  layer: the name of one
    """
    own = one_of(spec)
    drafts = int(own.num_speculative_blocks)
    parts = list(zip(*(layer.kv_cache for layer in layers), strict=True))
    names = ("conv", "ssm") if len(parts) == 2 else [f"state {part}" for part in range(len(parts))]
    named, end = dict(zip(names, map(list, parts), strict=True)), f" {place}" if place else ""
    is_aligned = own.mamba_cache_mode == ALIGN
    checkpoints = alignment if is_aligned and getattr(own, "num_prefill_checkpoint_blocks", 0) else 0
    most_left = 1 + drafts + (drafts > 0 and checkpoints > 0)
    if drafts and len(parts) != 2:
        raise PlanError(f"{NOT_WATCHED}where a server drafts, they are a window and a matrix, not {len(parts)} parts")
    try:
        windows = StateView(f"windows{end}", {"conv": named.pop("conv")}) if drafts else None
        view = StateView(f"states{end}", named)
    except PlanError as error:
        raise PlanError(f"{NOT_WATCHED}{error}") from error
    watched = WatchedStates(canary, view, place, most_left)
    group = StateGroup(number, own.block_size, is_aligned, checkpoints, watched, layer)
    if windows is not None:
        beside = WatchedStates(canary, windows, num_groups + place, counted=False)
        blocks = Blocks(view.num_entries, view.null_entries, own.block_size if is_aligned else 0, checkpoints)
        group.drafted = DraftedStates(watched, beside, blocks, most_left)
    return group


def states_of(canary: PagedCanary, groups: Sequence[Any], context: Mapping[str, Any], alignment: int) -> BlockStates:
    """The states of all of vLLM's groups that keep some; context: layers by name, alignment as in `group_of`."""
    numbers, own = [number for number, group in enumerate(groups) if is_state(group.kv_cache_spec)], list[StateGroup]()
    for place, number in enumerate(numbers):
        spec, names = groups[number].kv_cache_spec, groups[number].layer_names
        layers = [context[name] for name in names]
        own.append(group_of(canary, number, place, spec, layers, alignment, names[0], len(numbers)))
    return BlockStates(own, [one_of(group.kv_cache_spec).block_size for group in groups])
