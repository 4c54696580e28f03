"""States of a vLLM that drafts, without vLLM: a column for each token, of which the next forward goes on from one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcanary.adapters.hosted.guard import Guard
from kvcanary.adapters.hosted.replacements import Replacements, replaced_by
from kvcanary.adapters.hosted.states import NOT_WATCHED
from kvcanary.adapters.observed.state import RING
from kvcanary.adapters.vllm import handle
from kvcanary.adapters.vllm.compatibility import ACCEPTED, DRAFT_STATES_SIDE
from kvcanary.adapters.vllm.connectors import LoadingHandle
from kvcanary.adapters.vllm.runner_v1 import HandleV1
from kvcanary.adapters.vllm.runner_v2 import HandleV2
from kvcanary.adapters.vllm.states import BlockStates, group_of, not_followed
from kvcanary.errors import PlanError
from tests.kvcanary.adapters.test_vllm_states import BLOCKS, layers, spec
from tests.support.watching_canary import found_in, launched_by, no_rows, watching_canary

DRAFTS = 2
COLUMNS = DRAFTS + 1
DELTA, MAMBA2 = SimpleNamespace(name="GDN_ATTN"), SimpleNamespace(name="MAMBA2")
SIZE = 8  # tokens of a block, with a prefix cache
CHAINS = 100, 200  # of the rows, before their first token


def metadata_of(columns: Tensor, is_draft: tuple[bool, ...], accepted: tuple[int, ...], kind: Any = DELTA) -> Any:
    """As vLLM's builders have it of rows in batch order; columns: [rows, COLUMNS] of their tables.

    Of Mamba 2, where rows of drafts stand in front; none was accepted where none are known.
    """
    masks, known = (torch.tensor(own, device=columns.device) for own in (is_draft, accepted))
    if kind is MAMBA2:
        count = sum(is_draft)
        own = {"state_indices_tensor_d": columns[:count], "state_indices_tensor_p": columns[count:, 0]}
        own["num_accepted_tokens"] = known[:count] if (known > 1).any() else None
        return SimpleNamespace(num_decodes=count, **own)
    if not any(is_draft):
        none = dict.fromkeys(("spec_sequence_masks", "spec_state_indices_tensor", "num_accepted_tokens"))
        return SimpleNamespace(**none, non_spec_state_indices_tensor=columns[:, 0])
    return SimpleNamespace(
        spec_sequence_masks=masks,
        spec_state_indices_tensor=columns[masks],
        num_accepted_tokens=known[masks],
        non_spec_state_indices_tensor=None if all(is_draft) else columns[~masks, 0],
    )


class DraftHost:
    """Two rows with a block for each token of a step; `forward` runs `new` tokens of each row."""

    mode, table = "none", torch.tensor([[1, 3, 5], [2, 4, 6]], dtype=torch.int32)

    def __init__(self, content: str = "full", kind: Any = DELTA, device: str = "cpu", **others: Any) -> None:
        self.canary, self.layers, self.kind = watching_canary(content, device), layers(device), kind
        own = spec(self.mode, num_speculative_blocks=DRAFTS, mamba_type=kind, **others)
        self.states = BlockStates([group_of(self.canary, 0, 0, own, self.layers, SIZE, "l0")], [SIZE])
        self.table = self.table.clone().to(device)
        self.states.given([(name, [row.tolist()], 0) for name, row in zip("ab", self.table, strict=True)])
        self.lens, self.accepted, self.chains = [0, 0], [1, 1], list(CHAINS)

    def forward(self, new: tuple[int, int], kept: tuple[int, int], is_draft: tuple[bool, bool] = (True, True)) -> Any:
        """kept: of the new tokens of each row, those that are accepted;  is_draft: as the kernels take the rows"""
        canary, truth = self.canary, self.canary.memory.truth
        canary.step += 1
        site = "verify", 0
        canary.steps.append(SimpleNamespace(events=canary.events, number=canary.step, requests=["a", "b"], site=site))
        canary.events = []
        canary.launches.read(site, sum(new))
        device = truth.ends.device
        past, ends = (torch.tensor(own, device=device) for own in (self.lens, np.add(self.lens, new).tolist()))
        canary.launches.seeds[:, 0], canary.launches.seeds[:, 1] = torch.tensor(self.chains, device=device) + past, 1
        own = [self.chains[row] + self.lens[row] + 1 + n for row in (0, 1) for n in range(new[row])]
        canary.launches.chains[canary.step % RING, : len(own)] = torch.tensor(own, device=device)
        truth.ends[:], truth.tails[:, 0] = ends, torch.tensor(self.chains, device=device) + ends
        self.move(ends.tolist())
        starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32, device=device)
        lengths = ends.to(torch.int32)
        made: Any = SimpleNamespace(lengths=lengths, starts=starts, num_tokens=sum(new), numbers=np.array([0, 1]))
        columns = torch.stack([self.columns(row, int(ends[row])) for row in (0, 1)])
        metadata = metadata_of(columns, is_draft, tuple(self.accepted), self.kind)
        self.states.taken(made, [self.table], {"l0": metadata})
        for row in (0, 1):
            self.layers[-1].kv_cache[0][columns[row, 0]] += 1
            for column in range(new[row] if is_draft[row] else 1):
                self.layers[-1].kv_cache[1][columns[row, column]] += 1
        self.states.left()
        self.lens, self.accepted = [n + k for n, k in zip(self.lens, kept, strict=True)], list(kept)
        self.settle(is_draft)
        return [(found.code, found.request_id, found.slot, found.expected, found.found) for found in found_in(canary)]

    def prompt(self, lengths: tuple[int, int] = (7, 4)) -> Any:
        found = self.forward(lengths, lengths, (False, False))
        self.accepted = [1, 1]
        return found

    def columns(self, row: int, end: int) -> Tensor:
        """[COLUMNS] blocks of a forward up to so many tokens."""
        return self.table[row, :COLUMNS]

    def move(self, ends: list[int]) -> None:
        """What vLLM copies before a forward: nothing without a prefix cache."""

    def settle(self, is_draft: tuple[bool, bool]) -> None:
        """And once it is known what was accepted."""
        self.states.accepted(self.table.new_tensor(self.accepted))


class CachedDraftHost(DraftHost):
    """The same with a prefix cache: a row goes on in the column of its last token, and full blocks are kept."""

    mode = "align"
    table = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], dtype=torch.int32)
    copies = keeps = True  # states into the next column, and into full blocks
    went: list[int | None]  # column of the last forward, by row; None: there was none

    def columns(self, row: int, end: int) -> Tensor:
        first = (end - 1) // SIZE
        return self.table[row, first : first + COLUMNS]

    def move(self, ends: list[int]) -> None:
        self.went = getattr(self, "went", [None, None])
        for row, end in enumerate(ends):
            past, now, last = self.lens[row], (end - 1) // SIZE, self.went[row]
            last = (past - 1) // SIZE if last is None else last
            if past and last != now:
                if self.copies:
                    self.copy(row, last, now, self.accepted[row] - 1)
                self.accepted[row] = 1
            self.went[row] = now

    def copy(self, row: int, source: int, to: int, bias: int) -> None:
        """The matrix of a column so many further on, and the window from so many tokens on."""
        for layer in self.layers:
            window, matrix = layer.kv_cache
            own = self.table[row]
            matrix[own[to]] = matrix[own[source + bias]].clone()
            window[own[to], : 3 - bias] = window[own[source], bias:].clone()

    def settle(self, is_draft: tuple[bool, bool]) -> None:
        counts = [kept if own else 1 for kept, own in zip(self.accepted, is_draft, strict=True)]
        for row, kept in enumerate(counts):
            column = self.went[row]
            first = self.lens[row] - kept + 1  # tokens that the first of its states has absorbed
            full = self.lens[row] // SIZE
            if column is None or full * SIZE < first:
                continue
            if full - 1 == column:
                self.accepted[row] = 1
            if self.keeps and (full - 1, 0) != (column, full * SIZE - first):
                self.copy(row, column, full - 1, full * SIZE - first)
        self.states.accepted(self.table.new_tensor(counts))


@pytest.mark.parametrize("made", [DraftHost, CachedDraftHost])
def test_what_forwards_launch_was_prepared(made: type[DraftHost]) -> None:
    """Each launch of a served forward came twice before, run and captured; and what was prepared is no row's."""
    host = made(num_prefill_checkpoint_blocks=1) if made is CachedDraftHost else made()
    seen = launched_by(host.canary)
    host.states.prepare(no_rows(), [host.table])
    [drafted] = [group.drafted for group in host.states.groups]
    assert not any(own.any() for own in drafted.places)
    assert set(seen.values()) == {2}
    prepared = set(seen)
    host.states.given([(name, [row.tolist()], 0) for name, row in zip("ab", host.table, strict=True)])
    assert host.prompt((SIZE + 3, 4)) == []
    for new, kept in (((3, 3), (3, 1)), ((3, 1), (2, 1)), ((1, 1), (1, 1))):
        assert host.forward(new, kept) == []
    assert (host.canary.coverage.states_checked, set(seen)) == (8, prepared)


