"""Probes of what attention inside vLLM reads, over a layer of plain torch: right, and wrong in six ways."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.vllm.attention_probe import probe_layers
from kvcanary.pools.views import PoolView

BLOCKS, SIZE, HEADS, DIM = 12, 8, 2, 16
NAME = "layers.0.attn"
NONE = frozenset[str]()


class Layer:
    """One layer of attention as vLLM has them: it stores, and reads what its metadata say."""

    num_heads, num_kv_heads, head_size = 2 * HEADS, HEADS, DIM

    def __init__(self, window: int = 0, name: str = NAME) -> None:
        self.name, self.kv_cache = name, torch.zeros(2, BLOCKS * SIZE, HEADS, DIM)
        self.impl, self.window = SimpleNamespace(scale=DIM**-0.5, sinks=None), window
        self.harm: Callable[[Any], None] = lambda metadata: None
        self.times, self.seen = 1.0, 0

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from vllm.forward_context import now

        metadata, slots = now.attn_metadata[self.name], now.slot_mapping[self.name]
        own = SimpleNamespace(**vars(metadata))
        own.block_table_tensor, own.seq_lens = own.block_table_tensor.clone(), own.seq_lens.clone()
        self.harm(own)
        live = slots >= 0
        self.kv_cache[0, slots[live]] = key.view(-1, HEADS, DIM)[live]
        self.kv_cache[1, slots[live]] = value.view(-1, HEADS, DIM)[live] * self.times
        out, starts = torch.zeros(len(query), self.num_heads, DIM), own.query_start_loc.tolist()
        for row, length in enumerate(own.seq_lens.tolist()):
            places = torch.arange(length)
            entries = own.block_table_tensor[row, places // SIZE].long() * SIZE + places % SIZE
            for place in range(starts[row], starts[row + 1]):
                end = length - (starts[row + 1] - place) + 1
                seen = entries[max(0, end - self.window) if self.window else 0 : end]
                k, v = (part[seen].repeat_interleave(2, 1) for part in self.kv_cache)
                q = query[place].view(self.num_heads, DIM)
                weights = (torch.einsum("hd,nhd->hn", q, k) * self.impl.scale).softmax(-1)
                out[place] = torch.einsum("hn,nhd->hd", weights, v)
        return out.flatten(1)


class Worker:
    """A canary over that layer, and what else a probe asks for."""

    def __init__(self, window: int = 0, mode: str = "log", disable: frozenset[str] = NONE, **scheduler: int) -> None:
        from vllm.v1.attention.backend import AttentionMetadataBuilder

        config = CanaryConfig(mode=mode, disable=disable)
        self.layer, self.canary = Layer(window), PagedCanary(config, 4, 1, 64, "cpu")
        cache = self.layer.kv_cache
        group = self.canary.memory.add_group(0, SIZE, BLOCKS * SIZE, window, null_slots=SIZE)
        view = PoolView("target", [cache[0]], [cache[1]], SIZE, null_slots=SIZE)
        self.canary.memory.add_layers(group, view, [NAME])
        self.builder = AttentionMetadataBuilder(SIZE)
        self.group = SimpleNamespace(layer_names=[NAME], get_metadata_builder=lambda: self.builder)
        context = SimpleNamespace(static_forward_context={NAME: self.layer})
        self.runner = SimpleNamespace(attn_groups=[[self.group]], compilation_config=context)
        limits = {"max_num_batched_tokens": 512, "max_num_seqs": 4} | scheduler
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=64, dtype=torch.float32),
            scheduler_config=SimpleNamespace(**limits), parallel_config=SimpleNamespace(data_parallel_size=1),
        )  # fmt: skip

    def add_draft(self, group: Any) -> Layer:
        """A layer that a draft stores, over blocks of the same numbers; its attention is of this group."""
        draft = Layer(name="draft.attn")
        self.runner.compilation_config.static_forward_context[draft.name] = draft
        group.layer_names.append(draft.name)
        view = PoolView("draft", [draft.kv_cache[0]], [draft.kv_cache[1]], SIZE, null_slots=SIZE)
        self.canary.memory.add_layers(self.canary.groups[0], view, [draft.name], is_late=True)
        return draft

    def probe(self) -> list[tuple[str, str]]:
        """Code and first cause of what is found."""
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace())]
        probe_layers(self.canary, self.runner, self.config, groups)
        return [(found.code, found.causes[0].text) for found in self.canary.log.findings]

    @property
    def not_probed(self) -> str:
        assert self.probe() == []
        assert self.canary.coverage.reader_probes == 0
        return self.canary.coverage.not_probed


@pytest.mark.parametrize(("window", "tokens"), [(0, 512), (5, 512), (0, 2 * SIZE)])
def test_right_attention_is_silent_and_its_bytes_are_put_back(host, window: int, tokens: int) -> None:
    """With a window too, and where a step has no room for the rows of a prompt together."""
    worker = Worker(window, max_num_batched_tokens=tokens)
    held = worker.layer.kv_cache.normal_().clone()
    assert worker.probe() == []
    assert worker.canary.coverage.reader_probes == 1
    assert torch.equal(worker.layer.kv_cache, held)


def sorts_table(metadata: Any) -> None:
    metadata.block_table_tensor = metadata.block_table_tensor.sort(1)[0]


def leaves_out_the_last(metadata: Any) -> None:
    metadata.seq_lens -= 1


def takes_the_row_before(metadata: Any) -> None:
    metadata.block_table_tensor = metadata.block_table_tensor.roll(1, 0)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (sorts_table, "attention ignores the row's table"),
        (takes_the_row_before, "attention ignores the row's table"),
        (leaves_out_the_last, "attention read no entry at all"),
    ],
)
def test_what_attention_read_instead_is_named(host, harm: Callable[[Any], None], said: str) -> None:
    worker = Worker()
    worker.layer.harm = harm
    [(code, cause)] = worker.probe()
    assert code == "R8"
    assert said in cause


@pytest.mark.parametrize("has_own", [False, True])
def test_layers_of_a_draft_are_asked(host, has_own: bool) -> None:
    """In the runner's group of attention, as in V1, or in one of the speculator's."""
    worker = Worker()
    own = SimpleNamespace(layer_names=[], get_metadata_builder=lambda: worker.builder)
    worker.runner.speculator = SimpleNamespace(attn_groups=[[own]]) if has_own else None
    draft = worker.add_draft(own if has_own else worker.group)
    assert worker.probe() == []
    assert worker.canary.coverage.reader_probes == 2
    draft.harm = sorts_table
    [(code, cause)] = worker.probe()
    assert (code, worker.canary.log.findings[0].pool) == ("R8", "draft")
    assert "attention ignores the row's table" in cause


def capturing(sizes: tuple[int, ...] = (1, 2, 4, 8), mode: str = "FULL", **worker: Any) -> Worker:
    """A worker that captures its decodes; on a CPU a captured launch is made anew, over what it was captured over."""
    from vllm.config.compilation import CUDAGraphMode

    own, captured = Worker(**worker), CUDAGraphMode[mode]
    own.config.compilation_config = SimpleNamespace(cudagraph_mode=captured, cudagraph_capture_sizes=[*sizes])
    return own


@pytest.mark.parametrize(("mode", "probes"), [("FULL_AND_PIECEWISE", 2), ("FULL", 2), ("PIECEWISE", 1)])
@pytest.mark.parametrize("window", [0, 5])
def test_a_graph_is_asked_where_decodes_are_captured(host, mode: str, probes: int, window: int) -> None:
    worker = capturing(mode=mode, window=window)
    held = worker.layer.kv_cache.normal_().clone()
    assert worker.probe() == []
    assert worker.canary.coverage.reader_probes == probes
    assert torch.equal(worker.layer.kv_cache, held)


@pytest.mark.parametrize("name", ["block_table_tensor", "seq_lens"])
def test_what_a_graph_keeps_of_the_batch_it_was_captured_over_is_named(host, name: str) -> None:
    """A builder that copies a tensor makes metadata that a replay never sees change; outside a graph they are right."""
    worker = capturing()
    build = worker.builder.build
    worker.builder.build = lambda **given: copied(build(**given), name)
    [(code, _)] = worker.probe()
    [finding] = worker.canary.log.findings
    assert (code, finding.site) == ("R8", ("decode", 0))
    assert "in a graph alone: the same layers read right outside of one" in finding.causes[0].evidence


class Keeping:
    """A builder that writes into tensors of its own, over which graphs are captured; it is asked for them once."""

    def __init__(self, inner: Any) -> None:
        self.kv_cache_spec, self._inner = inner.kv_cache_spec, inner
        self.captures, self._kept = 0, None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        self.captures += 1
        self._kept = common_attn_metadata.seq_lens.clone()
        return self.build(0, common_attn_metadata)

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        own = copied(common_attn_metadata, "seq_lens")
        if self._kept is not None and len(self._kept) == len(own.seq_lens):
            own.seq_lens = self._kept.copy_(own.seq_lens)
        return own


def test_a_builder_that_fills_what_a_graph_reads_is_silent(host) -> None:
    worker = capturing()
    worker.builder = keeping = Keeping(worker.builder)
    assert worker.probe() == []
    assert (worker.canary.coverage.reader_probes, keeping.captures) == (2, 1)


def test_drafts_are_not_asked_within_graphs(host) -> None:
    worker = capturing()
    worker.add_draft(worker.group)
    assert worker.probe() == []
    assert worker.canary.coverage.reader_probes == 3


def copied(metadata: Any, name: str) -> Any:
    setattr(metadata, name, getattr(metadata, name).clone())
    return metadata


def test_padding_behind_the_rows_of_a_graph_is_nobodys(host) -> None:
    """Rows of padding have no entry, and store none."""
    worker, seen = capturing(sizes=(8,)), []
    worker.layer.harm = lambda metadata: seen.append((metadata.seq_lens.tolist(), metadata.slot_mapping.tolist()))
    assert worker.probe() == []
    lens, slots = next(own for own in reversed(seen) if len(own[0]) == 8)
    assert (lens[2:], slots[2:]) == ([0] * 6, [-1] * 6)
    assert min(*lens[:2], *slots[:2]) > 0


def test_what_is_wrong_outside_a_graph_is_told_once(host) -> None:
    worker = capturing()
    worker.layer.harm = sorts_table
    assert len(worker.probe()) == 1
    assert worker.canary.coverage.fired["R8"] == 1


def test_graphs_of_too_few_rows_are_named(host) -> None:
    worker = capturing(sizes=(1, 2))
    assert worker.probe() == []
    assert worker.canary.coverage.reader_probes == 1
    assert worker.canary.coverage.not_probed == "no graph of 3 rows is captured"


def scales_scores(worker: Worker) -> None:
    """Once the probe has asked for the scale."""
    worker.layer.harm = lambda metadata: setattr(worker.layer.impl, "scale", 1.0)


def scales_values(worker: Worker) -> None:
    worker.layer.times = 2.0


@pytest.mark.parametrize(
    ("change", "said"),
    [(scales_scores, "weigh otherwise than K and the query say"), (scales_values, "a scale of V is missing")],
)
def test_a_scale_that_is_another_is_named(host, change: Callable[[Worker], None], said: str) -> None:
    worker = Worker()
    change(worker)
    [(code, cause)] = worker.probe()
    assert code == "R8"
    assert said in cause


@pytest.mark.parametrize("window", [5, 20, 25])
def test_a_window_that_attention_forgets_is_named(host, window: int) -> None:
    """Also one that two pages do not leave: rows are longer then."""
    worker = Worker(window=window)
    assert worker.probe() == []
    worker.layer.window = 0
    [(code, _)] = worker.probe()
    assert code == "R8"


@pytest.mark.parametrize("scheduler", [{}, {"max_num_batched_tokens": 2 * SIZE}])
def test_a_window_that_there_is_no_room_to_leave_is_asked_within(host, scheduler: dict[str, int]) -> None:
    """Of the pool, of a row, or of a step: what attention reads within it is still asked."""
    worker = Worker(window=20 if scheduler else 60, **scheduler)
    worker.layer.window = 0
    assert worker.probe() == []
    worker.layer.harm = sorts_table
    assert len(worker.probe()) == 1


def test_in_mode_raise_the_worker_does_not_serve(host) -> None:
    worker = Worker(mode="raise")
    worker.layer.harm = sorts_table
    with pytest.raises(KVCorruptionError, match="ignores the row's table"):
        worker.probe()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda worker: setattr(worker.layer.impl, "sinks", torch.zeros(4)), "its layers have sinks"),
        (lambda worker: setattr(worker.canary.groups[0], "window", -8), "its layers see the chunk of a token alone"),
        (lambda worker: setattr(worker.layer, "calculate_kv_scales", True), "take their scales from what they see"),
        (lambda worker: setattr(worker.layer, "head_size_v", 8), "K and V differ in size"),
        (lambda worker: setattr(worker.builder.kv_cache_spec, "block_size", 16), "larger than the pages of the pool"),
        (
            lambda worker: setattr(worker.config.parallel_config, "data_parallel_size", 2),
            "all workers of data parallel",
        ),
        (lambda worker: setattr(worker.config.scheduler_config, "max_num_seqs", 2), "more than this worker has room"),
        (lambda worker: setattr(worker.config.model_config, "max_model_len", 16), "more than this worker has room"),
        (lambda worker: worker.group.layer_names.clear(), "is in none of the runner's groups of attention"),
        (lambda worker: setattr(worker, "runner", SimpleNamespace()), "AttributeError"),
    ],
)
def test_layers_that_cannot_be_asked_are_named(host, change: Callable[[Worker], None], said: str) -> None:
    """The certificate says why; nothing is found."""
    worker = Worker()
    change(worker)
    assert said in worker.not_probed


def test_a_disabled_code_asks_nobody(host) -> None:
    """R8 is what a probe finds: who has switched it off is told of none, whatever attention reads."""
    worker = Worker(disable=frozenset({"R8"}))
    worker.layer.harm = sorts_table
    assert worker.not_probed == "R8 is disabled"
