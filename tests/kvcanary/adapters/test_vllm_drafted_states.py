"""States of a vLLM that drafts, without vLLM: a column for each token, of which the next forward goes on from one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcanary.adapters.hosted.states import NOT_WATCHED
from kvcanary.adapters.observed.state import RING
from kvcanary.adapters.vllm import handle
from kvcanary.adapters.vllm.compatibility import DRAFT_STATES_SIDE
from kvcanary.adapters.vllm.runner_v2 import HandleV2
from kvcanary.adapters.vllm.states import BlockStates, group_of, not_followed
from tests.kvcanary.adapters.test_vllm_states import BLOCKS, layers, spec
from tests.support.watching_canary import found_in, watching_canary

DRAFTS = 2
COLUMNS = DRAFTS + 1
DELTA = SimpleNamespace(name="GDN_ATTN")
CHAINS = 100, 200  # of the rows, before their first token


def metadata_of(table: Tensor, is_draft: tuple[bool, ...], accepted: tuple[int, ...]) -> Any:
    """As the builder of vLLM's gated delta nets has it of rows in batch order."""
    masks, blocks = torch.tensor(is_draft), table[:, :COLUMNS]
    if not any(is_draft):
        none = dict.fromkeys(("spec_sequence_masks", "spec_state_indices_tensor", "num_accepted_tokens"))
        return SimpleNamespace(**none, non_spec_state_indices_tensor=blocks[:, 0])
    return SimpleNamespace(
        spec_sequence_masks=masks,
        spec_state_indices_tensor=blocks[masks],
        num_accepted_tokens=torch.tensor(accepted)[masks],
        non_spec_state_indices_tensor=None if all(is_draft) else blocks[~masks, 0],
    )


class DraftHost:
    """Two rows with a block for each token of a step; `forward` runs `new` tokens of each row."""

    def __init__(self, content: str = "full") -> None:
        self.canary, self.layers = watching_canary(content), layers()
        own = spec("none", num_speculative_blocks=DRAFTS, mamba_type=DELTA, block_size=512)
        self.states = BlockStates([group_of(self.canary, 0, 0, own, self.layers, 0, "l0")], [512])
        self.table = torch.tensor([[1, 3, 5], [2, 4, 6]], dtype=torch.int32)
        self.states.given([("a", [[1, 3, 5]], 0), ("b", [[2, 4, 6]], 0)])
        self.lens, self.accepted = [0, 0], [1, 1]

    def forward(self, new: tuple[int, int], kept: tuple[int, int], is_draft: tuple[bool, bool] = (True, True)) -> Any:
        """kept: of the new tokens of each row, those that are accepted;  is_draft: as the kernels take the rows"""
        canary, truth = self.canary, self.canary.memory.truth
        canary.step += 1
        site = "verify", 0
        canary.steps.append(SimpleNamespace(events=canary.events, number=canary.step, requests=["a", "b"], site=site))
        canary.events = []
        canary.launches.read(site, sum(new))
        past, ends = torch.tensor(self.lens), torch.tensor(self.lens) + torch.tensor(new)
        canary.launches.seeds[:, 0], canary.launches.seeds[:, 1] = torch.tensor(CHAINS) + past, 1
        own = [CHAINS[row] + self.lens[row] + 1 + n for row in (0, 1) for n in range(new[row])]
        canary.launches.chains[canary.step % RING, : len(own)] = torch.tensor(own)
        truth.ends[:], truth.tails[:, 0] = ends, torch.tensor(CHAINS) + ends
        starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32)
        lengths = ends.to(torch.int32)
        made: Any = SimpleNamespace(lengths=lengths, starts=starts, num_tokens=sum(new), numbers=np.array([0, 1]))
        self.states.taken(made, [self.table], {"l0": metadata_of(self.table, is_draft, tuple(self.accepted))})
        for row in (0, 1):
            for column in range(new[row] if is_draft[row] else 1):
                self.layers[-1].kv_cache[1][self.table[row, column]] += 1
        self.states.left()
        self.lens, self.accepted = [n + k for n, k in zip(self.lens, kept, strict=True)], list(kept)
        return [(found.code, found.request_id, found.slot, found.expected, found.found) for found in found_in(canary)]

    def prompt(self, lengths: tuple[int, int] = (7, 4)) -> Any:
        found = self.forward(lengths, lengths, (False, False))
        self.accepted = [1, 1]
        return found


@pytest.fixture(params=["full", "rolling", "write"])
def host(request: pytest.FixtureRequest) -> DraftHost:
    host = DraftHost(request.param)
    assert host.prompt() == []
    return host


def test_rows_go_on_from_what_was_accepted(host: DraftHost) -> None:
    """All drafts, one, none; a row without drafts beside one with some; nothing is found."""
    for new, kept in (((3, 3), (3, 1)), ((3, 1), (2, 1)), ((1, 3), (1, 2)), ((3, 3), (1, 3)), ((1, 1), (1, 1))):
        assert host.forward(new, kept) == []
    assert host.canary.coverage.states_checked == 12
    assert host.states.described[0]["parts"].keys() == {"ssm"}


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


def test_states_of_another_request_are_told(host: DraftHost) -> None:
    """R8 of both rows, where lengths and chains would not tell them apart."""
    host.forward((3, 3), (3, 3))
    host.table = host.table.flip(0)
    found = host.forward((3, 3), (1, 1))
    assert {own[0] for own in found} == {"R8"}
    assert [own[1] for own in found] == ["a", "b"]


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


def test_drafts_are_followed_of_delta_nets_without_a_prefix_cache() -> None:
    """Others say why they are not."""
    drafting = {"num_speculative_blocks": 2}
    assert not_followed(spec("none", mamba_type=DELTA, **drafting), True, False) is None
    for other in (spec("align", mamba_type=DELTA, **drafting), spec("none", **drafting)):
        assert "only those of gated delta nets" in (not_followed(other, True, False) or "")


@pytest.mark.parametrize("drafts", [True, False])
def test_names_that_are_gone_leave_out_states_of_drafts_alone(monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
    """A release without them serves others as before."""
    monkeypatch.setattr(handle, "missing", lambda needs: ["it is gone"] if {*DRAFT_STATES_SIDE} <= {*needs} else [])
    own: Any = SimpleNamespace(
        _drafts=lambda: drafts, _table_block=lambda group: (8, 1), worker=SimpleNamespace(vllm_config=None)
    )
    why = handle.Handle._without_states(own, 0, spec("none", mamba_type=DELTA, num_speculative_blocks=DRAFTS * drafts))
    assert why == (f"{NOT_WATCHED}it is gone" if drafts else None)


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