def test_a_worker_prepares_its_states_behind_its_canary() -> None:
    """Over an empty forward and its own tables; without states there is nothing more."""
    told: list[Any] = []
    states = SimpleNamespace(prepare=lambda *own: told.append(own))
    own: Any = SimpleNamespace(_empty_forward=lambda: "none", _block_tables=lambda: "tables", _states=states)
    handle.Handle._prepare(own, SimpleNamespace(prepare=told.append))
    assert told == ["none", ("none", "tables")]
    own._states = None
    handle.Handle._prepare(own, SimpleNamespace(prepare=told.append))
    assert told[2:] == ["none"]


@pytest.fixture(params=[(content, kind) for content in ("full", "rolling", "write") for kind in (DELTA, MAMBA2)])
def host(request: pytest.FixtureRequest) -> DraftHost:
    host = DraftHost(*request.param)
    assert host.prompt() == []
    return host


def test_rows_go_on_from_what_was_accepted(host: DraftHost) -> None:
    """All drafts, one, none; a row without drafts beside one with some; nothing is found."""
    for new, kept in (((3, 3), (3, 1)), ((3, 1), (2, 1)), ((1, 3), (1, 2)), ((3, 3), (1, 3)), ((1, 1), (1, 1))):
        assert host.forward(new, kept) == []
    assert host.canary.coverage.states_checked == 12
    assert [own["parts"].keys() for own in host.states.described] == [{"ssm"}, {"conv"}]


