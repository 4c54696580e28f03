"""The canary inside generate_batch: outputs unchanged, nothing found, and damage named, in either API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvcanary import CanaryConfig, KVCorruptionError

transformers = pytest.importorskip("transformers")
from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402

from kvcanary.adapters.transformers import attach, paged_cache  # noqa: E402
from kvcanary.adapters.transformers import continuous_batching as batching  # noqa: E402
from kvcanary.adapters.transformers.paged_layout import memory_of  # noqa: E402
from kvcanary_tools.bench.transformers_clean import WINDOW, generate_batch  # noqa: E402

FULL = CanaryConfig(content="full", seed=7)


#: Before 5.16 the ring of a window is read off by one: test_releases.py holds what is found there.
needs_whole_ring = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 16), reason="windows are damaged in this release"
)


@pytest.fixture
def batch() -> Callable[..., list[list[int]]]:
    """Generate from prompts that share a prefix, over several chunks and blocks of four."""
    return generate_batch


@pytest.mark.parametrize(
    ("family", "children"),
    [
        ("Llama", 1),
        ("Llama", 3),
        ("Qwen2", 1),
        pytest.param("Mistral", 1, marks=needs_whole_ring),
        pytest.param("Qwen3", 1, marks=needs_whole_ring),
        pytest.param("Qwen3", 2, marks=needs_whole_ring),
    ],
)
def test_batches_are_unchanged_and_nothing_is_found(models, batch, family: str, children: int) -> None:
    """Prefixes, forks with copied blocks, chunks and sliding windows: equal tokens, everything judged."""
    model = models(family, batched=True)
    expected = batch(model, children)
    with attach(model, FULL) as handle:
        assert batch(model, children) == expected
        certificate = handle.certificate()
    assert certificate["findings"] == []
    assert certificate["unchecked"] == {}
    assert certificate["forwards"] > 20
    assert certificate["slots_checked"] > 500
    assert certificate["bytes_checked"] > 100 * certificate["slots_checked"]
    assert "W5" in certificate["classes"]
    assert batch(model, children) == expected


def harmed(models, batch, monkeypatch, harm: Callable[..., Any], family: str = "Llama", children: int = 1) -> Any:
    """The first finding of generate_batch when `harm(cache, kwargs, step)` runs before each forward."""
    with pytest.raises(KVCorruptionError) as raised, harming(models(family, batched=True), FULL, harm) as (model, _):
        batch(model, children)
    return raised.value.findings[0]


@contextmanager
def harming(model: Any, config: CanaryConfig, harm: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """The model with its canary, and `harm` before each forward of a batch."""
    steps = []

    def before(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("cache") is not None:
            steps.append(1)
            harm(kwargs["cache"], kwargs, len(steps))

    with attach(model, config) as handle:
        hook = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        yield model, handle
        hook.remove()


def _flip(cache: Any, kwargs: dict[str, Any], step: int, at: int = 16, place: int = 2) -> None:
    if step == at:
        memory_of(cache, 1)[1].view(torch.int32)[int(kwargs["read_index"][0][place]), 1, 3] ^= 1 << 5


def _two_flips(cache: Any, kwargs: dict[str, Any], step: int) -> None:
    _flip(cache, kwargs, step)
    _flip(cache, kwargs, step, at=20, place=13)


def _zeroed(cache: Any, kwargs: dict[str, Any], step: int) -> None:
    if step == 16:
        memory_of(cache, 1)[1][kwargs["read_index"][0][4:8].long()] = 0


def _astray(cache: Any, kwargs: dict[str, Any], step: int) -> None:
    if step == 16:
        kwargs["write_index"][0][-1] = kwargs["read_index"][0][0]


def _shifted(cache: Any, kwargs: dict[str, Any], step: int) -> None:
    index = kwargs["read_index"][0]
    if step >= 16 and len(index) > 8:
        index[[1, 6]] = index[[6, 1]].clone()


@pytest.mark.parametrize(
    ("harm", "codes", "incidents"),
    [
        (_flip, {"R9"}, 1),
        (_two_flips, {"R9"}, 2),
        (_zeroed, {"R9"}, 1),
        (_astray, {"R9", "R4"}, 1),
        (_shifted, {"R4"}, 1),
    ],
)
def test_one_fault_is_one_incident_in_mode_log(models, batch, harm, codes: set[str], incidents: int) -> None:
    """However many requests, layers and steps meet it; what fires again is counted, and a second fault is a second."""
    config = CanaryConfig(mode="log", content="full", seed=7)
    with harming(models(batched=True), config, harm) as (model, handle):
        batch(model)
        assert {finding.code for finding in handle.findings} == codes
        assert len({finding.incident for finding in handle.findings}) == incidents
        assert sum(handle.certificate()["fired"].values()) > 5 * incidents


def test_a_fault_of_a_second_batch_is_told_again(models, batch) -> None:
    """Caches of two calls have indices and requests of the same names: what was damaged in one is not known in the
    other.
    """
    config = CanaryConfig(mode="log", content="full", seed=7)
    first: dict[int, int] = {}  # by cache, its first step

    def harm(cache: Any, kwargs: dict[str, Any], step: int) -> None:
        _flip(cache, kwargs, step, at=first.setdefault(hash(cache), step) + 15)

    with harming(models(batched=True), config, harm) as (model, handle):
        batch(model)
        batch(model)
        assert [(finding.code, finding.step) for finding in handle.findings] == [("R9", 16), ("R9", 16)]


def test_a_report_of_a_batch_names_place_and_writer(models, batch, monkeypatch) -> None:
    """Group, block, offset, layers, window, and which request stored the entry in which step."""
    found = harmed(models, batch, monkeypatch, _flip)
    assert found.pool == "group 0"
    assert (found.write_step, found.write_site) == (1, ("prefill", 0))
    assert found.writer == found.reader
    assert found.last_good_step == 15
    place = (
        f"index {found.slot} is offset {found.offset} of block {found.page} in group 0: layers 0, 1, 2 with no window"
    )
    assert found.evidence == (place,)


@needs_whole_ring
def test_a_report_of_a_window_names_it(models, batch, monkeypatch) -> None:
    """Of a group whose layers have a window, the evidence says how long it is."""

    def shift(cache: Any, kwargs: dict[str, Any], step: int) -> None:
        if step == 16:
            index = kwargs["read_index"][0]
            index[: WINDOW - 1] = index[: WINDOW - 1].roll(-1)

    found = harmed(models, batch, monkeypatch, shift, family="Mistral")
    assert found.evidence[0].endswith(f"in group 0: layers 0, 1, 2 with a window of {WINDOW}")


def test_a_flipped_bit_is_found_where_it_is(models, batch, monkeypatch) -> None:
    """One bit of V that some row reads: layer, request, head, dim and bit; the call raises, not only its thread."""
    struck = []

    def flip(cache: Any, kwargs: dict[str, Any], step: int) -> None:
        if step == 16:
            index = int(kwargs["read_index"][0][2])
            struck.append(index)
            memory_of(cache, 1)[1].view(torch.int32)[index, 1, 3] ^= 1 << 5

    found = harmed(models, batch, monkeypatch, flip)
    assert (found.code, found.layer, found.slot, found.position) == ("R9", 1, struck[0], 2)
    assert (found.part, found.head, found.dim, found.bit) == ("V", 1, 3, 5)
    assert found.reader.startswith("req_")


def test_rolling_reads_every_entry_of_a_request(models, batch, monkeypatch) -> None:
    """By its own forwards: here every second one is of a batch that it is not in."""
    read, caches = set(), set()
    before, differing = paged_cache.BatchedCache.before, paged_cache.BatchedCache._differing

    def one_between(self, *fed) -> None:
        caches.add(self)
        self.step += 1
        before(self, *fed)

    def noted(self, layer, given, wanted, chosen):
        [places], [is_new] = self._batch.places.values(), self._batch.is_new.values()
        read.update((places[chosen & ~is_new] % 4).tolist())
        return differing(self, layer, given, wanted, chosen)

    monkeypatch.setattr(paged_cache, "ROTATION_STEPS", 4)
    monkeypatch.setattr(paged_cache.BatchedCache, "before", one_between)
    monkeypatch.setattr(paged_cache.BatchedCache, "_differing", noted)
    model = models("Llama", batched=True)
    with attach(model, CanaryConfig(content="rolling", seed=7)):
        batch(model, 1)
    assert read == {0, 1, 2, 3}
    [cache] = caches
    cache._begin("later", None)
    assert cache.rows["later"].turn == cache.step > 0  # and not where all others began


def test_two_swapped_read_indices_are_found(models, batch, monkeypatch) -> None:
    """Positions 1 and 6 of the first row, exchanged in what attention is given: R4 at the first."""

    def swap(cache: Any, kwargs: dict[str, Any], step: int) -> None:
        if step == 16:
            index = kwargs["read_index"][0]
            index[[1, 6]] = index[[6, 1]].clone()

    found = harmed(models, batch, monkeypatch, swap)
    assert (found.code, found.position, found.found["position"]) == ("R4", 1, 6)
    assert found.causes[0].family == "addressing"


@needs_whole_ring
def test_a_wrong_window_index_is_found(models, batch, monkeypatch) -> None:
    """A ring that is read one place too far: the first entry is another position."""

    def shift(cache: Any, kwargs: dict[str, Any], step: int) -> None:
        if step == 16:
            index = kwargs["read_index"][0]
            index[: WINDOW - 1] = index[: WINDOW - 1].roll(-1)

    found = harmed(models, batch, monkeypatch, shift, family="Mistral")
    assert found.code == "R4"
    assert found.found["position"] == found.position + 1


def test_a_write_to_a_wrong_index_is_found(models, batch, monkeypatch) -> None:
    """The last token of the batch stored over the first entry that is read: its reader finds other bytes, at once."""

    def astray(cache: Any, kwargs: dict[str, Any], step: int) -> None:
        if step == 16:
            kwargs["write_index"][0][-1] = kwargs["read_index"][0][0]

    found = harmed(models, batch, monkeypatch, astray)
    assert (found.code, found.layer, found.position) == ("R9", 0, 0)
    assert found.causes[0].text == "another row's entry was stored into this slot"


def test_a_skipped_copy_is_found(models, batch, monkeypatch) -> None:
    """A fork whose block was not copied: T1 at the first entry of the block."""
    name = next(name for name in batching.COPIES if hasattr(PagedAttentionCache, name))
    monkeypatch.setattr(PagedAttentionCache, name, lambda cache, *args: None)
    found = harmed(models, batch, monkeypatch, lambda *args: None, children=3)
    assert found.code == "T1"
    assert found.position is not None


@pytest.fixture
def without_values(monkeypatch) -> None:
    """Layer 2 stores zeros in the place of V."""
    right = PagedAttentionCache.update

    @functools.wraps(right)
    def update(self: Any, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        values = value_states if layer_idx != 2 else torch.zeros_like(value_states)
        return right(self, key_states, values, layer_idx, *args, **kwargs)

    monkeypatch.setattr(PagedAttentionCache, "update", update)


def test_a_store_that_one_layer_leaves_out_is_found(models, batch, monkeypatch, without_values) -> None:
    """A prefill reads nothing back; the next step finds that the layer does not hold what it was given."""
    found = harmed(models, batch, monkeypatch, lambda *args: None)
    assert (found.code, found.layer, found.position) == ("R9", 2, 0)


def test_a_store_that_is_left_out_in_every_step_is_one_incident(models, batch, without_values) -> None:
    """All requests, entry after entry: what a batch's arrays name wrong, now and later, is one fault in mode log."""
    config = CanaryConfig(mode="log", content="full", seed=7)
    with attach(models(batched=True), config) as handle:
        batch(handle._model, tokens=8)
        assert len({finding.incident for finding in handle.findings}) == 1


