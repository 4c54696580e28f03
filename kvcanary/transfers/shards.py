"""Shards: the seals of ranks that hold some heads each, made into that of a rank that holds all of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from kvcanary.errors import ContradictionError, ForeignSnapshotError
from kvcanary.transfers.cards import PoolCard
from kvcanary.transfers.snapshots import Contents, PageSnapshot
from kvcanary_kernels.record.layout import CHAIN, TOKEN_POSITION


def join_shards(seals: Sequence[PageSnapshot]) -> PageSnapshot:
    """What the same pages would be sealed with where all heads of these ranks lie in one pool; exact.

    For a hand-over between other tensor-parallel sizes: the seals of eight ranks make those of two, or of one. Ranks
    with copies of the same heads count once. Each pool must hold whole heads alone.
    ForeignSnapshotError where they are not of one seed, model and layout; ContradictionError where heads are missing,
    or ranks hold other rows or other copies.
    """
    if not seals:
        raise ContradictionError("shards must be at least one, got none: give the seals of all ranks")
    first = seals[0]
    for seal in seals[1:]:
        seal.expect(first.seed_id, first.model)
        if (seal.num_pages, seal.first, len(seal.layouts)) != (first.num_pages, first.first, len(first.layouts)):
            raise ContradictionError(
                f"shards must be sealed page by page alike, got {seal.num_pages} pages of {len(seal.layouts)} pools "
                f"for {first.num_pages} of {len(first.layouts)}: seal the same pages on every rank"
            )
    pools = [_join_pool([(seal.layouts[n], seal.contents[n]) for seal in seals]) for n in range(len(first.layouts))]
    layouts, contents = tuple(card for card, _ in pools), tuple(own for _, own in pools)
    return replace(first, layouts=layouts, contents=contents)


def slots_that_differ(seal: PageSnapshot, other: PageSnapshot) -> dict[str, list[int]]:
    """By pool, numbers of the slots among those of the pages that were written and have other bytes; empty: none.

    For ranks that are more than those which sent: each seals what has arrived, and their joined seals are compared.
    """
    other.expect(seal.seed_id, seal.model)
    if seal.layouts != other.layouts:
        _refuse(seal.layouts[0], next(b for a, b in zip(seal.layouts, other.layouts, strict=True) if a != b))
    found = {}
    for card, one, two in zip(seal.layouts, seal.contents, other.contents, strict=True):
        wrong = (one.fingerprint_a != two.fingerprint_a).any(0) | (one.fingerprint_b != two.fingerprint_b)
        if numbers := np.flatnonzero(wrong.numpy() & one.current & two.current).tolist():
            found[card.name] = numbers
    return found


def _join_pool(shards: Sequence[tuple[PoolCard, Contents]]) -> tuple[PoolCard, Contents]:
    by_head: dict[int, tuple[PoolCard, Contents]] = {}
    for card, contents in shards:
        _expect_alike(shards[0], (card, contents))
        known = by_head.setdefault(card.first_head, (card, contents))
        if known[0] != card or not torch.equal(known[1].fingerprint_a, contents.fingerprint_a):
            raise ContradictionError(
                f"ranks with copies of head {card.first_head} of {card.name!r} must hold the same bytes, got others: "
                "one of them computed or stored something else"
            )
    ordered = [by_head[head] for head in sorted(by_head)]
    for (card, _), (behind, _) in pairwise(ordered):
        if behind.first_head != card.end_head:
            raise ContradictionError(
                f"shards of {card.name!r} must hold heads without a gap, got {card.first_head} to {card.end_head - 1} "
                f"and {behind.first_head} to {behind.end_head - 1}: give the seals of all ranks between"
            )
    fingerprint_a = torch.stack([own.fingerprint_a for _, own in ordered]).sum(0)
    fingerprint_b = torch.stack([own.fingerprint_b for _, own in ordered]).sum(0)
    joined = replace(ordered[0][1], fingerprint_a=fingerprint_a, fingerprint_b=fingerprint_b)
    return _join_cards([card for card, _ in ordered]), joined


def _join_cards(cards: Sequence[PoolCard]) -> PoolCard:
    """With the heads of all."""
    first, heads = cards[0], sum(card.heads for card in cards)
    if len(cards) == 1:
        return first
    if whole := [part.name for part in first.parts if part.shape[:1] != (first.heads,)]:
        raise ForeignSnapshotError(
            f"parts of {first.name!r} that have no heads are whole on every rank, got {', '.join(whole)}: watch them "
            "as a pool of their own",
            expected="parts with heads",
            found=", ".join(whole),
        )
    parts = tuple(part._replace(shape=(heads, *part.shape[1:])) for part in first.parts)
    return replace(first, words=sum(card.words for card in cards), parts=parts)


def _expect_alike(one: tuple[PoolCard, Contents], other: tuple[PoolCard, Contents]) -> None:
    """Of pools that differ in their heads alone, and of the same rows."""
    card, own = one[0], other[0]
    kinds = [[(part.name, part.dtype, part.shape[1:]) for part in each.parts] for each in (card, own)]
    same = [(each.name, each.page_size, each.token_offset, each.layers, each.whole_heads) for each in (card, own)]
    if kinds[0] != kinds[1] or same[0] != same[1]:
        _refuse(card, own)
    records, others = (contents.records[:, [TOKEN_POSITION, CHAIN]][contents.current] for _, contents in (one, other))
    if not np.array_equal(one[1].current, other[1].current) or not np.array_equal(records, others):
        raise ContradictionError(
            f"ranks must hold the same rows of {card.name!r}, got other tokens, positions or histories: seal the same "
            "pages on every rank"
        )


def _refuse(expected: PoolCard, found: PoolCard) -> None:
    raise ForeignSnapshotError(
        f"shards must be of pools that differ in their heads alone, got one of {found} for {expected}",
        expected=str(expected),
        found=str(found),
    )
