"""The canary in a vLLM worker, over a stand-in: one fault at a time, each named with its request, place and layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary import KVCorruptionError
from kvcanary.adapters.observed.inputs import KEPT_OTHERWISE
from kvcanary.adapters.vllm.handle import Handle
from kvcanary_kernels.record.layout import MASK_32, REQUEST_GENERATION, Identity

from .served import BLOCK, Served, go_on, load

pytestmark = pytest.mark.usefixtures("host")


def broken(served: Served, harm: Callable[[Served], Any], steps: int = 3) -> Any:
    """The finding after `harm` was done to a worker with two long requests."""
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    served.ask("b", [(3 * n) % 97 for n in range(17)] + [5, 6, 7], 40)
    for _ in range(6):
        served.step()
    harm(served)
    with pytest.raises(KVCorruptionError) as raised:
        go_on(served, steps)
    return raised.value.findings[0]


def test_a_flipped_bit_names_request_layer_and_word(serve) -> None:
    """One bit of one V: code, request, position, layer, part, head, dim and bit."""

    def flip(served: Served) -> None:
        block, offset = served.place("b", 18)
        served.caches["l1"].view(torch.int32)[block, 1, offset, 8 + 3] ^= 1 << 9

    found = broken(serve(), flip)
    assert (found.code, found.reader, found.position, found.layer) == ("R9", "b", 18, 1)
    assert (found.part, found.head, found.dim, found.bit) == ("V", 1, 3, 9)
    assert found.writer == "b"
    assert "l1" in " ".join(found.evidence)
    assert found.causes[0].family == "bits"


def test_a_wrong_token_is_found(serve) -> None:
    """A forward is fed another token than the request has there: W6, at its position."""

    def misfeed(served: Served) -> None:
        right = served.runner.make_batch

        def make_batch(output: Any) -> Any:
            batch = right(output)
            batch.input_ids[0] += 1
            return batch

        served.runner.make_batch = make_batch

    found = broken(serve(), misfeed, steps=1)
    assert found.code == "W6"
    assert found.found["token"] == found.expected["token"] + 1
    assert found.writer in ("a", "b")
    assert found.causes[0].family == "order"


@pytest.mark.parametrize("content", ["rolling", "write"])
def test_the_last_look_reads_every_byte(serve, monkeypatch, content: str) -> None:
    """Rolling reads each position once in 128 steps; what it had no time for is read when the request ends."""
    monkeypatch.setenv("KVCANARY_CONTENT", content)
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = serve()
    served.ask("a", [(3 * n) % 97 for n in range(30)], 12)
    go_on(served, 4)
    for position in (19, 3):
        block, offset = served.place("a", position)
        served.caches["l0"].view(torch.int32)[block, 0, offset, 0] ^= 1
    served.run()
    served.ask("b", [1, 2, 3], 2)
    served.run()
    found = served.wrapper.kvcanary_report()["findings"]
    assert [(f["code"], f["position"], f["page"], f["offset"], f["site"]) for f in found] == (
        [("R9", 3, block, offset, ["release", 0])] if content == "rolling" else []
    )


def test_the_last_look_follows_rows_that_move(serve, monkeypatch) -> None:
    """In runner V1 a request's line of the block table is not its row of the canary: the look reads along the line."""
    monkeypatch.setenv("KVCANARY_CONTENT", "rolling")
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = serve(settings={"runner": "v1"})
    for name, length in (("a", 30), ("b", 12), ("c", 30)):  # the rows turn round in every step, "b" is in the middle
        served.ask(name, [(3 * n + ord(name)) % 97 for n in range(6)], length)
    go_on(served, 4)
    batch, numbers = served.runner.input_batch, served.wrapper.worker.kvcanary._numbers
    assert (batch.req_id_to_index["b"], numbers["b"]) == (1, 6)
    line = batch.block_table[0].block_table.gpu[1]
    block = int(line[0])
    served.caches["l0"].view(torch.int32)[block, 0, 3, 0] ^= 1
    served.run()
    found = served.wrapper.kvcanary_report()["findings"]
    assert [(f["code"], f["reader"], f["page"], f["offset"], f["site"]) for f in found] == [
        ("R9", "b", block, 3, ["release", 0])
    ]


