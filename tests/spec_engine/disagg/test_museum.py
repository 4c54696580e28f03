"""Published bugs of prefill here and decode there, once more between two processes, each beside a clean handover."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from kvcanary.transfers import Seal, join_shards
from spec_engine import Engine
from spec_engine.disagg.decode_side import Arrival
from spec_engine.disagg.errors import FAILED, STALE, TIMEOUT, HandoverError, HandshakeError
from spec_engine.disagg.link import Piece, until_over
from spec_engine.disagg.links import make_link
from two_engines import PAGE, Outcome, Pair, prompt, seal_of, shard_view

TRANSPORTS = ["torch", pytest.param("nixl", marks=pytest.mark.package("nixl"))]
LAYERS = (0, 1, 2, 3)


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request) -> Iterator[Pair]:
    own = Pair(request.param)
    yield own
    own.close()


@pytest.fixture(autouse=True)
def _no_page_is_lost(pair: Pair) -> Iterator[None]:
    """Whatever a test breaks: behind it all pages of pools and tiers are there again, on both sides."""
    yield
    for engine, side, _ in pair.sides.values():
        until(lambda side=side: side.tend() or side.num_late == 0)
        engine.memory.check_accounting([])
        assert engine.memory.tier.num_free == engine.memory.tier.num_pages
    pair.renew()
    if pair.child.is_alive():
        assert pair.ask("later", 31) == 0
        assert set(pair.ask("facts")["free"].values()) == {24}


def is_clean(pair: Pair, outcome: Outcome, number: int = 0, kind: str = "tree", forwarded: int = 1) -> bool:
    """All as in one engine; of the prompt only so many tokens were forwarded."""
    return (
        outcome.tokens == pair.expected(number, kind)
        and not outcome.findings
        and outcome.forwarded == forwarded
        and outcome.reason == "length"
    )


def expect_found(outcome: Outcome, verdict: str, layers: tuple[int, ...], code: str = "T1") -> None:
    """Found before the first token, by code, kind and layers; it names the sender."""
    finding = outcome.findings[0]
    assert (finding.code, finding.found["verdict"], finding.layers) == (code, verdict, layers)
    assert (outcome.tokens, outcome.reason, finding.exposed_tokens) == ([], "kv_corruption", 0)
    peer = finding.peer
    assert (peer["engine"][:9], peer["rank"], peer["uuid"]) == ("prefill-1", 3, "GPU-of-prefill")
    assert f"rank 3, its page {peer['page']}, layer {layers[0]}" in finding.evidence[0]


def rows(engine: Engine, arrival: Arrival, page: int, part: int = 0) -> torch.Tensor:
    """[PAGE, layers, 2, heads, dim] of one page that has arrived; part 0 is the target's."""
    first = arrival.places[page] * PAGE
    return engine.memory.tier.parts[part][first : first + PAGE]


def test_a_clean_handover_gives_the_tokens_of_one_engine(pair: Pair):
    """Greedy or not, with drafts from the first step on: one prompt token is forwarded, all others have come."""
    engine, side, _ = pair.side()
    before = side.num_arrived, engine.metrics.verify_forwards, engine.metrics.tokens_emitted
    for number in (0, 1):
        assert is_clean(pair, pair.receive(pair.send(number)), number)
    assert side.num_arrived - before[0] == 2
    verifies, tokens = engine.metrics.verify_forwards - before[1], engine.metrics.tokens_emitted - before[2]
    assert tokens > verifies > 0  # some of what was drafted was accepted
    assert pair.ask("later", 0) == 0  # both were told that they were taken


def test_room_1_another_prompt_behind_a_stale_reference(pair: Pair, monkeypatch):
    """vllm#52234: blocks that were consumed and reused are refused by their generation; without it they are T1."""
    _, side, _ = pair.side()
    assert is_clean(pair, pair.receive(pair.send(1)), 1)
    pair.ask("later", 0)
    handover = pair.send()
    pair.ask("forget")
    pair.send(1)
    before = side.misses[STALE]
    assert is_clean(pair, pair.receive(handover), forwarded=30)
    assert side.misses[STALE] == before + 1
    monkeypatch.setattr(side, "_check_generation", lambda arrival: None)
    expect_found(pair.receive(handover), "stale", LAYERS)


