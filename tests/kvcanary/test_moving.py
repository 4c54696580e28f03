"""Moves of whole pages, whose ends nobody may have written: what was written follows, and the rest stays unwritten."""

from __future__ import annotations

import pytest
import torch

from kvcanary_kernels.record.layout import read_record
from two_ways import SIZE, TwoWays

PROMPT = list(range(100, 110))


def forked(way: str, **settings: object) -> TwoWays:
    """'a' has two full pages and a half, and 'c' begins with them; the end of page 3 holds what was there before."""
    rows = TwoWays(way, **settings)
    rows.begin("old", PROMPT, [6, 5, 4])
    rows.begin("older", [*PROMPT, 1, 2], [2, 1, 3])
    for name in ("old", "older"):
        rows.end(name)
    rows.begin("a", PROMPT, [1, 2, 3])
    rows.fork("a", "c")
    return rows


def copy_last(rows: TwoWays, copy: int) -> None:
    """'c' has a private copy of its last page, and all of its slots are declared as moved."""
    page = rows.tables["c"][2]
    rows.canary.on_copy("c", page, copy)
    rows.copy(page, copy)
    rows.tables["c"][2] = copy


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_page_whose_end_is_unwritten_moves_whole(way, content, is_first):
    """Silent, be the page new or used before, and the other row of the fork ahead or not."""
    rows = forked(way, content=content)
    if is_first:
        copy_last(rows, 8)
        rows.decode("a")
    else:
        rows.fork("a", "d")
        copy_last(rows, 4)
        rows.decode("c")
    for _ in range(5):
        rows.decode("c", *(["a"] if is_first else []))
    rows.canary.collect(rows.canary.end_step())
    for name in list(rows.tables):
        rows.end(name)
    assert rows.found() == []


def test_blanks_that_have_moved_are_unwritten(way):
    """Reading one is R12, as it was where it came from; what the move has put there before is gone."""
    rows = forked(way)
    copy_last(rows, 4)
    assert [read_record(rows.canary.session.state.records, 4 * SIZE + at).site != 0 for at in range(SIZE)] == [
        True
    ] * 2 + [False] * 2
    rows.fed["c"] += [7]
    rows.canary.append("c", [7])
    rows.canary.append("c", [8])
    rows.forward({"c": [8]}, commits=False)
    assert ("R12", 4 * SIZE + 2) in [found[:2] for found in rows.found()]


def test_a_blank_over_what_was_written_makes_it_unwritten():
    """Whoever moves what nobody wrote over a row's own entry has lost that entry."""
    rows = forked("eager")
    rows.end("c")
    rows.canary.on_move("target", torch.tensor([3 * SIZE + 3]), torch.tensor([SIZE + 1]))
    rows.decode("a")
    assert rows.found()[0][:3] == ("R12", SIZE + 1, 1)


@pytest.mark.parametrize("content", ["full", "rolling"])
def test_captured_moves_carry_blanks_too(content):
    """A move inside a captured step: what was written is compared where it arrives, what was not is left out."""
    from kvcanary import CanaryConfig, CanaryManager
    from static_rig import StaticRig

    rig = StaticRig()
    canary = CanaryManager(CanaryConfig(seed=7, mode="log", content=content), [rig.pool.view])
    moved = canary.registry.add_move("target", 4)
    canary.arm()
    canary.admit("a", PROMPT[:2])
    canary.on_alloc("a", [1, 2])
    canary.begin_step(1)
    canary.launch_move(moved)
    rig.kv[:, 8:12] = rig.kv[:, 4:8] + 1.0
    moved.record(torch.arange(4, 8), torch.arange(8, 12), torch.ones(4, dtype=torch.bool))
    canary.collect(canary.end_step())
    assert canary.findings == []
    assert [read_record(canary.session.state.records, slot).site for slot in range(8, 12)] == [0] * 4
    assert canary.session.ledger.request("a").row_lens.tolist() == [0]
