"""Every check, in the running engine: its fault is found by it, at its place, and not by it when it is switched off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcanary.codes import CODES
from kvcanary.invariants import InvariantError
from spec_engine import Engine, SamplingParams

Place = tuple[int | None, int | None]  # slot and position that the finding must name; None: any
FAULTS: list = []


def found_by(code: str, **settings: int) -> Callable:
    """Register a fault: called with a running engine of these settings, it breaks something and returns the place."""

    def register(fault: Callable[[Engine], Place]) -> Callable[[Engine], Place]:
        fault.settings = settings
        FAULTS.append(pytest.param(fault, code, id=f"{code}-{fault.__name__}"))
        return fault

    return register


def rows(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """The request-table rows of the two requests."""
    first, second = engine.running
    return engine.request_table.table[first.row], engine.request_table.table[second.row]


def freed_page(engine: Engine) -> int:
    """A page that a short request had and gave back; the lowest free one, so that the next request gets it."""
    [page] = engine.allocator.allocate(1)
    engine.canary.admit("short", [1, 2, 3])
    engine.canary.on_alloc("short", [page])
    engine.canary.on_free("short", [page])
    engine.allocator.free([page])
    return page


@found_by("R1")
def read_slot_out_of_range(engine: Engine) -> Place:
    """An index past the pool (sglang#27338: draft indices without the topk factor ran out of their buffer)."""
    mine, _ = rows(engine)
    mine[9] = engine.pools["target"].num_slots + 3
    return int(mine[9]), 9


@found_by("R2")
def read_null_slot(engine: Engine) -> Place:
    """An entry that fell back to padding's slot."""
    mine, _ = rows(engine)
    mine[9] = 1
    return 1, 9


@found_by("R3")
def damage_record(engine: Engine) -> Place:
    """A stray write into the canary's own memory."""
    mine, _ = rows(engine)
    slot = int(mine[9])
    engine.canary.session.state.by_name["target"].records[slot, 1] ^= 1 << 40
    return slot, 9


@found_by("R3")
def damage_fingerprint(engine: Engine) -> Place:
    """The fingerprint was damaged, not the bytes: fingerprint b over all layers tells them apart."""
    mine, _ = rows(engine)
    slot = int(mine[9])
    engine.canary.session.state.by_name["target"].content_a[7, slot] ^= 1 << 40
    return slot, 9


@found_by("R4")
def exchange_pages(engine: Engine) -> Place:
    """Two entries of one page table exchanged."""
    mine, _ = rows(engine)
    mine[8:12], mine[40:44] = mine[40:44].clone(), mine[8:12].clone()
    return int(mine[8]), 8


@found_by("R5", num_steps=5)
def read_a_cousin_for_an_ancestor(engine: Engine) -> Place:
    """Draft rows attend their columns, not their nodes' ancestors: paths of the tree are mixed."""
    lineage = engine.drafter._path

    def mixed(slots, path, parents, step):
        path = lineage(slots, path, parents, step)
        return path if step < 2 else torch.cat((path[:, :, :-2].flip(1), path[:, :, -2:]), -1)

    engine.drafter._path = mixed
    return None, None


@found_by("R6")
def feed_another_token_than_leaves(engine: Engine) -> Place:
    """The draft pool is given another first token than the one that leaves, before anybody can know it."""
    following = engine.runner.following
    engine.runner.following = lambda chunk, sampled: following(chunk, [token ^ 1 for token in sampled])
    engine.submit(list(range(100, 130)), SamplingParams(max_new_tokens=8, ignore_eos=True))
    return None, 29


@found_by("R7")
def read_a_page_that_nobody_owns(engine: Engine) -> Place:
    """An entry that still names a page after it went back to the free list."""
    mine, _ = rows(engine)
    owned = {page for request in engine.running for page in request.pages}
    free = max(page for page in range(1, engine.allocator.num_pages) if page not in owned)
    mine[9] = free * 4 + 1
    return int(mine[9]), 9


@found_by("R8")
def exchange_one_slot_between_requests(engine: Engine) -> Place:
    """One token of the neighbour at the same position: everything but the prefix fits."""
    mine, theirs = rows(engine)
    mine[33] = theirs[33]
    return int(mine[33]), 33


@found_by("R8")
def read_the_neighbours_row(engine: Engine) -> Place:
    """A whole, consistent row of someone else."""
    shorter, longer = sorted(engine.running, key=lambda request: request.committed_len)
    table, committed = engine.request_table.table, shorter.committed_len
    mine, theirs = table[shorter.row], table[longer.row]
    mine[:committed] = theirs[:committed]
    return int(mine[0]), 0


@found_by("R9")
def flip_a_bit(engine: Engine) -> Place:
    """One bit of one V element of layer 11."""
    mine, _ = rows(engine)
    slot = int(mine[20])
    engine.pools["target"].kv.view(torch.int32)[11, slot, 1, 0, 5] ^= 1 << 9
    return slot, 20


@found_by("R9")
def leave_nan_in_the_null_page(engine: Engine) -> Place:
    """Padding stored NaN, or a capture left it there (vllm#57158): whole pages are read with masks."""
    engine.pools["target"].kv[4, 3, 1, 0, 2] = float("nan")
    return 3, None


@found_by("R9")
def grant_a_page_with_nan(engine: Engine) -> Place:
    """Memory that nobody cleared (vllm#35219): the next request's last page ends in it."""
    free = max(set(range(1, engine.allocator.num_pages)) - {page for row in engine.running for page in row.pages})
    engine.pools["draft"].kv[0, free * 4 + 3, 0] = float("inf")
    engine.canary.admit("another", [1, 2, 3])
    engine.canary.on_alloc("another", [free])
    return free * 4 + 3, None


@found_by("R12")
def read_an_unwritten_slot(engine: Engine) -> Place:
    """A slot of the request's own reserve that nothing has written."""
    mine, _ = rows(engine)
    last_page = engine.running[0].pages[-1]
    mine[9] = last_page * 4 + 3
    return int(mine[9]), 9


@found_by("R9")
def lose_the_stores_of_a_layer(engine: Engine) -> Place:
    """A layer whose K and V went nowhere, and said so to nobody."""
    attention_store = engine.pools["target"].store

    def store(layer: int, slots: torch.Tensor, *values: object) -> None:
        attention_store(layer, torch.zeros_like(slots) if layer == 5 else slots, *values)

    engine.pools["target"].store = store
    return None, None


@found_by("W1")
def write_out_of_range(engine: Engine) -> Place:
    """The verify window names a slot past the pool."""
    mine, _ = rows(engine)
    place = engine.running[0].committed_len + 4
    mine[place] = engine.pools["target"].num_slots
    return int(mine[place]), None


@found_by("W2")
def write_into_the_neighbours_page(engine: Engine) -> Place:
    """One slot of the verify window lies in the other request's page."""
    mine, theirs = rows(engine)
    place, neighbour = engine.running[0].committed_len + 4, engine.running[1].committed_len + 9
    mine[place] = theirs[neighbour]
    return int(mine[place]), None


@found_by("W3")
def write_into_a_shared_page(engine: Engine) -> Place:
    """One slot of the verify window lies in a page that a prefix cache holds."""
    mine, _ = rows(engine)
    shared = engine.running[1].pages[2]
    engine.canary.on_share(engine.running[1].request_id, engine.running[1].pages[:3])
    mine[engine.running[0].committed_len + 4] = shared * 4 + 2
    return shared * 4 + 2, None


@found_by("W7")
def write_into_a_page_that_waits(engine: Engine) -> Place:
    """A page that went back some steps ago is written before its quarantine is over."""
    mine, _ = rows(engine)
    page = freed_page(engine)
    mine[engine.running[0].committed_len + 4] = page * 4 + 1
    return page * 4 + 1, None


@found_by("W8")
def write_over_final_entries(engine: Engine) -> Place:
    """The verify window reaches back into a page of the request's own prefix."""
    mine, _ = rows(engine)
    mine[engine.running[0].committed_len + 4] = mine[9]
    return int(mine[9]), None


@found_by("T1")
def lose_a_moved_row(engine: Engine) -> Place:
    """Compaction copies one accepted node short in one layer."""
    pool = engine.pools["target"]
    places: list[int] = []

    def move(src: torch.Tensor, dst: torch.Tensor) -> None:
        kept = pool.kv[7, dst[-1:]].clone()
        pool.kv[:, dst] = pool.kv[:, src]
        pool.kv[7, dst[-1:]] = kept
        places.append(int(dst[-1]))

    pool.move = move
    return None, None


@found_by("P1")
def write_into_a_free_page(engine: Engine) -> Place:
    """A page that belongs to nobody is written before it is granted again."""
    page = freed_page(engine)
    for _ in range(64):
        engine.canary.session.poisoner.tick()
    engine.pools["target"].kv[3, page * 4 + 2, 0, 0, 1] = 7.0
    engine.submit(list(range(100, 130)), SamplingParams(max_new_tokens=8, ignore_eos=True))
    return page * 4 + 2, None


@found_by("O1")
def read_before_the_copy_has_landed(engine: Engine) -> Place:
    """A copy into a page is in flight on another stream when the forward's stream uses the page."""
    page = engine.running[0].pages[2]
    engine.canary.async_tracker.issue("upload", "copies", writes=[page])
    engine.canary.async_tracker.use("verify", "forward", [page])
    return page * 4, None


@found_by("W4")
def write_a_slot_twice(engine: Engine) -> Place:
    """Two nodes of one verify window share a slot."""
    mine, _ = rows(engine)
    place = engine.running[0].committed_len + 4
    mine[place] = mine[place + 1]
    return int(mine[place]), None


@found_by("W5")
def write_at_wrong_positions(engine: Engine) -> Place:
    """Every tree position one too far (sglang#24361: stale positions in replayed batches)."""
    verify_forward = engine.runner.verify_forward

    def shifted(batch, tree):
        forward = verify_forward(batch, tree)
        return replace(forward, positions=forward.positions + (forward.positions > forward.prefix_lens.max()).long())

    engine.runner.verify_forward = shifted
    return None, None


@found_by("W6")
def feed_another_token(engine: Engine) -> Place:
    """The last token of a request changes between two steps (a relay buffer that was overwritten)."""
    request = engine.running[0]
    engine.relay.bonus[request.row] ^= 1
    return None, request.committed_len


@found_by("W6")
def draft_an_id_that_is_no_token(engine: Engine) -> Place:
    """The target is given a guess beyond its vocabulary, as a wrong map from draft to target ids makes them."""
    verify_forward, beyond = engine.runner.verify_forward, engine.model.config.vocab_size

    def mapped(batch, tree):
        forward = verify_forward(batch, tree)
        fed = forward.tokens.clone()
        fed[-1] = beyond
        engine.model.forward = lambda tokens, *rest, run=engine.model.forward, **more: run(
            tokens % beyond, *rest, **more
        )
        return replace(forward, tokens=fed)

    engine.runner.verify_forward = mapped
    return None, None


@found_by("N1")
def store_what_is_not_finite(engine: Engine) -> Place:
    """An element of K is NaN in what one layer of the next forward stores."""
    run, spoiled = engine.model.forward, []

    def forward(tokens, *rest, **more):
        access = next(one for one in (*rest, *more.values()) if hasattr(one, "attend"))
        attend = access.attend

        def bad(layer, q, k, v):
            if not spoiled:
                spoiled.append(layer)
                k = k.clone()
                k[0, 0, 3] = float("nan")
            return attend(layer, q, k, v)

        access.attend = bad
        try:
            return run(tokens, *rest, **more)
        finally:
            access.attend = attend

    engine.model.forward = forward
    return None, None


@found_by("R10")
def believe_a_shorter_row(engine: Engine) -> Place:
    """The verify forward believes that one token less is committed."""
    verify_forward = engine.runner.verify_forward

    def short(batch, tree):
        forward = verify_forward(batch, tree)
        return replace(forward, prefix_lens=forward.prefix_lens - 1)

    engine.runner.verify_forward = short
    return None, min(request.committed_len for request in engine.running) - 2


@found_by("R11")
def read_what_a_later_step_has_written(engine: Engine) -> Place:
    """A record of a step that has not come yet, whole in every other respect."""
    mine, _ = rows(engine)
    slot, record_store = int(mine[9]), engine.canary.session.checks.record_store
    record = record_store.table[[slot]]
    record[0, 3] += 5
    record[0, 7] = engine.canary.session.state.by_name["target"].seal_term
    record_store.write(np.array([slot]), record)
    return slot, 9


@found_by("R13")
def see_a_node_that_is_no_ancestor(engine: Engine) -> Place:
    """One bit too many in the tree mask: a node sees its sibling."""
    verify_forward = engine.runner.verify_forward

    def wider(batch, tree):
        forward = verify_forward(batch, tree)
        mask = forward.tree_mask.clone()
        mask[0, 1, 2] = True
        return replace(forward, tree_mask=mask)

    engine.runner.verify_forward = wider
    return None, None


@pytest.mark.parametrize(("fault", "code"), FAULTS)
def test_the_fault_is_found_by_its_check(strike, fault, code):
    """The first finding has the expected code and, where the fault has one, exactly its slot and position."""
    places = []
    error = strike(lambda engine: places.append(fault(engine)), **fault.settings)
    assert error is not None
    finding = error.findings[0]
    assert finding.code == code, error
    slot, position = places[0]
    assert slot in (None, finding.slot)
    assert position in (None, finding.position)
    assert f"({code})" in str(error)


@pytest.mark.parametrize(("fault", "code"), FAULTS)
def test_a_check_that_is_switched_off_finds_nothing(strike, fault, code):
    """With its check disabled the fault may be found by another check, never by this one."""
    try:
        error = strike(fault, disable=frozenset({code}), **fault.settings)
    except InvariantError:  # the host saw it
        return
    assert code not in ([] if error is None else [finding.code for finding in error.findings])


def test_every_check_is_here():
    """But W9, of captured forwards, H1, of forwards that did not run, X1 and X2, of ranks, and errors in mode raise."""
    assert {fault.values[1] for fault in FAULTS} == set(CODES) - {"W9", "H1", "H2", "L1", "X1", "X2"}


def test_a_disabled_check_shows_in_the_certificate(make_engine):
    """The certificate of an engine without R5 does not claim R5."""
    certificate = make_engine(frozenset({"R5"})).canary.certificate()
    assert "R5" not in certificate["classes"]
    assert certificate["disabled"] == ["R5"]


def test_the_clean_twin_finds_nothing(strike):
    """The same traffic without a fault runs to its end."""
    assert strike(lambda engine: None) is None
