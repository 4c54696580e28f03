"""Plan: what every row of a forward reads and every entry writes, from tensors that only the device has read.

One launch judges the write plan and the lengths of rows, and derives the arguments of the operations that follow.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcanary_kernels.judge.admit import page_code, page_codes
from kvcanary_kernels.judge.forward import NO_PARENT, NO_SLOT, ROOT, ForwardPlan, Planned
from kvcanary_kernels.record import layout as record
from kvcanary_kernels.record.arguments import expect_int64, expect_records
from kvcanary_kernels.record.device import (
    BLOCK,
    CHAIN,
    COLUMNS,
    R2,
    R10,
    W1,
    W4,
    W5,
    W9,
    follow,
    live_count,
    programs_for,
    tl,
    triton,
)
from kvcanary_kernels.record.layout import CODE_BITS
from kvcanary_kernels.record.overlap import overlap_options
from kvcanary_kernels.record.table import device_entry_at, entry_at, segment_entries

NO_CLAIM = 2**63 - 1  # of a slot that no entry of a running forward writes
NODE_SHIFT = 16  # of a branch or node in the site word
DEVICE_NO_SLOT = tl.constexpr(NO_SLOT)
NODE_BITS = tl.constexpr(NODE_SHIFT)


def plan(
    forward: ForwardPlan,
    planned: Planned,
    *,
    records: Tensor,
    generations: Tensor,
    states: Tensor,
    owners: Tensor,
    claims: Tensor,
    roots: Tensor,
    site: int,
    width: int,
    page_size: int,
    null_slots: int,
    before: Tensor | None = None,
    launches: bool = True,
) -> None:
    """Judge the write plan (W1 to W5, W7 to W9, R2) and row lengths (R10); derive `planned`. May be captured.

    records:     [num_slots, 8] int64, before this forward is sealed
    generations, states, owners: [num_pages] int64, device truth of pages (verify)
    claims:      [num_slots] int64, NO_CLAIM everywhere; afterwards the first entry that writes each slot, until
                 settle withdraws it. Entries that share a slot: the first is sealed and stored, the others are W4
    roots:       [rows] int64, chain value that position 0 of each row continues
    site:        kind and index of the forward (a record's site without branch or node)
    width:       rows a request, which number the branches: 1, or the tree width of a draft forward
    before:      [n] int64, chain value that each row of the draft forward before has written, with a lineage: rows go
                 on from these, and not from what they read (settle compares); a branch that is none has chain 0
    """
    rows, entries, num_slots = forward.num_rows, forward.num_entries, len(records)
    expect_records(records)
    expect_int64(-(-num_slots // page_size), generations=generations, states=states, owners=owners)
    expect_int64(num_slots, claims=claims)
    expect_int64(rows, roots=roots, starts=planned.starts, seeds=planned.seeds)
    expect_int64(entries, safe_slots=planned.safe_slots)
    expect_int64(entries + rows, codes=planned.codes, asked=planned.asked)
    expect_int64(rows, row_violations=planned.row_violations)
    expect_int64(rows * forward.ancestors, ancestors=planned.ancestors.view(-1))
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}: a request has at least one row")
    if (before is None) != (forward.lineage is None):
        raise ValueError("a lineage and the chains of the forward before must be given together, got only one of them")
    if before is not None:
        expect_int64(before.numel(), before=before)
    if launches:
        if entries:
            _claim_kernel[(triton.cdiv(entries, BLOCK),)](
                forward.bounds,
                forward.slots,
                claims,
                forward.num_live,
                planned.codes,
                planned.asked,
                planned.counted_starts,
                planned.counted_lengths,
                planned.live_entries,
                rows,
                entries,
                num_slots,
                null_slots,
                BLOCK_N=BLOCK,
                **overlap_options(claims.device),
            )
        if rows == 0:
            return
        _plan_kernel[(rows, programs_for(entries))](
            forward.indices,
            forward.row_starts,
            forward.row_ends,
            forward.bounds,
            forward.slots,
            forward.positions,
            forward.slots if forward.parents is None else forward.parents,
            forward.prefix_lens,
            forward.uids,
            forward.num_live,
            records,
            generations,
            states,
            owners,
            claims,
            roots,
            roots if forward.lineage is None else forward.lineage,
            roots if before is None else before,
            planned.starts,
            planned.read_lengths,
            planned.row_lengths,
            planned.seeds,
            planned.entry_seeds,
            planned.parents,
            planned.safe_slots,
            planned.places,
            planned.own_lengths,
            planned.ancestors,
            planned.row_violations,
            planned.generations,
            planned.requests,
            planned.sites,
            planned.codes,
            planned.asked,
            planned.counted_starts,
            planned.counted_lengths,
            rows,
            entries,
            forward.capacity,
            forward.ancestors,
            site,
            width,
            0 if before is None else before.numel(),
            num_slots,
            page_size,
            null_slots,
            IS_TREE=forward.parents is not None,
            HAS_LINEAGE=forward.lineage is not None,
            BLOCK_N=BLOCK,
            **overlap_options(claims.device),
        )
        return
    live = min(max(int(forward.num_live), 0), rows)
    live_entries = min(max(int(forward.bounds[live]), 0), entries)
    _claim(forward.slots[:live_entries], claims, num_slots, null_slots)
    _plan_padding(forward, planned, live, live_entries, null_slots)
    is_whole, judged = _plan_rows(forward, planned, live)
    planned.row_violations.zero_()
    planned.ancestors.copy_(_ancestors(forward, planned))
    at_root = judged & (planned.read_lengths == 0)
    planned.seeds.copy_(torch.where(at_root, roots, _chains_before(forward, planned, records, null_slots)))
    if before is not None:
        _go_on_from_parents(forward, planned, before, width)
    if not live_entries:
        return
    written = forward.bounds.diff()[:live]
    row = torch.arange(live, device=claims.device).repeat_interleave(written, output_size=live_entries)
    entry = torch.arange(live_entries, device=claims.device)
    nth, own = entry - forward.bounds[row], slice(live_entries)
    slots, whole, prefix = forward.slots[own], is_whole[row], planned.read_lengths[row]
    outside = (slots < 0) | (slots >= num_slots)
    null = ~outside & (slots < null_slots)
    valid = ~outside & ~null
    safe = torch.where(valid, slots, 0)
    page = safe // page_size
    fired = {"W1": outside, "R2": null, "W4": valid & (claims[safe] != entry)}
    fired |= {code: valid & by for code, by in page_codes(states[page], owners[page], forward.uids[row]).items()}
    refused = torch.stack(tuple(fired.values())).any(0)
    fired["W5"] = whole & (
        forward.positions[own] != _wanted_positions(forward, planned, row, entry, prefix + nth, prefix)
    )
    bits = torch.tensor([CODE_BITS[code] for code in fired], device=slots.device)
    planned.codes[own] = (torch.stack(tuple(fired.values())) * bits[:, None]).sum(0)
    planned.safe_slots[own] = torch.where(refused, NO_SLOT, slots)
    planned.places[own] = torch.where(whole, forward.row_starts[row] + prefix + nth, -1)
    planned.own_lengths[own] = whole.to(torch.int64)
    planned.entry_seeds[own] = planned.seeds[row]
    planned.generations[own] = generations[page]
    planned.requests[own] = forward.uids[row]
    node = row % width if forward.parents is None else nth
    planned.sites[own] = site | (node & 0xFFFF) << NODE_SHIFT


plan_torch = partial(plan, launches=False)


@triton.jit(do_not_specialize=["num_rows", "num_entries"])
def _claim_kernel(
    bounds,
    slots,
    claims,
    num_live,
    codes,
    asked,
    counted_starts,
    counted_lengths,
    live_entries,
    num_rows,
    num_entries,
    num_slots,
    null_slots,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Let the first entry of each slot claim it; padding entries must lie in null slots."""
    follow(OVERLAPS)
    live_rows = tl.maximum(live_count(num_live, num_rows, True), 0)
    num_entries = tl.zeros([], tl.int64) + num_entries
    live = tl.minimum(tl.maximum(tl.load(bounds + live_rows), 0), num_entries)
    o_e = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_e = o_e < num_entries
    slot = tl.load(slots + o_e, mask=m_e, other=0)
    m_claim = (o_e < live) & (slot >= null_slots) & (slot < num_slots)
    tl.atomic_min(claims + slot, o_e, mask=m_claim, sem="relaxed")
    tl.store(asked + o_e, slot, mask=m_e)
    is_null = (slot >= 0) & (slot < null_slots)
    tl.store(codes + o_e, tl.where(is_null, 0, W9).to(tl.int64), mask=m_e & (o_e >= live))
    if tl.program_id(0) == 0:
        tl.store(live_entries, live)
        tl.store(counted_starts + 2 * num_rows, live)
        tl.store(counted_lengths + 2 * num_rows, num_entries - live)


@triton.jit(do_not_specialize=["num_rows", "num_entries", "num_indices", "ancestors", "site", "num_before"])
def _plan_kernel(
    indices,
    row_starts,
    row_ends,
    bounds,
    slots,
    positions,
    parents,
    prefix_lens,
    uids,
    num_live,
    records,
    page_generations,
    states,
    owners,
    claims,
    roots,
    lineage,
    before,
    starts,
    read_lengths,
    row_lengths,
    seeds,
    entry_seeds,
    clean_parents,
    safe_slots,
    places,
    own_lengths,
    row_ancestors,
    row_violations,
    generations,
    requests,
    sites,
    codes,
    asked,
    counted_starts,
    counted_lengths,
    num_rows,
    num_entries,
    num_indices,
    ancestors,
    site,
    width,
    num_before,
    num_slots,
    page_size,
    null_slots,
    IS_TREE: tl.constexpr,
    HAS_LINEAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    i_row = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1).to(tl.int64)
    is_live = i_row < live_count(num_live, num_rows, True)
    start = tl.load(row_starts + i_row)
    end = tl.load(row_ends + i_row)
    first = tl.load(bounds + i_row)
    written = tl.maximum(tl.load(bounds + i_row + 1) - first, 0)
    is_whole = (start >= 0) & (end - start >= written) & (end <= num_indices)
    judged = is_whole & is_live
    prefix = tl.where(judged, end - start - written, 0)
    slot_before = device_entry_at(indices, start + prefix - 1, prefix > 0, num_indices)
    m_before = (prefix > 0) & (slot_before >= null_slots) & (slot_before < num_slots)
    continued = tl.load(records + slot_before * COLUMNS + CHAIN, mask=m_before, other=0)
    if HAS_LINEAGE:
        branch = tl.load(lineage + i_row)
        i_before = i_row // width * width + branch
        m_branch = (prefix > 0) & (branch >= 0) & (branch < width) & (i_before < num_before)
        continued = tl.load(before + i_before, mask=m_branch, other=0)
    seed = tl.where(judged & (prefix == 0), tl.load(roots + i_row), continued)
    if i_part == 0:
        tl.store(starts + i_row, tl.where(judged, start, 0))
        tl.store(read_lengths + i_row, prefix)
        tl.store(row_lengths + i_row, tl.where(judged, end - start, 0))
        tl.store(seeds + i_row, seed)
        tl.store(row_violations + i_row, tl.zeros([], tl.int64))
        for i_ancestor in range(ancestors):
            place = prefix - ancestors + i_ancestor
            slot = device_entry_at(indices, start + place, place >= 0, num_indices)
            tl.store(row_ancestors + i_row * ancestors + i_ancestor, slot)
        tl.store(counted_starts + i_row, first)
        tl.store(counted_lengths + i_row, tl.where(is_live, written, 0))
        truth_len = tl.load(prefix_lens + i_row)
        is_long = (truth_len >= 0) & (prefix != truth_len + ancestors)
        code = tl.where(is_live & (is_long | (is_whole == 0)), R10, 0).to(tl.int64)
        stray = tl.zeros([], tl.int64) + DEVICE_NO_SLOT
        if is_live == 0:
            code, stray = _judge_padding_row(indices, start, end, num_indices, null_slots, BLOCK_N)
        tl.store(codes + num_entries + i_row, code)
        tl.store(asked + num_entries + i_row, stray)
    if is_live == 0:
        return

    uid = tl.load(uids + i_row)
    for i_block in range(i_part * BLOCK_N, written, tl.num_programs(1) * BLOCK_N):
        o_j = i_block + tl.arange(0, BLOCK_N)
        o_e = first + o_j
        m_e = (o_j < written) & (o_e >= 0) & (o_e < num_entries)
        slot = tl.load(slots + o_e, mask=m_e, other=0)
        outside = (slot < 0) | (slot >= num_slots)
        null = (slot >= 0) & (slot < null_slots)
        valid = m_e & (outside == 0) & (null == 0)
        page = slot // page_size
        later = tl.load(claims + slot, mask=valid, other=0) != o_e
        code = page_code(page, valid, uid, states, owners) + tl.where(later, W4, 0)
        code = tl.where(outside, W1, tl.where(null, R2, code)).to(tl.int64)
        refused = code != 0
        wanted = prefix + o_j
        if IS_TREE:
            parent = tl.load(parents + o_e, mask=m_e, other=-1)
            inside = (parent >= first) & (parent < o_e)
            above = tl.load(positions + parent, mask=m_e & inside, other=0) + 1
            wanted = tl.where(inside, above, tl.where(parent == -1, prefix, -2))
            tl.store(clean_parents + o_e, tl.where(inside | (parent == -1), parent, -2), mask=m_e)
        position = tl.load(positions + o_e, mask=m_e, other=0)
        code += tl.where(is_whole & (position != wanted), W5, 0)
        tl.store(codes + o_e, code, mask=m_e)
        tl.store(safe_slots + o_e, tl.where(refused, DEVICE_NO_SLOT, slot), mask=m_e)
        tl.store(places + o_e, tl.where(is_whole, start + prefix + o_j, -1), mask=m_e)
        tl.store(own_lengths + o_e, tl.zeros_like(o_e) + is_whole.to(tl.int64), mask=m_e)
        tl.store(entry_seeds + o_e, tl.zeros_like(o_e) + seed, mask=m_e)
        tl.store(requests + o_e, tl.zeros_like(o_e) + uid, mask=m_e)
        generation = tl.load(page_generations + tl.where(valid, page, 0), mask=m_e, other=0)
        tl.store(generations + o_e, generation, mask=m_e)
        node = o_j if IS_TREE else tl.zeros_like(o_j) + i_row % width
        tl.store(sites + o_e, site | ((node & 0xFFFF) << NODE_BITS), mask=m_e)


@triton.jit
def _judge_padding_row(indices, start, end, num_indices, null_slots, BLOCK_N: tl.constexpr):
    """Code and first stray slot of a padding row: what it reads must lie in null slots."""
    start = tl.maximum(start, 0)
    end = tl.minimum(end, num_indices)
    i_stray = end
    for i_block in range(start, end, BLOCK_N):
        o_n = i_block + tl.arange(0, BLOCK_N)
        slot = device_entry_at(indices, o_n, o_n < end, num_indices)
        stray = (o_n < end) & ((slot < 0) | (slot >= null_slots))
        i_stray = tl.minimum(i_stray, tl.min(tl.where(stray, o_n, end)))
    is_stray = i_stray < end
    return tl.where(is_stray, W9, 0).to(tl.int64), device_entry_at(indices, i_stray, is_stray, num_indices)


def _claim(slots: Tensor, claims: Tensor, num_slots: int, null_slots: int) -> None:
    valid = (slots >= null_slots) & (slots < num_slots)
    entries = torch.arange(slots.numel(), device=slots.device)
    claims.scatter_reduce_(0, slots[valid], entries[valid], "amin")


def _plan_padding(forward: ForwardPlan, planned: Planned, live: int, live_entries: int, null_slots: int) -> None:
    """W9 where padding entries, or what padding rows read, lie in no null slot."""
    entries = forward.num_entries
    padding = forward.slots[live_entries:]
    is_null = (padding >= 0) & (padding < null_slots)
    planned.live_entries.fill_(live_entries)
    planned.counted_starts[-1:].fill_(live_entries)
    planned.counted_lengths[-1:].fill_(entries - live_entries)
    planned.asked[:entries] = forward.slots
    planned.codes[live_entries:entries] = torch.where(is_null, 0, CODE_BITS["W9"])
    planned.asked[entries:] = NO_SLOT
    planned.codes[entries:] = 0

    starts = forward.row_starts[live:].clamp(min=0)
    lengths = (forward.row_ends[live:].clamp(max=forward.capacity) - starts).clamp_(min=0)
    rows = torch.arange(live, forward.num_rows, device=starts.device).repeat_interleave(lengths)
    (places,) = segment_entries(lengths, rows.numel(), starts)
    slots = entry_at(forward.indices, places)
    for nth in ((slots < 0) | (slots >= null_slots)).nonzero().flatten().flip(0).tolist():  # the first one last
        planned.codes[entries + rows[nth]] = CODE_BITS["W9"]
        planned.asked[entries + rows[nth]] = slots[nth]


def _plan_rows(forward: ForwardPlan, planned: Planned, live: int) -> tuple[Tensor, Tensor]:
    """Lengths of rows and R10; [rows] bool each: which lie whole in the table, and which of these are live."""
    rows, entries = forward.num_rows, forward.num_entries
    written = forward.bounds.diff().clamp_(min=0)
    lengths = forward.row_ends - forward.row_starts
    is_whole = (forward.row_starts >= 0) & (lengths >= written) & (forward.row_ends <= forward.capacity)
    is_live = torch.arange(rows, device=written.device) < live
    judged = is_whole & is_live
    prefixes = torch.where(judged, lengths - written, 0)
    planned.starts.copy_(torch.where(judged, forward.row_starts, 0))
    planned.read_lengths.copy_(prefixes)
    planned.row_lengths.copy_(torch.where(judged, lengths, 0))
    planned.counted_starts[:rows] = forward.bounds[:-1]
    planned.counted_lengths[:rows] = torch.where(is_live, written, 0)
    is_long = (forward.prefix_lens >= 0) & (prefixes != forward.prefix_lens + forward.ancestors)
    planned.codes[entries:] |= torch.where(is_live & (is_long | ~is_whole), CODE_BITS["R10"], 0)
    return is_whole, judged


def _ancestors(forward: ForwardPlan, planned: Planned) -> Tensor:
    """[rows, ancestors] int64: slots that each row names in front of what it writes, NO_SLOT where it is shorter."""
    places = planned.read_lengths[:, None] + torch.arange(-forward.ancestors, 0, device=planned.starts.device)
    inside = torch.where(places >= 0, planned.starts[:, None] + places, -1)
    return entry_at(forward.indices, inside.flatten()).view_as(places)


def _chains_before(forward: ForwardPlan, planned: Planned, records: Tensor, null_slots: int) -> Tensor:
    """[rows] int64: the chain of the entry before the first that the row writes, 0 where none is known."""
    prefixes, num_slots = planned.read_lengths, records.shape[0]
    slots = entry_at(forward.indices, torch.where(prefixes > 0, planned.starts + prefixes - 1, -1))
    found = (slots >= null_slots) & (slots < num_slots)
    return torch.where(found, records[:, record.CHAIN][slots.clamp(0, num_slots - 1)], 0)


def _go_on_from_parents(forward: ForwardPlan, planned: Planned, before: Tensor, width: int) -> None:
    """Rows that read something go on from the entry of their branch's parent, whatever it is that they read."""
    lineage = forward.lineage
    if lineage is None:
        return
    row = torch.arange(len(lineage), device=lineage.device)
    parents = row // width * width + lineage
    is_branch = (lineage >= 0) & (lineage < width) & (parents < before.numel())
    chains = torch.where(is_branch, before[parents.clamp(0, before.numel() - 1)], 0)
    planned.seeds.copy_(torch.where(planned.read_lengths > 0, chains, planned.seeds))


def _wanted_positions(
    forward: ForwardPlan, planned: Planned, row: Tensor, entry: Tensor, following: Tensor, prefix: Tensor
) -> Tensor:
    """[live entries] int64: the position after the parent's; of a tree its parents are taken over, too."""
    if forward.parents is None:
        return following
    parents = forward.parents[: entry.numel()]
    inside = (parents >= forward.bounds[row]) & (parents < entry)
    planned.parents[: entry.numel()] = torch.where(inside | (parents == ROOT), parents, NO_PARENT)
    after = forward.positions[parents.clamp(0, forward.num_entries - 1)] + 1
    return torch.where(inside, after, torch.where(parents == ROOT, prefix, NO_PARENT))