def test_detach_puts_every_method_back(models) -> None:
    """Also those of the class, which all models share; a model that is not attached is left alone."""
    names = (*batching.REPLACED, *batching.COPIES, *batching.FORKS)
    own = {name: getattr(PagedAttentionCache, name) for name in names if hasattr(PagedAttentionCache, name)}
    handle = attach(models(), FULL)
    assert PagedAttentionCache.update is not own["update"]
    handle.detach()
    for name, method in own.items():
        assert getattr(PagedAttentionCache, name) is method


def test_two_models_at_once(models, batch) -> None:
    """Each canary sees the caches of its own model."""
    first, second = models(batched=True), models("Qwen2", batched=True)
    with attach(first, FULL) as ours, attach(second, FULL) as theirs:
        batch(first)
        assert theirs.certificate()["forwards"] == 0
        batch(second)
        assert ours.certificate()["forwards"] == theirs.certificate()["forwards"] > 20
        assert not ours.findings + theirs.findings


@pytest.mark.parametrize("at", [2, 16])
def test_what_is_not_finite_is_told_where_it_was_stored(models, batch, at: int) -> None:
    """NaN that the second layer's values take on in one entry of a batch: N1 of that layer, request and position."""
    fed: list[dict[str, Any]] = []
    model = models("Llama", batched=True)

    def spoil(module: Any, arguments: Any, output: Any) -> Any:
        if len(fed) == at:
            output[0, -1, 3] = torch.nan
        return output

    with harming(model, CanaryConfig(content="write"), lambda cache, kwargs, step: fed.append(kwargs)):
        hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(spoil)
        with pytest.raises(KVCorruptionError) as caught:
            batch(model)
        hook.remove()
    found = caught.value.findings[0]
    assert (found.code, found.layer, found.position) == ("N1", 1, int(fed[at - 1]["position_ids"][0, -1]))
    assert (found.readers, found.step) == ((found.writer,), at)
