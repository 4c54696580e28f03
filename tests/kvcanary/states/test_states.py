"""States: each way in which one may be taken, left, copied, published or loaded, right and wrong, by calls alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcanary import (
    NO_STATE,
    CanaryConfig,
    CanaryManager,
    KVCorruptionError,
    LifetimeError,
    PlanError,
    PoolView,
    StateView,
)
from kvcanary.errors import ContradictionError, ForeignSnapshotError

ENTRIES, LAYERS = 24, 2
PROMPT = list(range(5, 45))


class Rig:
    """A manager of states alone, whose tensors a test fills."""

    def __init__(self, mode: str = "log", content: str = "full", seed: int = 3, **settings: Any) -> None:
        self.conv = [torch.zeros(ENTRIES, 4, 3) for _ in range(LAYERS)]
        self.ssm = [torch.zeros(ENTRIES, 2, 4, 4) for _ in range(LAYERS)]
        self.view = StateView("linear", {"conv": self.conv, "ssm": self.ssm})
        self.manager = CanaryManager(CanaryConfig(mode=mode, content=content, seed=seed, **settings), [self.view])
        self.manager.arm()
        self.states = self.manager.states["linear"]
        self.generator = torch.Generator().manual_seed(1)

    def fill(self, entry: int) -> None:
        """A kernel leaves a new state there."""
        for tensor in (*self.conv, *self.ssm):
            tensor[entry] = torch.rand(tensor.shape[1:], generator=self.generator)

    def put(self, source: int, entry: int) -> None:
        for tensor in (*self.conv, *self.ssm):
            tensor[entry] = tensor[source]

    def held(self, entry: int) -> list[torch.Tensor]:
        return [tensor[entry].clone() for tensor in (*self.conv, *self.ssm)]

    def bring(self, values: Sequence[torch.Tensor], entry: int) -> None:
        for tensor, value in zip((*self.conv, *self.ssm), values, strict=True):
            tensor[entry] = value

    def admit(self, name: str, entries: Sequence[int], tokens: Sequence[int] = PROMPT, **root: str) -> None:
        self.manager.admit(name, tokens, **root)
        self.states.on_alloc(name, entries)

    def forward(self, name: str, source: int, entry: int, before: int, after: int, kind: str = "decode") -> None:
        self.manager.begin_step(self.manager.step + 1)
        self.states.take(kind, [name], [source if before else NO_STATE], [before])
        self.fill(entry)
        self.states.leave(kind, [name], [entry], [after])
        self.manager.check()

    def verify(
        self, name: str, source: int, before: int, paths: Sequence[Sequence[int]], entries: Sequence[int]
    ) -> None:
        """The states of a tree's nodes, one entry each."""
        self.manager.begin_step(self.manager.step + 1)
        self.states.take("verify", [name], [source], [before])
        for entry in entries:
            self.fill(entry)
        counts = [before + len(path) for path in paths]
        self.states.leave("verify", [name] * len(paths), entries, counts, paths)
        self.manager.check()

    def codes(self) -> list[str]:
        self.manager.check()
        return [finding.code for finding in self.manager.findings]

    def only(self, code: str, entry: int, family: str) -> Any:
        """The one finding: its check, its place, and its first cause."""
        self.manager.check()
        [finding] = self.manager.findings
        assert (finding.code, finding.entry, finding.causes[0].family) == (code, entry, family), finding
        return finding


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_what_is_kept_of_states_counts(rig):
    """Two records of an entry, and a fingerprint of all its bytes and of a slice in each layer."""
    assert rig.manager.num_bytes == rig.manager.session.state.num_bytes + 8 * ENTRIES * (2 * 8 + 2 * LAYERS)


# sound


def test_prefill_in_chunks_parking_and_decode_are_clean(rig):
    """A state of a part of a block, told as it is; another request runs while one is parked."""
    rig.admit("a", [1])
    rig.admit("b", [2])
    rig.forward("a", 1, 1, 0, 11, "prefill")
    for length in range(0, 40, 8):
        rig.forward("b", 2, 2, length, length + 8, "prefill")
    rig.forward("a", 1, 1, 11, 40, "prefill")
    assert rig.codes() == []
    assert rig.manager.certificate()["states_checked"] == 7