@pytest.mark.parametrize(
    ("wrong", "absorbed", "slot"), [(1, 8, 1), (2, 9, 3)], ids=["the first column", "one draft less"]
)
def test_a_column_of_another_draft_is_told(host: DraftHost, wrong: int, absorbed: int, slot: int) -> None:
    """R4 with how many tokens it has absorbed."""
    host.forward((3, 3), (3, 3))
    host.accepted[0] = wrong
    assert host.forward((3, 3), (1, 1)) == [("R4", "a", slot, {"absorbed": 10}, {"absorbed": absorbed})]


def test_a_rejected_draft_is_told(host: DraftHost) -> None:
    """R4: its state has absorbed a token that the row does not have."""
    host.forward((3, 3), (1, 2))
    host.accepted[0] = 2
    assert host.forward((3, 3), (1, 1)) == [("R4", "a", 3, {"absorbed": 8}, {"absorbed": 9})]


def test_a_step_without_drafts_goes_on_from_the_last_column(host: DraftHost) -> None:
    """In vllm#39273 it took the first one, whatever was accepted before."""
    host.forward((3, 3), (3, 2))
    found = host.forward((1, 1), (1, 1), is_draft=(False, False))
    assert [own[:3] for own in found] == [("R4", "a", 1), ("R4", "b", 2)]


def test_a_step_without_drafts_leaves_one_state(host: DraftHost) -> None:
    """What lies in the other columns is what the step before left there."""
    host.forward((3, 3), (1, 1))
    [group] = host.states.groups
    before = group.watched._states.known[0].clone()
    assert host.forward((1, 1), (1, 1), is_draft=(False, False)) == []
    changed = (group.watched._states.known[0] != before).nonzero()[:, 0].tolist()
    assert changed == [1, 2]


def test_a_state_in_a_block_that_was_given_back_is_nobodys(host: DraftHost) -> None:
    """R7 once a row goes on from it, though the forwards between have left one there, behind tokens of its own."""
    host.forward((3, 3), (1, 2))
    [group] = host.states.groups
    group.watched.freed(torch.tensor([3], device=host.table.device))
    assert host.forward((3, 3), (2, 1)) == []
    [found] = host.forward((3, 3), (1, 1))
    assert found[:3] == ("R7", "a", 3)


def test_states_of_another_request_are_told(host: DraftHost) -> None:
    """R8 of both rows, where lengths and chains would not tell them apart."""
    host.forward((3, 3), (3, 3))
    host.table = host.table.flip(0)
    found = host.forward((3, 3), (1, 1))
    assert {own[0] for own in found} == {"R8"}
    assert [own[1] for own in found] == ["a", "b", "a", "b"]  # of matrices, then of windows


def test_a_bit_of_an_accepted_state_is_told() -> None:
    """R9; in a column that nobody goes on from nobody misses it."""
    host = DraftHost()
    host.prompt()
    host.forward((3, 3), (2, 3))
    words = host.layers[1].kv_cache[1].view(torch.int32).view(BLOCKS, -1)
    words[5, 3] ^= 1 << 4
    assert host.forward((3, 3), (2, 3)) == []
    words = host.layers[1].kv_cache[1].view(torch.int32).view(BLOCKS, -1)
    words[3, 3] ^= 1 << 4
    assert [own[:3] for own in host.forward((3, 3), (1, 1))] == [("R9", "a", 3)]