def test_room_1_a_page_that_the_sender_does_not_have(pair: Pair):
    """vllm#52234: a page number past the tier is refused before anything is fetched."""
    _, side, _ = pair.side()
    handover = pair.send()
    wrong = replace(handover, places=(*handover.places[:-1], 25))
    with pytest.raises(HandoverError, match="prefill-1 has pages 1 to 24, a handover names 25"):
        side.begin(wrong)
    assert is_clean(pair, pair.receive(handover))


def test_room_2_words_that_change_behind_the_transfer(pair: Pair):
    """vllm#42395: equal at the source before and after, other bytes at the destination."""

    def flip(engine: Engine, arrival: Arrival) -> None:
        rows(engine, arrival, 2)[1, 3, 1, 2, 5:6].view(torch.int64).bitwise_xor_(1 << 20)

    outcome = pair.receive(pair.send(), spoil=flip)
    expect_found(outcome, "one word", (3,))
    finding = outcome.findings[0]
    assert (finding.position, finding.part, finding.head, finding.dim, finding.bit) == (9, "V", 2, 5, 20)
    assert is_clean(pair, pair.receive(pair.send()))


def test_room_2_a_read_before_the_bytes_are_visible(pair: Pair, monkeypatch):
    """vllm#44238: nobody waits for the end of the transfer before its bytes are copied on."""
    engine, side, _ = pair.side()
    host = engine.streams.host
    with monkeypatch.context() as broken:
        broken.setattr(host, "wait", lambda event: None)
        arrival = side.begin(pair.send())
        until_over(arrival.transfer, 10)
        outcome = pair.finish(arrival)
    assert {finding.code for finding in outcome.findings} == {"O1"}
    assert (outcome.tokens, outcome.findings[0].exposed_tokens) == ([], 0)
    host.wait(arrival.event)
    assert is_clean(pair, pair.receive(pair.send()))


def test_room_3_a_lease_that_is_shorter_than_the_queue(pair: Pair, monkeypatch):
    """aws-samples#84: prefill has let go of the blocks; a miss by number, and by bytes where nobody asks for it."""
    _, side, _ = pair.side()
    expired = pair.ask("facts")["expired"]
    handover = pair.send()
    assert pair.ask("later", 31) == 0
    pair.send(1)
    assert is_clean(pair, pair.receive(handover), forwarded=30)
    assert pair.ask("facts")["expired"] == expired + 1
    monkeypatch.setattr(side, "_check_generation", lambda arrival: None)
    outcome = pair.receive(handover)
    assert (outcome.findings[0].code, outcome.tokens) == ("T1", [])


def test_room_3_a_ticket_that_is_over_is_not_waited_for(pair: Pair):
    """Its receiver knows how long the lease was, and does not wait longer than that."""
    _, side, link = pair.side()
    link.holds = True
    handover = pair.send()
    arrival = side.begin(replace(handover, ticket=handover.ticket._replace(lease_ms=9000)))
    link.holds = False
    assert not arrival.is_over(pair.clock())
    pair.ahead += 10
    assert arrival.is_over(pair.clock())
    assert is_clean(pair, pair.finish(arrival), forwarded=30)
    assert side.num_late == 1
    arrival.transfer.release()


def test_room_4_an_abort_with_a_write_under_way(pair: Pair):
    """sglang#24527: the pages of an aborted request stay its own until the late write is over."""
    _, side, link = pair.side()
    link.holds = True
    late = side.begin(pair.send())
    link.holds = False
    places = set(late.places)
    side.cancel(late)
    assert side.num_late == 1
    other = side.begin(pair.send(1))
    assert not places & set(other.places)
    until_over(other.transfer, 10)
    late.transfer.release()
    assert is_clean(pair, pair.finish(other), 1)