def test_accepted_counts_and_nodes_are_clean(rig):
    """Whatever node is accepted, its entry is taken; root and drafts are compared with what the request has then."""
    rig.admit("a", [1, 2, 3, 4])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.manager.append("a", [90])
    rig.verify("a", 1, 40, [(90,), (90, 91), (90, 92), (90, 92, 93)], [1, 2, 3, 4])
    rig.manager.append("a", [92, 77])
    rig.verify("a", 3, 42, [(77,), (77, 78)], [1, 2])
    rig.manager.append("a", [79])
    rig.forward("a", 1, 1, 43, 44)
    assert rig.codes() == []
    assert rig.manager.certificate()["unchecked"] == {}


@pytest.mark.parametrize("takes", ["copy", "in place"])
def test_prefix_hits_at_block_ends_are_clean(rig, takes):
    """Equal tokens have equal chains, whoever left the state; the owner goes on in another entry, then is gone."""
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 1, 0, 16, "prefill")
    rig.states.on_share("a", [1], [16])
    rig.forward("a", 1, 2, 16, 40, "prefill")
    rig.manager.release("a")
    rig.states.on_free([2])
    rig.admit("b", [3], [*PROMPT[:16], 1, 2, 3])
    if takes == "copy":
        rig.put(1, 3)
        rig.states.on_copy([1], [3])
    rig.forward("b", 3 if takes == "copy" else 1, 3, 16, 19, "prefill")
    rig.states.on_free([1])
    assert rig.codes() == []


def test_preemption_offload_and_load_are_clean(rig):
    """What was put away comes back into another entry; a request that begins anew begins from nothing."""
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    snapshot, values = rig.states.on_offload([1]), rig.held(1)
    rig.states.on_free([1])
    rig.admit("b", [1])
    rig.forward("b", 1, 1, 0, 40, "prefill")
    rig.states.on_alloc("a", [5])
    rig.bring(values, 5)
    rig.states.on_load("a", [5], [40], snapshot)
    rig.forward("a", 5, 5, 40, 40 + 1)
    rig.states.on_free([5])
    rig.states.on_alloc("a", [6])
    rig.forward("a", 6, 6, 0, 40, "prefill")
    assert rig.codes() == []


def test_padding_in_null_entries_and_nowhere_is_clean(rig):
    """Rows without a request read and write what is padding's."""
    rig.admit("a", [1])
    rig.manager.begin_step(1)
    rig.states.take("decode", ["a", None, None], [NO_STATE, 0, NO_STATE], [0, 0, 7])
    rig.fill(0)
    rig.fill(1)
    rig.states.leave("decode", ["a", None, None], [1, 0, NO_STATE], [1, 0, 0])
    assert rig.codes() == []


def test_an_entry_that_is_read_at_length_0_may_be_zero(rig):
    """Kernels that have no flag for a beginning read a cleared entry."""
    rig.admit("a", [1])
    rig.manager.begin_step(1)
    rig.states.take("prefill", ["a"], [1], [0])
    assert rig.codes() == []


# wrong: what is taken


@pytest.mark.parametrize(("length", "family", "words"), [(41, "lengths", "late"), (39, "lengths", "early")])
def test_one_token_early_or_late(rig, length, family, words):
    """R4 in both directions, and the cause says which."""
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, length, "prefill")
    rig.forward("a", 1, 1, 40, 41)
    finding = rig.only("R4", 1, family)
    assert finding.expected == {"absorbed": 40}
    assert finding.found["absorbed"] == length
    assert words in finding.causes[0].text


def test_tokens_absorbed_twice(rig):
    """The length was rolled back, the state was not."""
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.forward("a", 1, 1, 32, 40, "prefill")
    assert "fed again" in rig.only("R4", 1, "lengths").causes[0].text


