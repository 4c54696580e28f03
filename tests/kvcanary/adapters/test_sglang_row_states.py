"""SGLang's recurrent states where it drafts, and where it keeps some for its prefix cache; without SGLang."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcanary.adapters.observed.state import RING
from kvcanary.adapters.sglang import states
from kvcanary.adapters.sglang.compatibility import NEEDED_OF, STATES, STATES_OF_DRAFTS
from kvcanary.adapters.sglang.runner import WatchedRunner
from kvcanary.adapters.sglang.states import COMMIT, RUN_INIT, RowStates, follow, nodes_of, not_followed, views_of
from tests.support.watching_canary import found_in, launched_by, no_rows, watching_canary

ENTRIES, LAYERS, NODES = 8, 2, 4
CHAINS = 100, 200  # of the rows, before their first token
CHUNK = 4  # behind a multiple of so many tokens a state is kept for the prefix cache
Found = list[tuple[str, str | None, int, str]]


class Pool:
    """As SGLang's `MambaPool`: windows and matrices by layer and entry, and matrices by layer, row and node."""

    def __init__(self, device: str, has_matrices: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = (LAYERS, ENTRIES, 16, 4), (LAYERS, ENTRIES, 2, 8, 8), (LAYERS, 3, NODES, 2, 8, 8)
        conv, temporal, nodes = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
        self.mamba_cache = SimpleNamespace(conv=[conv], temporal=temporal, intermediate_ssm=nodes)
        self.tensors = [conv, temporal] if has_matrices else [conv]
        if not has_matrices:
            self.mamba_cache.temporal, self.mamba_cache.intermediate_ssm = torch.zeros(LAYERS, 0), None

    def copy_from(self, sources: Tensor, entries: Tensor) -> None:
        for tensor in self.tensors:
            tensor[:, entries] = tensor[:, sources]


class Host:
    """Requests "a" and "b" in rows 0 and 1, whose states lie in entries 1 and 2; 5 and 6 are for the prefix cache."""

    def __init__(
        self, content: str = "full", drafts: bool = True, tracked: bool = False, device: str = "cpu", **of_pool: bool
    ) -> None:
        self.canary, self.mamba_pool, self.device = watching_canary(content, device), Pool(device, **of_pool), device
        self.index, self.enable_mamba_extra_buffer = self.tensor(1, 2), tracked
        self.states = RowStates(self.canary, self, drafts)
        self.states.granted(lambda size: self.tensor(1, 2, 5, 6), 4)
        self.lens, self.chains = [0, 0], list(CHAINS)
        self.chunks: list[int] = []  # where chunks of prompts are said to end; empty: where they do

    def tensor(self, *numbers: int) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def get_mamba_indices(self, rows: Tensor) -> Tensor:
        return self.index[rows]

    def translate_mamba_indices(self, entries: Tensor) -> Tensor:
        return entries

    def forward(self, *new: int, tracked: tuple[bool, bool] | None = None) -> Found:
        """Tokens of a prompt, or one of each row. tracked: whose state is kept at a chunk's end, if any's may be."""
        self.begin(new, "prefill")
        chunks = self.chunks or [(past + n) // CHUNK * CHUNK - past for past, n in zip(self.lens, new, strict=True)]
        own = {"mamba_track_aligned_lens": lambda: self.tensor(*chunks) if max(new) > 1 else None}
        mask = None if tracked is None else torch.tensor(tracked, device=self.device)
        batch = SimpleNamespace(mamba_track_mask=mask, mamba_track_indices=self.tensor(5, 6), **own)
        self.states.initialised(lambda batch: None, batch)
        for tensor in self.mamba_pool.tensors:
            tensor[:, self.index] += 1
            tensor[:, self.tensor(5, 6)] += 1 if tracked and any(tracked) else 0
        return self.end(new)

    def verify(
        self,
        path: list[list[int]],
        commit: Callable[..., None] | None = None,
        steps: tuple[int, int] | None = None,
        within: Callable[[], object] = bool,
        tracked: tuple[int, int] | None = None,
    ) -> Found:
        """path: of each row, the nodes that are accepted;  commit: in the place of SGLang's own
        steps:   what it is told, the last node of each path where nothing else is said
        within:  happens in the forward
        tracked: nodes behind which states are kept, -1 for none
        """
        cache = self.mamba_pool.mamba_cache
        self.states.verifying(self.tensor(0, 1), ["a", "b"])
        self.states.initialised(lambda batch: None, None)
        cache.conv[0][:, self.index] += 3
        if cache.intermediate_ssm is not None:
            cache.intermediate_ssm[:, :2] += 1
        within()
        told = self.tensor(*(steps or [own[-1] for own in path]))
        others = (None, None) if tracked is None else (self.tensor(5, 6), self.tensor(*tracked))
        if commit is not skipped:
            self.states.committed(commit or self.commit, told, *others)
        self.begin((NODES, NODES), "verify")
        self.states.accepted(torch.tensor([own + [-1] * (NODES - len(own)) for own in path], device=self.device))
        return self.end(tuple(map(len, path)))

    def commit(self, steps: Tensor, into: Tensor | None, others: Tensor | None, shift: int = 0) -> None:
        """As SGLang's own; shift: it takes so many nodes further."""
        cache, rows = self.mamba_pool.mamba_cache, self.tensor(0, 1)
        cache.conv[0][:, self.index] += steps.to(torch.float32)[:, None, None] + 2
        if cache.intermediate_ssm is not None:
            cache.temporal[:, self.index] = cache.intermediate_ssm[:, rows, (steps + shift) % NODES]
        if into is not None and others is not None:
            is_kept = others >= 0
            cache.temporal[:, into[is_kept]] = cache.intermediate_ssm[:, rows[is_kept], others[is_kept]]
            cache.conv[0][:, into[is_kept]] = 5

    def begin(self, new: tuple[int, ...], kind: str) -> None:
        """A forward of so many tokens of each row is read."""
        canary, truth = self.canary, self.canary.memory.truth
        canary.step += 1
        step = SimpleNamespace(events=canary.events, number=canary.step, requests=["a", "b"], site=(kind, 0))
        canary.steps.append(step)
        canary.events = []
        canary.launches.read(step.site, sum(new))
        past, chains = self.tensor(*self.lens), self.tensor(*self.chains)
        canary.launches.seeds[:, 0], canary.launches.seeds[:, 1] = chains + past, 1
        stored = [self.chains[row] + self.lens[row] + 1 + n for row in (0, 1) for n in range(new[row])]
        canary.launches.chains[canary.step % RING, : len(stored)] = self.tensor(*stored)
        truth.ends[:] = past + self.tensor(*new)
        truth.tails[:, 0] = chains + truth.ends
        starts = self.tensor(0, new[0], sum(new))
        made: Any = SimpleNamespace(
            lengths=truth.ends.clone(), starts=starts, num_tokens=sum(new), numbers=np.array([0, 1])
        )
        self.states.begin(made)

    def end(self, kept: tuple[int, ...]) -> Found:
        self.states.left()
        self.lens = [past + n for past, n in zip(self.lens, kept, strict=True)]
        return [(own.code, own.request_id, own.slot, own.pool.name) for own in found_in(self.canary)]


def skipped(*_: Any) -> None:
    """In the place of a commit: there is none."""


@pytest.fixture(params=["full", "rolling"])
def host(request: pytest.FixtureRequest) -> Host:
    """Of a server that drafts; both rows have absorbed five and six tokens."""
    host = Host(request.param)
    assert host.forward(5, 6) == []
    return host


PATHS = [[[0], [0, 1, 2]], [[0, 2, 3], [0]], [[0, 1, 2, 3], [0, 3]], [[0], [0]]]


def expect_silence(host: Host) -> None:
    """Rounds of a sound server that drafts."""
    for path in PATHS:
        assert host.verify(path) == []
    assert host.forward(1, 1) == []
    assert host.canary.coverage.states_checked == 2 * (2 + len(PATHS))
    assert int(host.canary.memory.total) == 0


def test_what_forwards_launch_was_prepared() -> None:
    """Each launch of a served forward came before, run and captured; and what was prepared is no row's."""
    host = Host(tracked=True)
    seen = launched_by(host.canary)
    host.states.prepare(no_rows())
    assert set(seen.values()) == {2}
    prepared = set(seen)
    host.states.granted(lambda size: host.tensor(1, 2, 5, 6), 4)
    assert host.forward(5, 6, tracked=(True, False)) == []
    assert host.verify([[0, 2, 3], [0]], tracked=(2, -1)) == []
    assert (host.canary.coverage.states_checked, set(seen)) == (4, prepared)


def test_a_runner_prepares_its_states_behind_its_canary() -> None:
    """Over an empty forward, before it is armed, and what looks at sampled tokens; without either there is no more."""
    told: list[Any] = []
    canary = SimpleNamespace(prepare=lambda forward: told.append(("canary", forward)), groups=[])
    own: Any = SimpleNamespace(canary=canary, _empty_forward=lambda: "none", probe_reader=lambda: None)
    own.states = SimpleNamespace(prepare=lambda forward: told.append(("states", forward)))
    own._samples = SimpleNamespace(prepare=lambda forward: told.append(("samples", forward)))
    own._arm = lambda _: told.append("armed")
    WatchedRunner.arm(own)
    assert told == [("canary", "none"), ("samples", "none"), ("states", "none"), "armed"]
    own.states = own._samples = None
    WatchedRunner.arm(own)
    assert told[4:] == [("canary", "none"), "armed"]


def test_trees_that_are_verified_are_silent(host: Host) -> None:
    """Whichever nodes are accepted; every state that is taken is counted once."""
    expect_silence(host)


@pytest.mark.gpu
@pytest.mark.parametrize("content", ["full", "rolling"])
def test_trees_that_are_verified_are_silent_on_a_gpu(content: str) -> None:
    """The same; and a node before the last one is told."""
    host = Host(content, device="cuda")
    assert host.forward(5, 6) == []
    expect_silence(host)
    assert host.verify([[0, 1], [0, 1]], steps=(0, 1)) == []
    assert host.verify([[0], [0]]) == [("R4", "a", 1, "states")]


def test_a_state_behind_another_node_is_told_by_its_length(host: Host) -> None:
    """R4 in the next round: of row a the node before the last accepted one was committed."""
    assert host.verify([[0, 1, 3], [0, 2]], steps=(1, 2)) == []
    assert host.verify([[0], [0]]) == [("R4", "a", 1, "states")]
    [found] = found_in(host.canary)
    assert (found.expected, found.found, found.state.last_ran) == ({"absorbed": 8}, {"absorbed": 7}, None)
    assert host.verify([[0], [0]]) == []


def test_what_was_never_committed_is_told_by_its_length(host: Host) -> None:
    """sglang#26351: R4 of every row in the next round, and nothing of windows, which the verify has written over."""
    assert host.verify([[0, 1], [0]], commit=skipped) == []
    assert host.verify([[0], [0]]) == [("R4", "a", 1, "states"), ("R4", "b", 2, "states")]
    assert {own.state.last_ran for own in found_in(host.canary)} == {2}


def test_a_node_that_is_not_on_the_path_is_left_out(host: Host) -> None:
    """A sibling's state was put there: it is not that of any length of the row."""
    assert host.verify([[0, 1], [0, 1]], steps=(2, 1)) == []
    assert host.verify([[0], [0]]) == [("R4", "a", 1, "states")]


def test_a_commit_that_copies_another_node_is_told(host: Host) -> None:
    """T1 in that round, of both rows, before a token leaves."""
    found = host.verify([[0, 1], [0]], commit=lambda *told: host.commit(*told, shift=1))
    assert found == [("T1", "a", 1, "states"), ("T1", "b", 2, "states")]
    assert {own.site for own in found_in(host.canary)} == {("verify", 0)}


def flipped(tensor: Tensor, host: Host, of: int) -> None:
    """One word of an entry's last layer, that of the slice that is compared, where one is."""
    phase = int(host.states._all[of]._states.phases[1])
    tensor[1, 1].view(-1)[phase * tensor[1, 1].numel() // host.states._all[of].view.num_slices] += 1


@pytest.mark.parametrize("is_within", [False, True])
def test_changed_bytes_are_told_before_they_are_gone(host: Host, is_within: bool) -> None:
    """R9 of a matrix that changed before the verify or in it, and of a window that changed before."""
    cache = host.mamba_pool.mamba_cache

    def harm() -> None:
        flipped(cache.temporal, host, 0)
        if not is_within:
            flipped(cache.conv[0], host, 1)

    if not is_within:
        harm()
    found = host.verify([[0, 1], [0]], within=harm if is_within else bool)
    assert found == [("R9", "a", 1, "windows")] * (not is_within) + [("R9", "a", 1, "states")]
    assert host.verify([[0], [0]]) == []


def test_another_rows_state_is_told_by_its_owner(host: Host) -> None:
    """R8 of both, matrices and windows."""
    host.index = host.tensor(2, 1)
    told = [("R8", "a", 2), ("R8", "b", 1)]
    assert host.verify([[0], [0]]) == [(*own, pool) for pool in ("states", "windows") for own in told]


def test_entries_and_nodes_that_there_are_not_are_not_read(host: Host) -> None:
    """W1 of a row whose entry lies outside the pool; R4 in the next round of a node that no tree has."""
    host.index = host.tensor(ENTRIES + 7, 2)
    host.commit = lambda *_: None  # type: ignore[method-assign]
    cache = host.mamba_pool.mamba_cache
    conv, cache.conv = cache.conv, [torch.zeros(LAYERS, 99, 16, 4)]  # the engine's own writes go elsewhere
    assert host.verify([[0], [0]], steps=(0, NODES + 3)) == [("W1", "a", 0, "states"), ("W1", "a", 0, "windows")]
    cache.conv, host.index = conv, host.tensor(1, 2)
    assert ("R4", "b", 2, "states") in host.verify([[0], [0]])


def test_states_are_forgotten_and_freed_in_both_parts(host: Host) -> None:
    """What a flush forgets is trusted as it lies; R7 of what was given back."""
    host.states.forget()
    host.mamba_pool.mamba_cache.temporal += 1
    assert host.forward(1, 1) == []
    host.states.freed(lambda entries: None, host.tensor(2))
    assert host.verify([[0], [0]]) == [("R7", "b", 2, "states"), ("R7", "b", 2, "windows")]
    host.states.cleared(lambda entries: None, host.tensor(2))
    assert [code for code, *_ in host.verify([[0], [0]])] == ["R12", "R12"]


def go_on_from(host: Host, row: int, entry: int, length: int, like: int) -> Found:
    """A request in this row begins with what the prefix cache has in an entry, of so many tokens of another row."""
    copy = host.tensor(entry), host.index[row : row + 1]
    host.states.copied(host.mamba_pool.copy_from, *copy)
    host.lens[row], host.chains[row] = length, CHAINS[like]
    found = host.forward(1, 1)
    host.chains = list(CHAINS)
    return found


@pytest.mark.parametrize("drafts", [False, True])
def test_a_state_at_a_chunks_end_is_what_the_prefix_cache_gives(drafts: bool) -> None:
    """With extra_buffer, of a prompt of six tokens that behind four: R4 of whoever goes on behind five."""
    host = Host(drafts=drafts, tracked=True)
    assert host.forward(6, 3, tracked=(True, False)) == []
    assert go_on_from(host, row=1, entry=5, length=4, like=0) == []
    assert {own[:3] for own in go_on_from(host, row=1, entry=6, length=1, like=1)} == {("R12", "b", 2)}
    assert [own[:3] for own in go_on_from(host, row=1, entry=5, length=5, like=0)] == [("R4", "b", 2)]
    assert [own[:3] for own in go_on_from(host, row=1, entry=5, length=4, like=1)] == [("R6", "b", 2)]


def test_a_chunk_that_ends_behind_its_row_leaves_nothing() -> None:
    """What would be read of its tokens lies outside: R12 of whoever begins with it."""
    host = Host(tracked=True)
    host.chunks = [10_000_000, 4]
    assert host.forward(6, 6, tracked=(True, True)) == []
    host.chunks = []
    assert {own[:3] for own in go_on_from(host, row=1, entry=5, length=4, like=0)} == {("R12", "b", 2)}


def test_a_state_that_was_not_kept_is_told_when_it_is_taken() -> None:
    """sglang#39342: the forward has no mask, and the prefix cache gives out an entry in which nobody left a state."""
    host = Host(tracked=True)
    assert host.forward(6, 3, tracked=None) == []
    assert {own[:3] for own in go_on_from(host, row=1, entry=5, length=4, like=0)} == {("R12", "b", 2)}


def test_states_are_kept_as_rows_go_on() -> None:
    """Of one token the state behind it, of a tree that behind the node told: then it is that of so many tokens."""
    host = Host(tracked=True)
    assert host.forward(7, 6, tracked=(False, False)) == []
    assert host.forward(1, 1, tracked=(True, False)) == []
    assert go_on_from(host, row=1, entry=5, length=8, like=0) == []
    host = Host(tracked=True)
    assert host.forward(6, 7, tracked=(False, False)) == []
    assert host.verify([[0, 2, 3], [0]], tracked=(2, -1)) == []
    assert go_on_from(host, row=1, entry=5, length=8, like=0) == []
    assert [own[:3] for own in go_on_from(host, row=1, entry=5, length=9, like=0)] == [("R4", "b", 2)]


def test_a_copy_of_another_node_for_the_prefix_cache_is_told() -> None:
    """T1 of the entry into which it was put."""
    host = Host(tracked=True)
    assert host.forward(6, 6) == []

    def commit(steps: Tensor, into: Tensor, others: Tensor) -> None:
        host.commit(steps, into, others.where(others < 0, 0))

    assert host.verify([[0, 1], [0, 1]], commit=commit, tracked=(1, -1)) == [("T1", "a", 5, "states")]


def test_a_pool_of_windows_alone_is_counted_by_them() -> None:
    """R4 of a row that lags behind, where there are no matrices; sound rounds are silent."""
    host = Host(has_matrices=False)
    assert host.forward(5, 6) == []
    expect_silence(host)
    assert host.verify([[0, 1], [0]], steps=(0, 0)) == []
    assert host.verify([[0], [0]]) == [("R4", "a", 1, "states")]


def test_nodes_of_another_size_are_not_compared() -> None:
    """Nor where they lie in several pieces, or are no whole words."""
    pool = Pool("cpu")
    [matrices, _] = views_of(pool, drafts=True)
    assert nodes_of(pool, matrices) is not None
    for shape in (2, 8, 4), (2, 8, 32), (1,):
        pool.mamba_cache.intermediate_ssm = torch.zeros(LAYERS, 3, NODES, *shape, dtype=torch.float16)
        assert nodes_of(pool, matrices) is None
    pool.mamba_cache.intermediate_ssm = torch.zeros(LAYERS, 3, 2 * NODES, 2, 8, 8)[:, :, ::2]
    assert nodes_of(pool, matrices) is None
    pool.mamba_cache.intermediate_ssm = None
    assert nodes_of(pool, matrices) is None


ODD = SimpleNamespace(conv=[torch.zeros(1, 4, 3, dtype=torch.int8)], temporal=torch.zeros(0))


@pytest.mark.parametrize(
    ("changes", "linear", "why"),
    [
        ({"mamba_ckpt_pool": object()}, None, "they lie in other types, or under other numbers"),
        ({"mamba_pool": SimpleNamespace(mamba_cache=ODD)}, None, "whole 32-bit words"),
        ({"mamba_pool": SimpleNamespace(enable_linear_replayssm_spec=True)}, None, "put it into them later"),
        ({}, SimpleNamespace(accept_lens_pool=torch.ones(4)), "put it into them later or not at all"),
    ],
)
def test_states_that_are_not_watched_are_named(
    changes: dict[str, Any], linear: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate says why; without changes they are watched."""
    monkeypatch.setattr(states, "missing", lambda needs: [])
    rows, backend = SimpleNamespace(mamba_pool=Pool("cpu")), SimpleNamespace(linear_attn_backend=linear)
    assert not_followed(rows, SimpleNamespace(), True) is None
    vars(rows).update(changes)
    told = not_followed(rows, backend, False)
    assert told is not None
    assert told.startswith("states of linear attention, of which a request has one for all its tokens: ")
    assert why in told


@pytest.mark.parametrize("path", [STATES, STATES_OF_DRAFTS])
def test_states_whose_names_are_gone_are_not_watched(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafts where the server drafts."""
    names = {need.name for need in NEEDED_OF[path]}
    monkeypatch.setattr(states, "missing", lambda needs: [f"{own.name} is gone" for own in needs if own.name in names])
    rows = SimpleNamespace(mamba_pool=Pool("cpu"))
    assert f"{NEEDED_OF[path][-1].name} is gone" in str(not_followed(rows, SimpleNamespace(), True))
    assert "update_mamba_state" not in str(not_followed(rows, SimpleNamespace(), False))


@pytest.mark.parametrize("drafts", [False, True])
def test_what_happens_to_states_is_heard(drafts: bool) -> None:
    """The commit of a verify where the server drafts, and nothing where states are not watched."""
    host, replaced = Host(drafts=drafts), list[tuple[Any, str]]()
    runner = SimpleNamespace(attn_backend=object())
    own = SimpleNamespace(rows=SimpleNamespace(mamba_pool=host.mamba_pool, mamba_allocator=object()), guard=None)
    own.runner, own.states = runner, host.states
    scheduler = SimpleNamespace(draft_worker=object() if drafts else None)
    follow(scheduler, own, lambda owner, name, hook, guard: replaced.append((owner, name)))
    assert ((runner.attn_backend, COMMIT) in replaced) == drafts
    assert (runner, RUN_INIT) in replaced
    assert (own.rows.mamba_allocator, "free") in replaced
    own.states = None
    assert follow(scheduler, own, lambda *_: pytest.fail("nothing is watched")) is None