def test_a_window_is_compared_where_it_was_left() -> None:
    """R9 of a byte that has changed in the first column; in the others lies none that anybody takes."""
    host = DraftHost()
    host.prompt()
    host.forward((3, 3), (2, 3))
    host.layers[1].kv_cache[0][5, 0, 3] += 1
    assert host.forward((3, 3), (2, 3)) == []
    host.layers[1].kv_cache[0][2, 0, 3] += 1
    [found] = host.forward((3, 3), (1, 1))
    assert found[:3] == ("R9", "b", 2)


@pytest.fixture(params=[("full", DELTA), ("rolling", MAMBA2), ("write", DELTA)], ids=str)
def cached(request: pytest.FixtureRequest) -> CachedDraftHost:
    host = CachedDraftHost(*request.param)
    assert host.prompt() == []
    return host


KEPT = (3, 1), (2, 3), (1, 1), (3, 3), (2, 2), (1, 3), (3, 1)


def test_states_go_through_blocks_of_the_prefix_cache(cached: CachedDraftHost) -> None:
    """Drafts fill blocks in their middle and at their end, and columns change between forwards."""
    for kept in KEPT:
        assert cached.forward((3, 3), kept) == []
    assert cached.lens == [22, 18]


def test_a_full_block_can_be_hit(cached: CachedDraftHost) -> None:
    """By a row that begins behind it; R6 where its prompt is another. It was filled by drafts, and copied there."""
    for kept in KEPT[:3]:
        cached.forward((3, 3), kept)
    for chain, found in (CHAINS[0], []), (CHAINS[0] + 1, [("R6", "b", 11)]):
        cached.canary.memory.truth.uids[1] += 1
        cached.table[1] = torch.tensor([1, 11, 0, 0, 0])
        cached.states.given([("c", [[1, 11]], SIZE)])
        cached.lens[1], cached.chains[1], cached.accepted[1], cached.went[1] = SIZE, chain, 1, None
        assert [own[:3] for own in cached.forward((3, 5), (1, 5), (True, False))] == found


@pytest.mark.parametrize("kind", [DELTA, MAMBA2], ids=str)
def test_copies_that_are_left_out_are_told(kind: Any) -> None:
    """T1 of the row whose next column is not what was to be copied there."""
    host = CachedDraftHost(kind=kind)
    host.prompt()
    host.forward((3, 3), (1, 3))  # row b has 7 tokens, and goes on in its next column; row a is there already
    host.copies = False
    assert [own[:3] for own in host.forward((3, 3), (1, 1))] == [("T1", "b", 7)]


def test_a_full_block_that_was_not_kept_is_told() -> None:
    """Its row has accepted two drafts, of which the last fills it: the first column holds an older state then."""
    host = CachedDraftHost()
    host.prompt((5, 1))
    host.keeps = False
    assert host.forward((3, 3), (3, 1)) == []
    assert [own[:3] for own in host.forward((3, 3), (1, 1))] == [("T1", "a", 2)]


def test_a_full_block_that_drafts_go_on_in_is_told() -> None:
    """W3: the table's next column is the block that is full, and that others may begin from."""
    host = CachedDraftHost()
    host.prompt((8, 1))
    host.table[0, 1] = 1
    assert ("W3", "a", 1) in [own[:3] for own in host.forward((3, 3), (1, 1))]


def test_what_a_prompt_leaves_within_it_can_be_hit() -> None:
    """A server that drafts has kernels, too, which leave a state at the end of the last full block of a prompt."""
    host = CachedDraftHost(num_prefill_checkpoint_blocks=1)
    for layer in host.layers:
        for part in layer.kv_cache:
            part[1] += 1
    assert host.prompt((11, 3)) == []
    [group] = host.states.groups
    known, chains = group.watched._states.known, group.watched._states.chains
    assert (known[0, 1], known[1, 1], chains[1]) == (SIZE, 11, CHAINS[0] + SIZE)


def test_drafts_are_followed_of_delta_nets_and_mamba_2() -> None:
    """With a prefix cache and without; others say why they are not."""
    drafting = {"num_speculative_blocks": 2}
    for mode in "none", "align":
        for kind in DELTA, MAMBA2:
            assert not_followed(spec(mode, mamba_type=kind, **drafting), True, False) is None
        for other in spec(mode, mamba_type=SimpleNamespace(name="LINEAR"), **drafting), spec(mode, mamba_type=DELTA):
            told = not_followed(other, True, False)
            assert "only those of gated delta nets and Mamba 2 are, a block a draft" in (told or "")