@pytest.mark.parametrize("column", [1, 3])
def test_a_stale_column(rig, column):
    """vllm#39273, #56531, #43559: fewer, or more, of the drafts are in the state than were accepted."""
    rig.admit("a", [1, 2, 3])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.manager.append("a", [90])
    rig.verify("a", 1, 40, [(90,), (90, 91), (90, 91, 92)], [1, 2, 3])
    rig.manager.append("a", [91, 77])
    rig.forward("a", column, 1, 42, 43)
    finding = rig.only("R4", column, "draft")
    assert "the state after 42 tokens lies in entry 2" in finding.causes[0].evidence


def test_the_state_of_another_node(rig):
    """As many tokens, of a branch that was not accepted (R5)."""
    rig.admit("a", [1, 2, 3])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.manager.append("a", [90])
    rig.verify("a", 1, 40, [(90,), (90, 91), (90, 92)], [1, 2, 3])
    rig.manager.append("a", [91, 77])
    rig.forward("a", 3, 1, 42, 43)
    assert rig.only("R5", 3, "draft").found["first_different_position"] == 41


def test_a_copy_that_is_missing_between_blocks(rig):
    """vllm#53505: the next block is taken, and nothing came there (R12), or what was there is older (R4)."""
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 1, 0, 16, "prefill")
    rig.forward("a", 2, 2, 16, 24, "prefill")
    finding = rig.only("R12", 2, "transfer")
    assert finding.causes[0].text == "the state was not copied from entry 1"


def test_a_copy_that_is_missing_in_a_block_that_was_used(rig):
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 2, 0, 8, "prefill")
    rig.forward("a", 2, 1, 8, 16, "prefill")
    rig.forward("a", 2, 2, 16, 24, "prefill")
    rig.only("R4", 2, "transfer")


def test_the_state_of_another_request(rig):
    """R8, at the entry that the row names."""
    rig.admit("a", [1])
    rig.admit("b", [2])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.forward("b", 2, 2, 0, 40, "prefill")
    rig.forward("a", 2, 1, 40, 41)
    assert rig.only("R8", 2, "addressing").found["owner"] == "b"


def test_an_entry_that_was_freed_and_granted_while_it_is_read(rig):
    """R7 while it is free, R8 when it is another's; both are lifetimes."""
    for taken_again in (False, True):
        rig = Rig()
        rig.admit("a", [1, 2])
        rig.forward("a", 1, 1, 0, 40, "prefill")
        rig.states.on_free([1])
        if taken_again:
            rig.admit("b", [1])
            rig.forward("b", 1, 1, 0, 40, "prefill")
        rig.forward("a", 1, 2, 40, 41)
        rig.only("R8" if taken_again else "R7", 1, "lifetime")


def test_an_entry_that_nobody_wrote(rig):
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 40, 41)
    rig.only("R12", 1, "uninitialised")


def test_an_entry_that_was_not_cleared(rig):
    """The last owner's state is read by a row that begins."""
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.manager.release("a")
    rig.states.on_free([1])
    rig.admit("b", [1])
    rig.manager.begin_step(9)
    rig.states.take("prefill", ["b"], [1], [0])
    rig.only("R12", 1, "uninitialised")


def test_a_row_that_goes_on_from_nothing(rig):
    """Its state is named where it lies."""
    rig.admit("a", [4])
    rig.forward("a", 4, 4, 0, 40, "prefill")
    rig.manager.begin_step(9)
    rig.states.take("decode", ["a"], [NO_STATE], [40])
    assert rig.only("R4", 4, "transfer").found["absorbed"] == 0


@pytest.mark.parametrize("root", [{"salt": "tenant"}, {"adapter": "lora"}])
def test_a_hit_under_another_root(rig, root):
    """R6: the tokens are the same, salt or adapter is not."""
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 16, "prefill")
    rig.states.on_share("a", [1], [16])
    rig.admit("b", [2], **root)
    rig.forward("b", 1, 2, 16, 20, "prefill")
    assert "salt or the adapter" in rig.only("R6", 1, "identity").causes[0].text


