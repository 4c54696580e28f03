"""Bytes that move in watched pools: copied, zeroed and loaded slots. Records follow, what arrived is read at once.

Engines tell of blocks or of slots: `slots_of` gives those of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import ContentNames, Event, Group, Layers, Load, LoadedBlock, RowOf, all_layers
from kvcanary.dumps.watched_events import COPIED, LOADED, ZEROED
from kvcanary.names.sums import weights_of
from kvcanary.pools.launch_site import pack_site
from kvcanary.records.dispatch import ops_for
from kvcanary_kernels.content.fingerprint import fingerprint
from kvcanary_kernels.record.bitmap import bitmaps_of
from kvcanary_kernels.record.layout import CHAIN, SEAL
from kvcanary_kernels.record.seal import identity_words, seal_torch, seal_values
from kvcanary_kernels.watch.walk import first_seen, table_slots

MOST_FAILED = 4096  # blocks whose load failed that are remembered, for reports
NO_NAMES = "entries loaded under a prefix that nobody wrote here"


def copied(
    canary: PagedCanary, group: Group, src: Tensor, dst: Tensor, requests: Mapping[int, str], what: str = "blocks"
) -> None:
    """Slots were copied: records follow, and what arrived is read at once (T1).

    src, dst: [n] int64 slots; requests: whose they are, by block; what: the engine copies, for the report
    """
    canary.recent.moved(COPIED, group, src, dst)
    held = group.records[src]
    held[:, SEAL] += seal_values(identity_words(held), dst, 0, canary.memory.identity)
    held[:, SEAL] -= seal_values(identity_words(held), src, 0, canary.memory.identity)
    group.records[dst] = held
    for layers in group.layers:
        layers.fingerprints[:, :, dst] = layers.fingerprints[:, :, src]
        layers.stamps[dst] = layers.stamps[src]
        judged = layers.stamps[dst] == held[:, CHAIN]
        _event(canary, f"a copy of {what}", group, layers, dst, requests, judged)


def moved(
    canary: PagedCanary, group: Group, src: Tensor, dst: Tensor, move: Callable[[], object], row_of: RowOf | None = None
) -> None:
    """Let an engine move entries that have no records yet; what arrived must be what lay there before (T1).

    src, dst: [n] slots, of any integer type; pairs within the null slots are padding; row_of: as an `Event` has it
    """
    src, dst = src.to(torch.int64), dst.to(torch.int64)
    before = [fingerprints_of(layers, src) for layers in group.layers]
    move()
    _compare(canary, group, dst, before, dst >= group.null_slots, "a move of entries", row_of)


def expect_equal(
    canary: PagedCanary, group: Group, dst: Tensor, src: Tensor, judged: Tensor, what: str, row_of: RowOf | None = None
) -> None:
    """Slots [n], of any integer type, that should be copies of others, where `judged` [n] bool says so (T1).

    row_of: as an `Event` has it
    """
    wanted = [fingerprints_of(layers, src.to(torch.int64)) for layers in group.layers]
    _compare(canary, group, dst.to(torch.int64), wanted, judged, what, row_of)


def fingerprints_of(layers: Layers, slots: Tensor) -> Tensor:
    """[layers, n] int64: fingerprint a of every layer of slots [n] int64, by their bytes now; 0 outside the pool."""
    own = torch.zeros(layers.rows.num_layers, len(slots), dtype=torch.int64, device=slots.device)
    fingerprint(layers.rows, slots, layers.keys, fingerprint_a=own, launches=slots.is_cuda)
    return own


def _compare(
    canary: PagedCanary,
    group: Group,
    slots: Tensor,
    wanted: Sequence[Tensor],
    judged: Tensor,
    what: str,
    row_of: RowOf | None,
) -> None:
    """wanted: by pool of layers, [layers, n] fingerprints."""
    for layers, own in zip(group.layers, wanted, strict=True):
        mismatch = bitmaps_of((fingerprints_of(layers, slots) != own) & judged)
        canary.memory.total += (mismatch != 0).any(1).sum()
        canary.events.append(
            Event("T1", what, layers, slots.clone(), mismatch, group, {}, by_record=False, row_of=row_of)
        )


def zeroed(canary: PagedCanary, group: Group, slots: Tensor, requests: Mapping[int, str], what: str = "blocks") -> None:
    """Slots [n] int64 were zeroed: nobody's bytes lie there now, and they must be zeros (T1)."""
    canary.recent.moved(ZEROED, group, slots)
    group.records[slots] = 0
    for layers in group.layers:
        layers.stamps[slots] = 0
        layers.fingerprints[0, :, slots] = layers.keys.start_a[:, None]
        layers.fingerprints[1, :, slots] = 0
        _event(canary, f"zeroed {what}", group, layers, slots, requests)