def test_a_state_of_other_parts_is_not_watched_where_a_server_drafts() -> None:
    """Which of them is a window nobody knows."""
    own = spec("none", mamba_type=MAMBA2, num_speculative_blocks=2)
    three = [SimpleNamespace(kv_cache=(*layer.kv_cache, layer.kv_cache[1].clone())) for layer in layers()]
    with pytest.raises(PlanError, match="they are a window and a matrix, not 3 parts"):
        group_of(watching_canary("full"), 0, 0, own, three, 0)


@pytest.mark.parametrize("drafts", [True, False])
def test_names_that_are_gone_leave_out_states_of_drafts_alone(monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
    """A release without them serves others as before."""
    monkeypatch.setattr(handle, "missing", lambda needs: ["it is gone"] if {*DRAFT_STATES_SIDE} <= {*needs} else [])
    own: Any = SimpleNamespace(
        _drafts=lambda: drafts, _table_block=lambda group: (8, 1), worker=SimpleNamespace(vllm_config=None)
    )
    why = handle.Handle._without_states(own, 0, spec("none", mamba_type=DELTA, num_speculative_blocks=DRAFTS * drafts))
    assert why == (f"{NOT_WATCHED}it is gone" if drafts else None)


@pytest.mark.parametrize("sampled", [2, torch.tensor([2, 2])], ids=["a number", "by row"])
def test_runner_v2_tells_what_was_accepted(sampled: Any) -> None:
    """Behind the copies that are made for it."""
    told = list[Any]()
    own: Any = SimpleNamespace(_accepted=lambda counts: told.append(counts.tolist()))
    given = torch.tensor([1, 0]), sampled, "computed"
    HandleV2._postprocess_state(own, lambda *args: told.append(args), *given)
    assert (told[0], told[1]) == (given, [2, 2])


def test_runner_v1_tells_what_was_accepted() -> None:
    """As it has counted it."""
    told, held = list[Any](), SimpleNamespace(gpu="counts")
    own: Any = SimpleNamespace(_accepted=told.append, runner=SimpleNamespace(num_accepted_tokens=held))
    HandleV1._count_accepted(own, lambda *args: told.append(args), "tokens", "output")
    assert told == [("tokens", "output"), "counts"]


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("runner", [HandleV1, HandleV2])
def test_runners_are_asked_what_was_accepted_where_they_draft(
    monkeypatch: pytest.MonkeyPatch, runner: Any, drafts: bool
) -> None:
    """By a hook, which comes with the states."""
    monkeypatch.setattr(LoadingHandle, "_bind", lambda self: "canary")
    own = runner.__new__(runner)
    own._states, own._loads, own._max_new = object(), None, 1 + DRAFTS * drafts
    own.replaced = Replacements(Guard("vllm", "log", lambda reason: None))
    state = SimpleNamespace(preprocess_state=print, prepare_attn=print, postprocess_state=print)
    own.runner = SimpleNamespace(model_state=state, **{ACCEPTED: print})
    assert own._bind() == "canary"
    asked = (own.runner, ACCEPTED) if runner is HandleV1 else (state, "postprocess_state")
    assert (replaced_by(*asked) is not None) == drafts


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [DELTA, MAMBA2], ids=str)
def test_states_of_drafts_are_judged_on_a_gpu(kind: Any) -> None:
    """As on a CPU: silent where blocks are filled, T1 where a copy is left out."""
    host = CachedDraftHost("rolling", kind, "cuda")
    assert host.prompt() == []
    assert [host.forward((3, 3), kept) for kept in KEPT[:3]] == [[]] * 3
    host.copies = False
    found = [own[0] for _ in range(2) for own in host.forward((3, 3), (3, 3))]
    assert set(found) == {"T1"}


@pytest.mark.parametrize("drafts", [True, False])
def test_runner_v2_takes_states_when_it_knows_which(drafts: bool) -> None:
    """Behind their copies; where it drafts, when the metadata say which columns the kernels take. Once a step."""
    taken = list[Any]()
    own: Any = SimpleNamespace(_drafts=lambda: drafts, is_armed=True, _every_table=["table"])
    own._take = lambda tables, metadata: taken.append((tables, metadata))
    own._take_prepared = partial(HandleV2._take_prepared, own)
    HandleV2._preprocess_state(own, lambda: None)
    assert taken == ([] if drafts else [(["table"], None)])
    assert HandleV2._state_metadata(own, lambda: {"l0": "metadata"}) == {"l0": "metadata"}
    assert taken == [(["table"], {"l0": "metadata"} if drafts else None)]