def test_a_hit_of_another_prompt(rig):
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 16, "prefill")
    rig.states.on_share("a", [1], [16])
    rig.admit("b", [2], [*PROMPT[:9], 1, *PROMPT[10:]])
    rig.forward("b", 1, 2, 16, 20, "prefill")
    assert rig.only("R6", 1, "identity").found["first_different_position"] == 9


# wrong: what is left, and where


def test_padding_in_a_live_entry(rig):
    """tokenspeed#700: -1 was clamped to an entry that a parked request has."""
    rig.admit("a", [1])
    rig.admit("b", [2])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.manager.begin_step(9)
    rig.states.take("decode", ["b", None], [NO_STATE, 0], [0, 0])
    rig.states.leave("decode", ["b", None], [2, 1], [1, 0])
    assert rig.only("W9", 1, "graphs").readers == ("a",)


@pytest.mark.parametrize("content", ["full", "rolling"])
@pytest.mark.parametrize("with_null", [True, False])
def test_padding_that_nobody_tells(content, with_null):
    """Its bytes are found where the state is taken next."""
    rig = Rig(content=content)
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.fill(1)
    if with_null:
        rig.put(1, 0)
    rig.forward("a", 1, 1, 40, 41)
    finding = rig.only("R9", 1, "graphs")
    assert (finding.undeclared, finding.layers, finding.last_good_step) == (True, (0, 1), 1)


def test_one_bit(rig):
    """Part, element and bit are named."""
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.ssm[1].view(torch.int32)[1, 0, 2, 1] ^= 1 << 21
    rig.forward("a", 1, 1, 40, 41)
    finding = rig.only("R9", 1, "bits")
    assert (finding.part, finding.layer, finding.dim, finding.bit) == ("ssm", 1, 9, 21)


def test_one_bit_is_in_some_slice():
    """`rolling` compares each slice once in as many steps as there are."""
    rig = Rig(content="rolling")
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    for length in range(40, 40 + rig.view.num_slices):
        rig.manager.append("a", [length])
        rig.ssm[1].view(torch.int32)[1, 0, 2, 1] ^= 1 << 21
        rig.forward("a", 1, 1, length, length + 1)
    assert rig.codes() == ["R9"]


def test_writes_into_what_is_not_the_requests(rig):
    """W2 of a neighbour's, a free and a null entry; W1 outside; W3 of a published one."""
    rig.admit("a", [1])
    rig.admit("b", [2, 4])
    rig.forward("b", 2, 2, 0, 16, "prefill")
    rig.states.on_share("b", [2], [16])
    for entry, code, family in ((4, "W2", "addressing"), (7, "W2", "addressing"), (0, "W2", ""), (2, "W3", "lifetime")):
        rig.forward("a", 1, entry, 0, 8, "prefill")
        finding = rig.manager.findings[-1]
        assert (finding.code, finding.entry, finding.writer) == (code, entry, "a")
        assert not family or finding.causes[0].family == family
    rig.forward("a", 1, 1, 0, 8, "prefill")
    rig.states.leave("decode", ["a"], [ENTRIES], [9])
    assert rig.codes() == ["W2", "W2", "W2", "W3", "W1"]


def test_two_states_in_one_entry(rig):
    """Two nodes whose entries collide (W4)."""
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.manager.append("a", [90])
    rig.verify("a", 1, 40, [(90,), (90, 91), (90, 92)], [1, 2, 2])
    rig.only("W4", 2, "addressing")


# wrong: what is published, copied and loaded


def test_a_state_of_a_part_of_its_block_is_published(rig):
    """vllm#34587: block 0 keeps the state of 11 of 16 tokens; found when it is published, before anybody hits it."""
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 1, 0, 11, "prefill")
    rig.forward("a", 1, 2, 11, 32, "prefill")
    rig.states.on_share("a", [1, 2], [16, 32])
    finding = rig.only("R4", 1, "lengths")
    assert (finding.expected["absorbed"], finding.found["absorbed"], finding.site) == (16, 11, ("publish", 0))