def failed(canary: PagedCanary, group: Group, slots: Tensor, connector: str) -> None:
    """Slots [n] int64 of which a connector says that their load failed: to read them is R12 until somebody writes."""
    group.records[slots] = 0
    for layers in group.layers:
        layers.stamps[slots] = 0
    blocks = (slots // group.block_size).unique().tolist()
    canary.failed_loads |= {(group.number, block): (connector, canary.step) for block in blocks}
    for block in list(canary.failed_loads)[:-MOST_FAILED]:
        del canary.failed_loads[block]


def loaded(
    canary: PagedCanary,
    row: tuple[int, str],
    tokens: Tensor,
    chains: Tensor,
    lines: Sequence[Tensor],
    names: Sequence[ContentNames],
) -> int:
    """The first entries of a row came from elsewhere, but for those that lie there with records of their own.

    Gives how many of them could be compared with what was once written under the same prefix.

    row: its number and its request; tokens, chains: [n] int64 on the host, of this prefix
    lines: by group, the row's line of the block table
    names: by group, of contents; bytes that are not those of their name are T1
    """
    (number, request), compared, memory, every_chain = row, 0, canary.memory, chains
    tokens, chains = memory.upload(tokens), memory.upload(chains)
    step, site = memory.upload(torch.tensor([canary.step + 1, pack_site("load", 0)])).split(1)
    positions, none = torch.arange(len(chains), device=memory.device), torch.zeros_like(step)
    for group, line, known in zip(canary.groups, lines, names, strict=True):
        slots = table_slots(line[None], positions[None], group.block_size)[0]
        held = group.records[slots.clamp(0, group.records.shape[0] - 1)]
        is_in_pool = (slots >= group.null_slots) & (slots < group.records.shape[0])
        is_held = is_in_pool & (held[:, CHAIN] == chains)
        is_new = is_in_pool & ~is_held
        is_new &= positions >= first_seen(torch.tensor(len(chains)), group.window)  # others may be anybody's
        row_slots, is_there = slots, is_held | is_new
        slots, own, places, words = slots[is_new], chains[is_new], positions[is_new], tokens[is_new]
        if not len(slots):
            continue
        seal_torch(  # no kernel is compiled while an engine serves
            group.records, slots, tokens=words, positions=places, chains=own, step=step, sites=site, generations=none,
            requests=memory.truth.uids[number : number + 1], pool_id=0, keys=memory.identity,
        )  # fmt: skip
        layers = group.layers[0]
        before = layers.fingerprints[0][:, slots]
        for each in group.layers:
            canary.launches.take_now(group, each, slots, own)
        memory.overwritten(group, slots)
        wanted, is_known = known.fingerprint_of(own)
        wrong = is_known & (layers.fingerprints[0, :, slots].sum(0) != wanted)
        blocks = _judge_blocks(group, known, every_chain, (row_slots, is_there), places, is_known, wrong)
        for block in blocks:
            wrong[block.entries] = True
        canary.coverage.skip(NO_NAMES, int((~is_known).sum()))
        compared += int(is_known.sum())
        memory.total += wrong.sum()
        requests = dict.fromkeys((slots // group.block_size).tolist(), request)
        canary.recent.moved(LOADED, group, request, slots)
        what = f"an external load by {known.connector}"
        load = None
        if bool(wrong.any()):
            found = layers.fingerprints[0][:, slots]
            load = Load(
                known, request, canary.step + 1, places, own, slots, is_known, wrong, wanted, before, found, blocks
            )
        canary.events.append(
            Event("T1", what, layers, slots, wrong[:, None] * all_layers(layers), group, requests, load)
        )
    return compared


def _judge_blocks(
    group: Group,
    known: ContentNames,
    chains: Tensor,
    row: tuple[Tensor, Tensor],
    places: Tensor,
    is_known: Tensor,
    wrong: Tensor,
) -> list[LoadedBlock]:
    """Blocks that are not what their names say, of those whose entries have no names of their own.

    A block that is not what this worker once wrote may be what another did.

    chains: [m] int64 on the host, of the row;  row: its slots [m], and which of them hold this prefix now
    places: [n] int64 positions of what was loaded;  is_known: [n] bool, set where a block has a name
    wrong: [n] bool, not what this worker wrote; cleared where a block is what its name says
    """
    slots, is_there = row
    size, count = group.block_size, len(slots) // group.block_size
    if not count or known.store is None:
        return []
    whole = is_there[: count * size].view(count, size).all(1).tolist()
    unnamed = set(places[~is_known].tolist())
    in_doubt = unnamed | set(places[wrong].tolist())
    by_block: dict[int, list[int]] = {}
    for entry, position in enumerate(places.tolist()):
        by_block.setdefault(position // size, []).append(entry)
    asked = [block for block in sorted({place // size for place in in_doubt}) if block < count and whole[block]]
    ends = {int(chains[(block + 1) * size - 1]): block for block in asked}
    told, found_wrong, weights = known.of_blocks(list(ends)), [], weights_of(size, slots.device)
    for chain, ways in told.items():
        block, own = ends[chain], by_block[ends[chain]]
        held = group.layers[0].fingerprints[0][:, slots[block * size : (block + 1) * size]]
        found = int((held.sum(0) * weights).sum())
        is_known[own] = True
        if found in ways:
            wrong[own] = False
        elif not bool(wrong[own].any()):  # else it is known which entries differ
            found_wrong.append(LoadedBlock(own, chain, found, ways))
    return found_wrong


def _event(
    canary: PagedCanary,
    what: str,
    group: Group,
    layers: Layers,
    slots: Tensor,
    requests: Mapping[int, str],
    judged: Tensor | None = None,
) -> None:
    """Read slots at once, all or where `judged` says so (T1)."""
    if canary.config.content == "write":
        return
    mismatch = torch.zeros(len(slots), 2, dtype=torch.int64, device=slots.device)
    check = ops_for(slots.device).check_content
    check(layers.rows, slots, layers.keys, layers.fingerprints[0], mismatch=mismatch)
    if judged is not None:
        mismatch *= judged[:, None]
    canary.memory.total += (mismatch != 0).any(1).sum()
    canary.events.append(Event("T1", what, layers, slots, mismatch, group, requests))


def slots_of(group: Group, blocks: Tensor) -> Tensor:
    """[n] int64: all slots of these blocks, block by block."""
    size = group.block_size
    return (blocks.to(torch.int64)[:, None] * size + torch.arange(size, device=blocks.device)).flatten()