def test_room_4_pages_granted_anew_under_a_late_write(pair: Pair):
    """The same where an abort frees them at once: two transfers write one page, and nothing orders them."""
    engine, side, link = pair.side()
    link.holds = True
    late = side.begin(pair.send())
    link.holds = False
    engine.memory.tier.give_back(late.places)
    other = side.begin(pair.send(1))
    assert other.places == late.places
    until_over(other.transfer, 10)
    late.transfer.release()
    outcome = pair.finish(other)
    assert {"O1", "T1"} <= {finding.code for finding in engine.canary.findings}
    assert outcome.tokens == []
    engine.streams.host.wait(late.event)


def test_room_5_a_put_that_does_not_wait_for_the_copy(pair: Pair):
    """LMCache#2181: the sender exposes pages into which its copy is under way: O1 there, T1 here."""
    known = pair.ask("facts")["codes"]
    outcome = pair.receive(pair.send(2, fault="no event"))
    assert set(pair.ask("facts")["codes"][len(known) :]) == {"O1"}
    assert "'hand over' on the host" in pair.ask("facts")["readers"]
    finding = outcome.findings[0]
    assert (finding.code, finding.layers, outcome.tokens) == ("T1", LAYERS, [])
    pair.ask("forget")
    assert is_clean(pair, pair.receive(pair.send()))