def test_a_part_that_is_published_as_a_part_is_clean(rig):
    """Its length is what the cache knows it by; who takes it for more is R4."""
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 1, 0, 11, "prefill")
    rig.states.on_share("a", [1], [11])
    rig.admit("b", [3])
    rig.forward("b", 1, 3, 11, 40, "prefill")
    assert rig.codes() == []
    rig.admit("c", [4])
    rig.forward("c", 1, 4, 16, 40, "prefill")
    assert rig.codes() == ["R4"]


def test_an_entry_is_published_that_nobody_wrote(rig):
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.states.on_share("a", [2], [40])
    rig.only("R12", 2, "transfer")


def test_a_copy_that_did_not_arrive(rig):
    """T1: the bytes of the source are not there."""
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 1, 0, 16, "prefill")
    rig.states.on_copy([1], [2])
    rig.only("T1", 2, "transfer")


@pytest.mark.parametrize("content", ["full", "rolling"])
def test_a_copy_the_other_way_round(content):
    """vllm#53505: the source was overwritten; both entries hold the same bytes then."""
    rig = Rig(content=content)
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 2, 0, 8, "prefill")
    rig.forward("a", 2, 1, 8, 16, "prefill")
    rig.put(2, 1)
    rig.states.on_copy([1], [2])
    assert "other way round" in rig.only("T1", 1, "transfer").causes[0].text


def test_copies_are_read_before_they_are_written(rig):
    """An exchange of two entries is two copies at once."""
    rig.admit("a", [1])
    rig.admit("b", [2])
    rig.forward("a", 1, 1, 0, 16, "prefill")
    rig.forward("b", 2, 2, 0, 24, "prefill")
    first, second = rig.held(1), rig.held(2)
    rig.bring(first, 2)
    rig.bring(second, 1)
    rig.states.on_copy([1, 2], [2, 1])
    assert rig.codes() == []
    rig.forward("a", 1, 1, 16, 24, "prefill")
    assert rig.codes() == ["R4"]


@pytest.mark.parametrize("how", ["short", "misrouted", "stale", "other length", "damaged"])
def test_a_load_that_went_wrong(rig, how):
    """Bytes that are not those that left (T1), or the snapshot of another time (R4)."""
    rig.admit("a", [1])
    rig.admit("b", [2])
    rig.forward("a", 1, 1, 0, 16, "prefill")
    rig.forward("b", 2, 2, 0, 16, "prefill")
    old, old_values = rig.states.on_offload([1]), rig.held(1)
    rig.forward("a", 1, 1, 16, 40, "prefill")
    new, values = rig.states.on_offload([1]), rig.held(1)
    rig.states.on_free([1])
    rig.states.on_alloc("a", [6])
    snapshot = old if how == "other length" else new
    if how == "short":
        rig.conv[0][6] = values[0]
    elif how == "misrouted":
        rig.put(2, 6)
    elif how == "stale" or how == "other length":
        rig.bring(old_values, 6)
    else:
        rig.bring(values, 6)
        rig.conv[0][6, 0, 0] += 1
    rig.states.on_load("a", [6], [40], snapshot)
    finding = rig.only("R4" if how == "other length" else "T1", 6, "transfer")
    assert "entry 2" in str(finding.found) if how == "misrouted" else True


def test_a_load_without_a_snapshot_is_trusted_and_said(rig):
    rig.admit("a", [1])
    rig.fill(1)
    rig.states.on_load("a", [1], [40])
    rig.forward("a", 1, 1, 40, 41)
    assert rig.codes() == []
    assert list(rig.manager.certificate()["unchecked"].values()) == [1]


def test_a_snapshot_of_another_seed_is_refused():
    one, other = Rig(mode="raise", seed=1), Rig(mode="raise", seed=2)
    for rig in (one, other):
        rig.admit("a", [1])
        rig.forward("a", 1, 1, 0, 40, "prefill")
    with pytest.raises(ForeignSnapshotError, match="under the seed that made it"):
        other.states.on_load("a", [1], [40], one.states.on_offload([1]))
    with pytest.raises(ContradictionError, match="into as many entries as it left, got 2 for 1"):
        one.states.on_load("a", [1, 2], [40, 40], one.states.on_offload([1]))


