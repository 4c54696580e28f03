"""The reader's probe: what attention really reads, by an engine's own backend over entries that are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError, PlanError, ProbeForward, probe_pages
from kvcanary.probe.forwards import DRAFT, MOST_WINDOW, PARENTS, PATHS, least_budget, probe_forwards
from kvcanary.probe.misread import Misread
from kvcanary.probe.reader import probe_pool
from spec_engine import Engine, EngineConfig, SamplingParams
from spec_engine import engine as engine_module
from spec_engine.attention.torch_backend import TorchAttention
from spec_engine.memory.pools.fp8_pool import Fp8Pool
from spec_engine.memory.pools.pool import KVPool
from spec_engine.mock import MockTokenizer, random_model
from spec_engine.step.reader_probe import ProbedReader

Group = Any
Change = Callable[[Group, int], Group]  # of a group of rows that run as one, and its width
HEADS = 4


def pool_of(
    kind: type[KVPool] = KVPool,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    dim: int = 8,
    num_pages: int | None = None,
) -> KVPool:
    pool = kind(
        "target",
        num_layers=3,
        num_pages=num_pages or 2 * probe_pages(page_size),
        page_size=page_size,
        kv_heads=2,
        head_dim=dim,
        token_offset=0,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for part in pool.parts:
        part.copy_(torch.randint(0, 100, part.shape))  # of those that had the pages before
    return pool


def probed(
    pool: KVPool, backend: str = "torch", window: int | None = None, paths: tuple[str, ...] = PATHS
) -> tuple[ProbeForward, int, Misread] | None:
    view = replace(pool.view(), window=window)
    reader = ProbedReader(pool, HEADS, backend, window)
    return probe_pool(view, reader, range(1, pool.view().num_pages), HEADS, paths, dtype=pool.dtype)


@pytest.mark.parametrize("backend", ["torch", "paged", "dense", "block-table"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_sound_reader_passes_and_its_pool_is_as_it_was(backend: str, page_size: int) -> None:
    pool = pool_of(page_size=page_size)
    before = pool.kv.clone()
    assert probed(pool, backend) is None
    assert torch.equal(pool.kv, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [KVPool, Fp8Pool])
def test_numbers_of_every_kind_are_exact_enough(kind: type[KVPool], dtype: torch.dtype) -> None:
    for dim in (8, 64, 128):
        assert probed(pool_of(kind, dtype=dtype, dim=dim)) is None


def test_a_window_is_no_misread() -> None:
    assert probed(pool_of(), window=5) is None
    assert probed(pool_of(), "dense", window=5) is None


@contextmanager
def changed(change: Change, behind_prefix: bool = True) -> Iterator[None]:
    """The torch backend with another plan for rows behind a prefix, or for all."""
    inner = TorchAttention._group

    def group(self: TorchAttention, batch: Any, indices: Any, rows: range, tokens: slice) -> Group:
        own = inner(self, batch, indices, rows, tokens)
        width = len(own.indices) // own.num_rows
        return own if behind_prefix and own.num_new == width else change(own, width)

    TorchAttention._group = group  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchAttention._group = inner  # type: ignore[method-assign]


def in_order(own: Group, width: int) -> Group:
    return replace(own, indices=torch.arange(len(own.indices)))


def of_its_neighbour(own: Group, width: int) -> Group:
    if own.num_rows == 1:
        return own
    return replace(own, indices=own.indices.view(-1, width).roll(1, 0).flatten())


def without_its_first(own: Group, width: int) -> Group:
    hidden = torch.zeros(own.num_rows, 1, 1, width)
    hidden[..., 0] = -torch.inf
    return replace(own, mask=hidden if own.mask is None else own.mask + hidden)


def of_the_other_branch(own: Group, width: int) -> Group:
    return replace(own, indices=own.indices.view(-1, 2, width).flip(1).flatten())


def sees_all(own: Group, width: int) -> Group:
    return replace(own, mask=None) if own.num_new == len(PARENTS) else own


@pytest.mark.parametrize(
    ("change", "family", "text"),
    [
        (in_order, "addressing", "attention ignores the row's table: it read slots 0, 1, 2, 3, 4, 5, 6, 7"),
        (of_its_neighbour, "addressing", "attention ignores the row's table: it read slots"),
        (without_its_first, "lengths", "attention left out entries of the row: slots"),
        (sees_all, "draft", "the mask lets in nodes that are no ancestors: slots"),
    ],
)
def test_what_was_read_is_named(change: Change, family: str, text: str) -> None:
    with changed(change):
        forward, layer, wrong = probed(pool_of())
    assert (wrong.family, layer) == (family, 0)
    assert wrong.text.startswith(text)
    assert forward.path == {"sees_all": "verify", "of_its_neighbour": "decode"}.get(change.__name__, "chunk")
    assert wrong.slot in forward.written


@pytest.mark.parametrize(("backend", "page_size"), [("torch", 4), ("dense", 16), ("paged", 1), ("block-table", 1)])
def test_branches_of_a_draft_are_read_by_their_slots(backend: str, page_size: int) -> None:
    assert probed(pool_of(page_size=page_size), backend, paths=(DRAFT,)) is None


def test_a_branch_that_reads_the_one_beside_it_is_named() -> None:
    with changed(of_the_other_branch):
        forward, _, wrong = probed(pool_of(), paths=(DRAFT,))
    assert (forward.path, wrong.family) == (DRAFT, "addressing")
    assert wrong.text.startswith("attention ignores the row's table: it read slots")


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (1, "a scale of V is missing, or another's: values are"),
        (0, "entries weigh otherwise than K and the query say"),
    ],
)
def test_a_missing_scale_is_told_from_another_row(part: int, text: str) -> None:
    class Unscaled(Fp8Pool):
        def load(self, layer: int, indices: torch.Tensor) -> torch.Tensor:
            rows = super().load(layer, indices)
            rows[:, part] = self.kv[layer].index_select(0, indices)[:, part].to(self.dtype)
            return rows

    _, _, wrong = probed(pool_of(Unscaled))
    assert wrong.family == "scales"
    assert wrong.text.startswith(text)


def test_a_head_that_reads_another_heads_values_is_found() -> None:
    class Crossed(KVPool):
        def load(self, layer: int, indices: torch.Tensor) -> torch.Tensor:
            return super().load(layer, indices).flip(2)

    _, _, wrong = probed(pool_of(Crossed))
    assert wrong.family == "scales"


def test_values_that_are_not_finite_are_said() -> None:
    class Broken(KVPool):
        def load(self, layer: int, indices: torch.Tensor) -> torch.Tensor:
            return super().load(layer, indices) * (torch.nan if layer == 2 else 1)

    _, layer, wrong = probed(pool_of(Broken))
    assert (layer, wrong.family) == (2, "uninitialised")


def test_rows_lie_in_no_order_and_share_no_slot() -> None:
    for page_size in (1, 2, 4, 16, 64):
        forwards = probe_forwards(range(3, 3 + probe_pages(page_size)), page_size)
        assert [forward.path for forward in forwards] == list(PATHS)
        last = forwards[-1]
        assert not set(last.slots[0]) & set(last.slots[1])
        assert all(list(row) != sorted(row) for row in last.slots)
        written = [slot for forward in forwards for slot in forward.written]
        assert len(written) == len(set(written)) > 2 * page_size


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [5, 40, MOST_WINDOW])
def test_a_row_goes_beyond_a_window_where_there_is_room(page_size: int, window: int) -> None:
    """From the first forward on; with too few pages, or entries of a forward, or a wider window, as without one."""
    pages = range(3, 3 + probe_pages(page_size, window))

    def slots(pages: range, **room: int) -> list[Any]:
        return [forward.slots for forward in probe_forwards(pages, page_size, **room)]

    assert len(slots(pages, window=window)[0][0]) > window + 1
    assert slots(pages, window=MOST_WINDOW + 1) == slots(pages)
    small, most = probe_pages(page_size), least_budget(page_size, window) - 1
    if small < len(pages):
        assert slots(pages[:small], window=window) == slots(pages[:small])
        assert slots(pages, window=window, most=most) == slots(pages, most=most)


def test_a_window_that_is_one_too_wide_is_named() -> None:
    """However far it reaches, within reason."""
    for window in 30, 130:
        pool = pool_of(page_size=16, num_pages=1 + probe_pages(16, window))
        for wrong in -1, 0, 1:
            reader = ProbedReader(pool, HEADS, "torch", window + wrong)
            pages = range(1, pool.view().num_pages)
            found = probe_pool(pool.view(), reader, pages, HEADS, dtype=pool.dtype, window=window)
            assert (found is None) == (wrong == 0)


@pytest.mark.parametrize("path", ["prefill", "chunk", "decode"])
@pytest.mark.parametrize("kind", [KVPool, Fp8Pool])
@pytest.mark.parametrize("window", [30, 200, 500, pytest.param(MOST_WINDOW, marks=pytest.mark.slow)])
def test_a_window_that_one_path_sees_otherwise_is_named(window: int, kind: type[KVPool], path: str) -> None:
    """By one entry, in numbers of 16 and of 8 bits: what lies at its edge weighs more, the longer it is."""
    pool = pool_of(kind, 16, torch.bfloat16, 64, 1 + probe_pages(16, window))
    pages = range(1, pool.view().num_pages)
    sound = ProbedReader(pool, HEADS, "torch", window)
    for wrong in -1, 1:
        other = ProbedReader(pool, HEADS, "torch", window + wrong)

        def attend(forward: ProbeForward, *args: Any, other: ProbedReader = other) -> torch.Tensor:
            return (other if forward.path == path else sound)(forward, *args)

        found = probe_pool(pool.view(), attend, pages, HEADS, dtype=pool.dtype, window=window)
        assert found is not None
        forward, _, misread = found
        assert (forward.path, misread.family) == (path, "lengths")
        assert misread.position >= window - 1
    assert probe_pool(pool.view(), sound, pages, HEADS, dtype=pool.dtype, window=window) is None


def test_wrong_arguments_name_the_rule() -> None:
    with pytest.raises(PlanError, match="a probe needs 11 pages of 4 slots, got 3: give as many free ones"):
        probe_forwards([1, 2, 3], 4)
    with pytest.raises(PlanError, match="paths must be among prefill, chunk, decode, verify, draft, got fork"):
        probe_forwards(range(1, 20), 4, ["fork"])


# in an engine


def engine(mode: str = "raise", **settings: Any) -> Engine:
    config = EngineConfig(
        draft="none",
        page_size=4,
        max_total_tokens=512,
        dtype="float64",
        canary=CanaryConfig(mode=mode, seed=3),
        **settings,
    )
    return Engine(config, model=random_model(1), tokenizer=MockTokenizer())


def test_an_engine_whose_attention_reads_in_order_does_not_start() -> None:
    with changed(in_order), pytest.raises(KVCorruptionError) as error:
        engine()
    finding = error.value.report.findings[0]
    assert (finding.code, finding.name, finding.pool) == ("R8", "read elsewhere", "target")
    assert finding.causes[0].family == "addressing"
    assert "attention ignores the row's table: it read slots" in str(error.value)


def test_one_that_begins_to_do_so_is_stopped_at_the_next_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PROBE_STEPS", 6)
    served = engine()
    served.submit([1, 2, 3, 4, 5], SamplingParams(max_new_tokens=40, ignore_eos=True))
    for _ in range(5):
        served.step()
    assert served.canary.certificate()["reader_probes"] == 1
    with changed(in_order):
        served.step()
    with pytest.raises(KVCorruptionError, match="read elsewhere"):  # what earlier steps have given has left first
        served.step()


def test_mode_log_tells_and_serves() -> None:
    with changed(in_order):
        served = engine("log")
    assert [finding.code for finding in served.canary.findings] == ["R8"]
    (output,) = served.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(output.token_ids) == 4


def test_probes_leave_tokens_and_canary_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]], SamplingParams(max_new_tokens=40, ignore_eos=True)
    plain = [output.token_ids for output in engine().generate(prompts, params)]
    monkeypatch.setattr(engine_module, "PROBE_STEPS", 1)
    served = engine()
    assert [output.token_ids for output in served.generate(prompts, params)] == plain
    assert served.canary.certificate()["reader_probes"] > 30
    assert served.canary.findings == []


def test_a_pool_without_room_is_not_probed_and_says_so() -> None:
    config = EngineConfig(draft="none", page_size=16, max_total_tokens=64, dtype="float64", canary=CanaryConfig())
    served = Engine(config, model=random_model(1), tokenizer=MockTokenizer())
    assert served.canary.certificate()["reader_probes"] == "attention not probed"