def test_room_6_a_layer_with_half_of_its_bytes(pair: Pair):
    """vllm#57661: regions are joined by their base address, and the longer one is cut."""

    def cut(engine: Engine, arrival: Arrival) -> None:
        for page in range(len(arrival.places) // 2, len(arrival.places)):
            rows(engine, arrival, page)[:, 2] = 0

    outcome = pair.receive(pair.send(), spoil=cut)
    expect_found(outcome, "short", (2,))
    assert outcome.findings[0].position == 16
    assert is_clean(pair, pair.receive(pair.send()))


def test_room_7_heads_and_slots_change_places(pair: Pair):
    """vllm#37703: HND was said and NHD lay there; T1, and where both sides say what they have, no handshake."""

    def permute(engine: Engine, arrival: Arrival) -> None:
        for page in range(len(arrival.places)):
            own = rows(engine, arrival, page)
            own.copy_(own.permute(3, 1, 2, 0, 4).clone())

    expect_found(pair.receive(pair.send(), spoil=permute), "other layout", LAYERS)
    _, side, _ = pair.side()
    with pytest.raises(HandshakeError, match="one order of a page") as caught:
        side.meet(replace(side.card, order="head, slot"))
    assert (caught.value.expected, caught.value.found) == (side.card.order, "head, slot")
    assert is_clean(pair, pair.receive(pair.send()))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_room_8_a_slice_that_is_off_by_a_head(pair: Pair, is_wrong: bool):
    """sglang#22145: two ranks send to one, and the heads of the second lie one too far: T1 by summed fingerprints."""
    address, seals = pair.ask("shards")
    view, link = shard_view(8, 0), make_link(pair.transport, f"one rank {is_wrong}")
    for layers in (view.k, view.v):
        for tensor in layers:
            tensor.zero_()
    came = [torch.zeros(2, 4 * PAGE, 4, 8) for _ in range(4)]
    link.expose(came)
    pieces = [Piece(part, 0, came[part].nbytes) for part in range(4)]
    transfer = link.fetch(link.connect(address), pieces, pieces)
    until_over(transfer, 10)
    assert not transfer.error
    for rank in range(2):
        first = 4 * rank - (is_wrong and rank)
        for layers, own in ((view.k, came[2 * rank]), (view.v, came[2 * rank + 1])):
            for layer in range(2):
                layers[layer][:, first : first + 4] = own[layer]
    manager, _ = seal_of(view, join_shards([Seal.from_bytes(seal) for seal in seals]))
    codes = [(finding.code, finding.layers, finding.position) for finding in manager.findings]
    assert codes == ([("T1", (0, 1), 0)] if is_wrong else [])
    link.close()


def test_room_9_layers_are_paired_by_another_number(pair: Pair):
    """sglang#32270: layers 0 and 1 change places."""

    def exchange(engine: Engine, arrival: Arrival) -> None:
        for page in range(len(arrival.places)):
            own = rows(engine, arrival, page)
            own[:, [0, 1]] = own[:, [1, 0]]

    expect_found(pair.receive(pair.send(), spoil=exchange), "other layout", (0, 1))
    assert is_clean(pair, pair.receive(pair.send()))


def test_room_10_a_page_that_was_never_sent(pair: Pair):
    """vllm#50754: what could not start was only logged, and a half-written cache is served."""
    engine, _, link = pair.side()
    handover, last = pair.send(), engine.memory.tier._places.unused(8)[-1]
    link.leaves_out = lambda piece: piece.first // piece.count == last and piece.count > 8
    outcome = pair.receive(handover)
    link.leaves_out = lambda piece: False
    finding = outcome.findings[0]
    assert (finding.code, finding.position, finding.layers, outcome.tokens) == ("T1", 28, LAYERS, [])
    assert is_clean(pair, pair.receive(pair.send()))


def test_room_10_a_transfer_that_never_ends(pair: Pair):
    """vllm#46283: decode does not wait for ever: a timeout with a name, and the prompt is computed again."""
    _, side, link = pair.side()
    link.holds = True
    before = side.misses[TIMEOUT]
    arrival = side.begin(pair.send())
    link.holds = False
    assert not arrival.is_over(pair.clock())
    pair.ahead += 21
    assert arrival.is_over(pair.clock())
    assert is_clean(pair, pair.finish(arrival), forwarded=30)
    assert side.misses[TIMEOUT] == before + 1
    assert side.num_late == 1
    arrival.transfer.release()


def test_room_11_numbers_of_rows_sent_as_numbers_of_the_pool(pair: Pair):
    """sglang#31471: the sender copies the slots that rows name out of a pool behind a map."""
    assert is_clean(pair, pair.receive(pair.send(0, "window"), "window"), 0, "window")
    outcome = pair.receive(pair.send(0, "window", fault="full slots"), "window")
    assert (outcome.findings[0].code, outcome.findings[0].pool, outcome.tokens) == ("T1", "window", [])


def test_what_could_never_run_is_refused_and_keeps_nothing(pair: Pair):
    """Its pages come back though they have arrived, and a request that is submitted behind it runs."""
    _, side, _ = pair.side()
    handover = pair.send()
    wrong = replace(handover, params=replace(handover.params, max_new_tokens=4096))
    arrival = side.begin(wrong)
    until_over(arrival.transfer, 10)
    with pytest.raises(ValueError, match="exceeds the context length"):
        side.submit(arrival)
    assert is_clean(pair, pair.receive(pair.send()))


def test_room_12_an_agent_that_dies_between_two_reads(pair: Pair):
    """wtdcode#33: what is fetched then fails; counted, and the prompt is computed again. The last of the pair."""
    _, side, _ = pair.side()
    handover, other = pair.send(), pair.send(1)
    assert is_clean(pair, pair.receive(handover))
    pair.expected(1)
    side._timeout = 0.5
    for reader in getattr(side._link, "_groups", {}).values():  # of torch's link
        reader._timeout = timedelta(seconds=1)
    os.kill(pair.child.pid, 9)
    pair.child.join(10)
    before = side.misses[FAILED] + side.misses[TIMEOUT]
    assert is_clean(pair, pair.receive(other), 1, forwarded=30)
    again = side.begin(other)  # nobody answers at all
    until(lambda: again.is_over(pair.clock()))
    assert is_clean(pair, pair.finish(again), 1, forwarded=30)
    assert side.misses[FAILED] + side.misses[TIMEOUT] == before + 2


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def test_prompts_differ():
    """The museum's two prompts are of one length, and no page of one is a page of the other."""
    assert len(prompt(0)) == len(prompt(1))
    assert not set(zip(*[iter(prompt(0))] * PAGE, strict=False)) & set(zip(*[iter(prompt(1))] * PAGE, strict=False))