# drafts that nobody can judge yet, and what contradicts


def test_drafts_whose_tokens_are_not_known_yet_are_counted(rig):
    """A host that lags: not judged, and the certificate says so."""
    rig.admit("a", [1, 2])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    rig.verify("a", 1, 40, [(90,), (90, 91)], [1, 2])
    rig.forward("a", 2, 1, 42, 43)
    assert rig.codes() == []
    assert sum(rig.manager.certificate()["unchecked"].values()) == 1


def test_contradictions_raise_in_mode_raise_and_are_told_in_the_others():
    """A double free, a grant of what is not free, an unknown entry, an unknown request."""
    events = [
        lambda rig: rig.states.on_free([5]),
        lambda rig: rig.states.on_alloc("a", [1]),
        lambda rig: rig.states.on_alloc("a", [0]),
        lambda rig: rig.states.on_alloc("a", [ENTRIES]),
        lambda rig: rig.states.on_share("nobody", [1], [1]),
    ]
    for event in events:
        strict, lenient = Rig(mode="raise"), Rig(mode="log")
        for rig in (strict, lenient):
            rig.admit("a", [1])
        with pytest.raises((LifetimeError, ContradictionError)):
            event(strict)
        event(lenient)
        assert lenient.codes() == ["L1"]


def test_misuse_is_told_in_every_mode(rig):
    """Kinds, counts and shapes are the adapter's."""
    rig.admit("a", [1])
    with pytest.raises(PlanError, match="kind must be one of prefill, decode"):
        rig.states.take("replay", ["a"], [1], [0])
    with pytest.raises(PlanError, match="one each a row, got 1, 2 and 1"):
        rig.states.take("decode", ["a"], [1, 2], [0])
    with pytest.raises(PlanError, match="at most as many drafts, got 2"):
        rig.states.leave("verify", ["a"], [1], [1], [(4, 5)])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "one tensor a layer, got none"),
        ({"conv": [torch.zeros(4, 3, dtype=torch.bfloat16)]}, "must be whole 32-bit words, got 3 elements of 2 B"),
        ({"conv": [torch.zeros(4, 6)[:, ::2]]}, "must be dense"),
        ([torch.zeros(4, 2), torch.zeros(5, 2)], "layers are alike"),
        ({"a": [torch.zeros(4, 2)], "b": [torch.zeros(5, 2)]}, "parts of a pool have the same"),
    ],
)
def test_views_that_do_not_fit(parts, words):
    with pytest.raises(PlanError, match=words) as caught:
        StateView("linear", parts)
    assert "states 'linear'" in str(caught.value)


def test_states_beside_pools():
    """A hybrid: both are judged by one manager, names are one set, and requests end by their pages."""
    k = [torch.zeros(8, 1, 4)]
    pool, view = PoolView("kv", k, None, 4), StateView("kv", [torch.zeros(4, 4)])
    with pytest.raises(PlanError, match="must have different names, got kv, kv"):
        CanaryManager(CanaryConfig(mode="raise"), [pool, view])
    manager = CanaryManager(CanaryConfig(mode="raise"), [pool, StateView("linear", [torch.zeros(4, 4)])])
    assert set(manager.states) == {"linear"}


def test_modes(tmp_path):
    """raise stops, with a dump; abort ends who is touched, and nobody whose page has the entry's number."""
    rig = Rig(mode="raise", dump_dir=str(tmp_path))
    rig.admit("a", [1])
    rig.forward("a", 1, 1, 0, 40, "prefill")
    with pytest.raises(KVCorruptionError) as caught:
        rig.forward("a", 1, 1, 39, 41)
    assert caught.value.report.dump
    rig = Rig(mode="abort")
    rig.admit("a", [1])
    rig.admit("b", [2])
    for name, entry in (("a", 1), ("b", 2)):
        rig.forward(name, entry, entry, 0, 40, "prefill")
    rig.fill(1)
    rig.forward("a", 1, 1, 40, 41)
    assert rig.manager.aborted == {"a"}