def block_of(served: Served, name: str, position: int) -> int:
    """The kernel block of a position, in either runner."""
    if hasattr(served.runner, "req_states"):
        return served.place(name, position)[0]
    batch = served.runner.input_batch
    return int(batch.block_table[0].block_table.gpu[batch.req_id_to_index[name], position // 4])


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_last_look_reads_what_the_only_forward_wrote(serve, monkeypatch, runner: str) -> None:
    """A request of one token ends behind its prefill, when the engine still counts what it had before."""
    monkeypatch.setenv("KVCANARY_CONTENT", "rolling")
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = serve(settings={"runner": runner})
    served.budget = 80
    served.ask("a", [(3 * n) % 97 for n in range(50)], 1)
    served.step()
    block = block_of(served, "a", 46)
    served.caches["l1"].view(torch.int32)[block, 0, 46 % 4, 0] ^= 1
    served.run()
    found = served.wrapper.kvcanary_report()["findings"]
    assert [(f["code"], f["reader"], f["position"], f["page"]) for f in found] == [("R9", "a", 46, block)]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_last_look_comes_before_blocks_are_zeroed(serve, monkeypatch, runner: str) -> None:
    """The block of a request that ended is handed on and zeroed in the step that tells of the end."""
    monkeypatch.setenv("KVCANARY_CONTENT", "rolling")
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = serve(settings={"runner": runner})
    served.ask("a", [(3 * n) % 97 for n in range(18)], 3)
    served.ask("b", [(5 * n) % 97 for n in range(18)], 30)
    while "a" not in served.finished:
        served.step()
        own = block_of(served, "a", 2)
    served.caches["l1"].view(torch.int32)[own, 0, 2, 0] ^= 1
    served.extra["new_block_ids_to_zero"] = [own * 4 // BLOCK]
    served.step()
    found = served.wrapper.kvcanary_report()["findings"]
    assert [(f["code"], f["reader"], f["position"], f["page"]) for f in found] == [("R9", "a", 2, own)]


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_cached_block_is_read_when_it_is_violation(serve, monkeypatch, is_connected: bool) -> None:
    """Bytes that changed while nobody ran: found in the first step of the request that finds the block."""
    monkeypatch.setenv("KVCANARY_CONTENT", "rolling")
    served = serve(settings={"connector": Connector()} if is_connected else {})
    tokens = [(3 * n) % 97 for n in range(30)]
    served.ask("a", tokens, 4)
    go_on(served, 3)
    block, offset = served.place("a", 5)
    served.run()
    served.caches["l1"].view(torch.int32)[block, 0, offset, 0] ^= 1
    served.ask("c", [1, 2, 3], 4)  # in the row that "a" had
    served.ask("b", tokens, 4)
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    assert (found.code, found.reader, found.position, found.layer) == ("R9", "b", 5, 1)


def test_swapped_table_entries_are_found(serve) -> None:
    """Two entries of a block table exchanged: R4 at the first position of the first."""

    def swap(served: Served) -> None:
        number = served.runner.req_states.req_id_to_index["a"]
        line = served.runner.block_tables.block_tables[0].gpu[number]
        line[[2, 5]] = line[[5, 2]]

    found = broken(serve(), swap)
    assert (found.code, found.reader, found.position) == ("R4", "a", 8)
    assert found.found["position"] == 20
    assert found.causes[0].family == "addressing"


def test_a_slot_mapping_off_by_one_is_found(serve) -> None:
    """What is stored one slot further than the table says: W5, in the step that does it."""

    def shift(served: Served) -> None:
        tables = served.runner.block_tables
        right = tables.compute_slot_mappings
        tables.compute_slot_mappings = lambda *a, **k: right(*a, **k) + 1

    found = broken(serve(), shift, steps=1)
    assert found.code == "W5"
    assert found.writer in ("a", "b")
    assert found.position is not None


def test_a_block_handed_out_while_still_read_is_found(serve) -> None:
    """A running request's block is given to a new one, which fills it: R8 for who had it, before any token is read."""

    def steal(served: Served) -> None:
        [victim] = [request for request in served.running if request.name == "a"]
        served.free.insert(0, victim.blocks[1])
        served.ask("c", [40 + n for n in range(16)], 5)
        served.take_all = True

    found = broken(serve(), steal)
    assert (found.code, found.reader) == ("R8", "a")
    assert any(line.startswith("the slot was granted to") for line in found.evidence)


def test_a_copy_left_out_is_found(serve) -> None:
    """A copy-on-write copy that was told of and not made: T1 at the first slot of the destination."""
    served = serve()
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    go_on(served, 4)
    source, target = served.running[0].blocks[1], served.free[0]
    served.extra = {"kv_cache_block_copies": [(source, target)]}
    served.step()
    assert served.wrapper.kvcanary_report()["findings"] == []
    served.runner.copy = lambda copies: None
    served.extra = {"kv_cache_block_copies": [(source, served.free[1])]}
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    assert (found.code, found.slot) == ("T1", served.free[1] * BLOCK)
    assert "a copy of blocks" in found.sentence


def test_blocks_of_every_group_name_their_request() -> None:
    """What moves bytes of a block does so for all groups: whoever was given it in any of them is named."""
    new = [SimpleNamespace(req_id="a", block_ids=([1], [2]))]
    cached = SimpleNamespace(req_ids=["b", "c"], new_block_ids=[([3], [4]), None])
    output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
    handle = SimpleNamespace(_table_blocks=lambda group, blocks: list(blocks))
    assert Handle._new_blocks(handle, output, 0) == {1: "a", 2: "a", 3: "b", 4: "b"}


def test_a_block_that_was_not_zeroed_is_found(serve) -> None:
    """Zeroing that did not happen: T1, where bytes of the last owner still lie."""
    served = serve(zeroes=True)
    load(served)
    go_on(served, 8)
    served.runner.zero = lambda blocks: None
    with pytest.raises(KVCorruptionError) as raised:
        served.run()
    found = raised.value.findings[0]
    assert found.code == "T1"
    assert "zeroed blocks" in found.sentence
    assert found.layers == (0, 1)


class Connector:
    """Keeps the bytes of chosen blocks, and loads them for requests that begin with those tokens."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.jobs: list[list[int]] = []

    def save(self, served: Served, blocks: list[int]) -> None:
        ratio = 2
        where = [block * ratio + part for block in blocks for part in range(ratio)]
        self.kept = {name: cache[where].clone() for name, cache in served.caches.items()}
        self.served = served

    def start_load_kv(self) -> None:
        for blocks in self.jobs:
            for name in self.served.caches:
                self.load(name, blocks)
        self.jobs = []

    def load(self, name: str, blocks: list[int]) -> None:
        where = [block * 2 + part for block in blocks for part in range(2)]
        self.served.caches[name][where] = self.kept[name][: len(where)]

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass


@pytest.mark.parametrize("goes_wrong", [False, True])
def test_external_loads_are_judged_by_name(serve, goes_wrong: bool) -> None:
    """What comes back under a prefix that was written here must be those bytes; loaded elsewhere, it is T1."""
    connector = Connector()
    served = serve(settings={"connector": connector})
    tokens = [(3 * n) % 97 for n in range(30)]
    served.ask("a", tokens, 30)
    go_on(served, 4)
    connector.save(served, served.running[0].blocks[:2])
    served.run()
    served.cached.clear()
    for cache in served.caches.values():
        cache.normal_()
    served.wrapper.worker.kvcanary.canary.memory.forget()
    blocks = served.free[:2]
    served.free = served.free[2:]
    connector.jobs = [served.free[-2:] if goes_wrong else blocks]
    for number, block in enumerate(blocks):
        served.cached[tuple(tokens[: (number + 1) * BLOCK])] = block
        served.users[block] = 1
    served.ask("b", tokens, 4)
    if goes_wrong:
        with pytest.raises(KVCorruptionError) as raised:
            served.run()
        found = raised.value.findings[0]
        assert (found.code, found.page) == ("T1", blocks[0] * 2)
        assert "an external load" in found.sentence
    else:
        served.run()
        report = served.wrapper.kvcanary_report()
        assert report["findings"] == []
        assert report["unchecked"] == {}
        assert report["loads_checked"] == 16
        canary = served.wrapper.worker.kvcanary.canary
        loaded = canary.groups[0].records[blocks[0] * BLOCK, REQUEST_GENERATION]
        assert canary.writers[int(loaded) & MASK_32] == "b"


def test_log_mode_goes_on(serve, monkeypatch) -> None:
    """Every fault is told of once, and serving goes on to the same tokens."""
    monkeypatch.setenv("KVCANARY_MODE", "log")
    served = serve()
    load(served)
    go_on(served, 6)
    name = served.running[0].name
    block, offset = served.place(name, 3)
    served.caches["l0"].view(torch.int32)[block, 0, offset, 0] ^= 1
    served.run()
    report = served.wrapper.kvcanary_report()
    assert {(f["code"], f["position"], f["layer"]) for f in report["findings"]} == {("R9", 3, 0)}
    assert report["fired"]["R9"] > 1


def first_row(served: Served) -> tuple[str, Any]:
    """The request in the first row of runner V1's batch, and its line of the block table."""
    batch = served.runner.input_batch
    return batch.req_ids[0], batch.block_table[0].block_table.gpu[0]


@pytest.mark.parametrize("harm", ["flip", "swap", "shift"])
def test_runner_v1_names_faults_too(serve, monkeypatch, harm: str) -> None:
    """Rows that move are followed by request: a flipped bit, swapped table entries, slots one too far."""
    served = serve(settings={"runner": "v1"})
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    served.ask("b", [(3 * n) % 97 for n in range(17)] + [5, 6, 7], 40)
    go_on(served, 6)
    name, line = first_row(served)
    if harm == "flip":
        served.caches["l1"].view(torch.int32)[int(line[4]), 1, 2, 8 + 3] ^= 1 << 9
    right = served.runner._prepare_inputs

    def prepare(output: Any) -> None:
        right(output)
        table = served.runner.input_batch.block_table[0]
        if harm == "swap":
            table.block_table.gpu[0, [2, 4]] = table.block_table.gpu[0, [4, 2]]
        if harm == "shift":
            table.slot_mapping.gpu += 1

    served.runner._prepare_inputs = prepare
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    if harm == "flip":
        assert (found.code, found.reader, found.position, found.layer) == ("R9", name, 18, 1)
        assert (found.part, found.head, found.dim, found.bit) == ("V", 1, 3, 9)
    elif harm == "swap":
        assert (found.code, found.position, found.found["position"]) == ("R4", 8, 16)
    else:
        assert found.code == "W5"


@pytest.mark.parametrize("content", ["rolling", "full"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_runner_v1_feeds_what_was_sampled(serve, monkeypatch, is_swapped: bool, content: str) -> None:
    """Its own books are wrong, from which it feeds the next forward: W6 with the token that the sampler gave."""
    monkeypatch.setenv("KVCANARY_CONTENT", content)
    served = serve(settings={"runner": "v1"})
    served.ask("a", [(3 * n) % 97 for n in range(30)], 40)
    served.ask("b", [(3 * n) % 97 for n in range(17)] + [5, 6, 7], 40)
    go_on(served, 6)
    a, b = (served.runner.requests[name].output_token_ids for name in "ab")
    sampled = {"a": a[-1], "b": b[-1]}
    if is_swapped:
        a[-1], b[-1] = b[-1], a[-1]
    else:
        a[-1] += 1
    ends = {"a": 30 + len(a) - 1, "b": 20 + len(b) - 1}
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    [found] = raised.value.findings
    own, other = (found.writer, {"a": "b", "b": "a"}[found.writer]) if is_swapped else ("a", "")
    assert (found.code, found.writer, found.position) == ("W6", own, ends[own])
    assert found.expected == {"token": sampled[own]}
    assert found.found == {"token": sampled[other] if is_swapped else sampled[own] + 1}
    assert (f"that token was sampled of {other!r}" in found.evidence) == is_swapped
    assert found.causes[0].family == "order"
    assert "W6" not in served.wrapper.worker.kvcanary.canary.certificate()["inactive_classes"]


def test_runner_v1_reads_a_prompt_token_by_token(serve) -> None:
    """What is sampled in the middle of a prompt is thrown away, and nothing is kept of requests that end."""
    served = serve(settings={"runner": "v1"}, budget=1)
    served.ask("a", [(3 * n) % 97 for n in range(12)], 4)
    assert len(served.run()["a"]) == 4
    assert served.wrapper.kvcanary_report()["fired"] == {}
    assert served.wrapper.worker.kvcanary._came_with == {}


def test_runner_v1_expects_nothing_of_a_prompt_that_nobody_knows(serve) -> None:
    """It was given embeddings: where it ends is not known, nor which of the sampled tokens count."""
    served = serve(settings={"runner": "v1"})
    handle = served.wrapper.worker.kvcanary
    come = handle._come
    handle._come = lambda canary, new: come(canary, [(name, None, length) for name, _, length in new])
    served.ask("a", list(range(40, 90)), 4)
    assert len(served.run()["a"]) == 4
    assert served.wrapper.kvcanary_report()["fired"] == {}


def token_of_a_prompts_middle(serve: Any) -> Served:
    """What was sampled there counts as the answer, and is fed behind the last chunk, which is next."""
    served = serve(settings={"runner": "v1"})
    served.ask("a", list(range(40, 70)), 4)
    served.step()
    served.runner.requests["a"].output_token_ids.append(7)
    served.running[0].tokens.append(7)
    return served


def test_runner_v1_of_a_scheduler_that_is_ahead_may_be_fed_more(serve) -> None:
    """It counts tokens before they are sampled: nothing is said of those behind a prompt."""
    served = token_of_a_prompts_middle(serve)
    served.wrapper.worker.vllm_config.scheduler_config = SimpleNamespace(async_scheduling=True)
    served.step()
    assert served.wrapper.kvcanary_report()["fired"] == {}


def test_runner_v1_feeds_no_token_that_a_prompt_did_not_end_in(serve) -> None:
    """W6 at the place behind the prompt, for which there is no token yet."""
    served = token_of_a_prompts_middle(serve)
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    assert (found.code, found.writer, found.position) == ("W6", "a", 30)
    assert (found.expected, found.found) == ({"token": None}, {"token": 7})


@pytest.mark.parametrize(("budget", "at"), [(20, 3), (20, 23), (1, 3)])
def test_runner_v1_feeds_the_prompt_it_was_given(serve, budget: int, at: int) -> None:
    """One token of its copy of a prompt is another one: W6 in the forward that is fed it, at its position."""
    served = serve(settings={"runner": "v1"}, budget=budget)
    served.ask("a", list(range(40, 70)), 4)
    go_on(served, at // budget)
    right = served.runner._prepare_inputs

    def prepare(output: Any) -> None:
        served.runner.requests["a"].prompt_token_ids[at] = 1
        right(output)

    served.runner._prepare_inputs = prepare
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    assert (found.code, found.writer, found.position) == ("W6", "a", at)
    assert (found.expected, found.found) == ({"token": 40 + at}, {"token": 1})


def feeds_what_lies_behind(served: Served) -> None:
    """Of a row whose scheduler asks for more tokens than it has."""
    make, states = served.runner.make_batch, served.runner.req_states

    def make_batch(output: Any) -> Any:
        states.total_len.gpu += 40
        try:
            return make(output)
        finally:
            states.total_len.gpu -= 40

    served.runner.make_batch = make_batch


def test_runner_v2_feeds_no_token_that_a_prompt_did_not_end_in(serve) -> None:
    """The same: its kernels take whatever lies behind the tokens that it has."""
    served = serve(budget=20)
    served.ask("a", list(range(40, 70)), 4)
    served.step()
    served.running[0].tokens.append(7)
    feeds_what_lies_behind(served)
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    assert (found.code, found.writer, found.position) == ("W6", "a", 30)
    assert (found.expected, found.found) == ({"token": None}, {"token": 0})
    assert served.wrapper.kvcanary_report()["fired"] == {"W6": 1}


@pytest.mark.parametrize("budget", [20, 64])
def test_runner_v2_keeps_the_prompt_it_was_given(serve, budget: int) -> None:
    """Its copy of a prompt is another's from token 23 on: W6 before it is fed, and it is said where that was seen."""
    served = serve(budget=budget)
    served.ask("b", list(range(60)), 4)
    assert len(served.run()["b"]) == 4
    served.ask("a", list(range(40, 70)), 4)
    right, states = served.runner.add_requests, served.runner.req_states

    def add_requests(output: Any) -> None:
        right(output)
        if "a" in states.req_id_to_index:
            states.all_token_ids.gpu[states.req_id_to_index["a"], 23:30] = 9

    served.runner.add_requests = add_requests
    with pytest.raises(KVCorruptionError) as raised:
        served.step()
    found = raised.value.findings[0]
    assert (found.code, found.writer, found.position, found.slot) == ("W6", "a", 23, -1)
    assert (found.expected, found.found) == ({"token": 63}, {"token": 9})
    assert KEPT_OTHERWISE in found.evidence


@pytest.mark.parametrize("follows", [True, False])
def test_a_row_that_is_taken_back_is_silent_where_the_runner_goes_back_with_it(serve, follows: bool) -> None:
    """vllm#49250: a block failed to load, the scheduler has the row computed again, the runner goes on behind it."""
    served = serve(settings={"connector": Connector()})
    served.ask("a", [(3 * n) % 97 for n in range(30)], 60)
    go_on(served, 4)
    request, states = served.running[0], served.runner.req_states
    number, update = states.req_id_to_index["a"], served.runner.update_requests
    request.computed = BLOCK

    def update_requests(output: Any) -> None:
        before = int(states.num_computed_tokens_np[number]) + 1
        update(output)
        if not follows:
            states.num_computed_tokens_np[number] = before

    served.runner.update_requests = update_requests
    if follows:
        go_on(served, 6)
        assert served.wrapper.worker.kvcanary.report()["fired"] == {}
        served.runner.block_tables.block_tables[0].gpu[number, 1] = 0  # what goes wrong later has another cause
        with pytest.raises(KVCorruptionError) as caught:
            go_on(served, 2)
        assert "taken back" not in str(caught.value)
        return
    feeds_what_lies_behind(served)
    with pytest.raises(KVCorruptionError) as caught:
        go_on(served, 2)
    cause = caught.value.findings[0].causes[0]
    assert cause.text == "the row was taken back, and the model runner went on behind it"
    assert cause.evidence[0].startswith("the scheduler took the row back from entry 31 to 8 before step")


def test_a_row_that_is_taken_back_and_was_never_followed_stays_so(serve) -> None:
    """It ran before there was a canary, or nobody knows its tokens."""
    served = serve(settings={"connector": Connector()})
    served.ask("a", [(3 * n) % 97 for n in range(30)], 60)
    go_on(served, 4)
    canary = served.wrapper.worker.kvcanary.canary
    canary._roots.clear()
    canary.take_back(served.runner.req_states.req_id_to_index["a"], "a", 31, BLOCK, (), Identity())
    assert canary._new == {}
    go_on(served, 3)
    assert served.wrapper.worker.kvcanary.report()["fired"] == {}
