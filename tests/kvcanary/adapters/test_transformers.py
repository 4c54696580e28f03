"""The canary inside transformers' generate: it changes nothing, finds nothing in a sound cache, and names damage."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys

import pytest
import structlog
import torch

from kvcanary import CanaryConfig, CanaryConfigError, HookOrderError, KVCorruptionError

transformers = pytest.importorskip("transformers")
from transformers import cache_utils  # noqa: E402
from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402

from kvcanary.adapters import compatibility  # noqa: E402
from kvcanary.adapters import transformers as adapter  # noqa: E402
from kvcanary.adapters.transformers import CanaryCache, attach  # noqa: E402
from kvcanary.adapters.transformers.unwatched import CACHES, cache_argument  # noqa: E402
from kvcanary.errors import AdapterError, CanaryNotRunningError  # noqa: E402
from kvcanary_tools.bench import transformers_clean  # noqa: E402

#: What this release calls the cache of a forward.
CACHE = cache_argument(transformers.LlamaForCausalLM)
FULL = CanaryConfig(content="full", seed=7)
ROLLING = CanaryConfig(content="rolling", seed=7)


@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "assisted", "lookup", "static"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma2"])
def test_outputs_are_unchanged_and_nothing_is_found(models, generate, family: str, way: str) -> None:
    """Bit for bit the same tokens, no finding, and every entry that attention read was judged."""
    model = models(family)
    expected = generate(model, way)
    with attach(model, FULL) as handle:
        assert torch.equal(generate(model, way), expected)
        certificate = handle.certificate()
    assert certificate["findings"] == []
    assert certificate["unchecked"] == {}
    assert certificate["slots_checked"] > 200
    assert certificate["forwards"] > 5
    assert certificate["bytes_checked"] >= 128 * certificate["slots_checked"]  # 2 heads of 8 floats, K and V
    assert certificate["store"] == "proved"
    assert torch.equal(generate(model, way), expected)


def damage(cache, at: int, harm):
    """A stopping criterion that harms the cache when rows have `at` tokens."""

    def criterion(input_ids, scores, **others):
        if input_ids.shape[1] == at:
            harm(cache)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    return {CACHE: cache, "stopping_criteria": [criterion]}


def found_by(run) -> list:
    with pytest.raises(KVCorruptionError) as raised:
        run()
    return raised.value.findings


def flip(tensor: torch.Tensor, place: tuple[int, ...], bit: int) -> None:
    tensor.view(torch.int32)[place] ^= 1 << bit


@pytest.mark.parametrize("config", [FULL, ROLLING], ids=["full", "rolling"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_flipped_bit_is_found_where_it_is(models, generate, family: str, config: CanaryConfig) -> None:
    """One bit of V: layer, row, position, head, dim and bit are named, and the tokens never leave."""
    model, cache = models(family), transformers.DynamicCache()
    with attach(model, config):
        harm = damage(cache, 12, lambda cache: flip(cache.layers[1].values, (1, 1, 9, 3), 2))
        [finding] = found_by(lambda: generate(model, **harm))
    assert (finding.code, finding.layer, finding.page, finding.position) == ("R9", 1, 1, 9)
    assert (finding.part, finding.head, finding.dim, finding.bit) == ("V", 1, 3, 2)
    assert finding.last_good_step is not None
    assert (finding.writer, finding.write_step, finding.write_site) == (
        "update",
        4,
        ("decode", 0),
    )  # position 9 of 7 fed
    assert finding.causes[0].family == "bits"


@pytest.mark.parametrize(("at", "position", "phase"), [(1, 5, "prefill"), (4, None, "decode")])
def test_what_is_not_finite_is_told_where_it_was_stored(models, generate, at: int, position, phase: str) -> None:
    """NaN that the second layer's values take on in one row, in a prefill or a decode: N1 of that layer, at once."""
    model, calls = models("Llama"), []

    def spoil(module, arguments, output):
        calls.append(output.shape[1])
        if len(calls) == at:
            output[1, position if position is not None else -1, 3] = torch.nan
        return output

    with attach(model, CanaryConfig(mode="raise", content="write")):
        model.model.layers[1].self_attn.v_proj.register_forward_hook(spoil)
        with pytest.raises(KVCorruptionError) as caught:
            generate(model, "greedy")
    found = caught.value.findings[0]
    wanted = position if position is not None else calls[0] + at - 2
    assert (found.code, found.layer, found.position, found.site[0]) == ("N1", 1, wanted, phase)
    assert found.reader is None
    assert found.causes[0].family == "numerics"


def test_log_mode_tells_once_and_goes_on(models, generate, capsys) -> None:
    """A fault is told of once, however often it is read, by the report on stderr; generation ends as it would."""
    model, cache = models(), transformers.DynamicCache()
    with attach(model, CanaryConfig(mode="log", content="full", seed=7)) as handle:
        output = generate(model, **damage(cache, 12, lambda cache: flip(cache.layers[0].keys, (0, 0, 4, 1), 0)))
        assert output.shape == (2, 31)
        assert {(f.code, f.layer, f.page, f.position) for f in handle.findings} == {("R9", 0, 0, 4)}
        assert [(f.incident, f.site[0]) for f in handle.findings] == [(1, "decode")]
        assert handle.certificate()["fired"]["R9"] > 5
    shown = capsys.readouterr().err
    assert shown.count("kvcanary: ERROR: content changed (R9)") == 1
    assert "\n  next      kvcanary codes R9\n" in shown


def test_a_fault_of_a_second_cache_is_told_again(models, generate) -> None:
    """The same row and position of another cache is another place."""
    model = models()
    with attach(model, CanaryConfig(mode="log", content="full", seed=7)) as handle:
        for _ in range(2):
            cache = transformers.DynamicCache()
            generate(model, **damage(cache, 12, lambda cache: flip(cache.layers[0].keys, (0, 0, 4, 1), 0)))
        assert [finding.code for finding in handle.findings] == ["R9", "R9"]
        assert len({finding.incident for finding in handle.findings}) == 2


def test_exchanged_rows_are_found(models, generate) -> None:
    """Two rows of one layer exchanged in place: both are named, each with the row whose bytes it holds."""

    def exchange(cache) -> None:
        for tensor in (cache.layers[2].keys, cache.layers[2].values):
            tensor.copy_(tensor.flip(0))

    model, cache = models(), transformers.DynamicCache()
    with attach(model, FULL):
        findings = found_by(lambda: generate(model, **damage(cache, 12, exchange)))
    assert [(f.code, f.layer, f.page, f.position, f.found["row"]) for f in findings] == [
        ("R6", 2, 0, 0, 1),
        ("R6", 2, 1, 0, 0),
    ]
    assert {f.causes[0].text for f in findings} == {"rows were not reordered, or otherwise than the sequences"}


def test_a_beam_reorder_that_one_layer_skips_is_found(models, generate, monkeypatch) -> None:
    """The bytes of every row are read again after a reorder: the layer, and the rows that should have moved."""
    model, expected, cache = models(), [], transformers.DynamicCache()
    right = cache_utils.DynamicLayer.reorder_cache

    def reorder(layer, beam_idx) -> None:
        keys, values = layer.keys, layer.values
        right(layer, beam_idx)
        if layer is cache.layers[1]:
            differs = (keys != layer.keys).any(-1).any(1)
            expected[:] = [(row, int(differs[row].nonzero()[0])) for row in differs.any(1).nonzero().flatten().tolist()]
            layer.keys, layer.values = keys, values

    monkeypatch.setattr(cache_utils.DynamicLayer, "reorder_cache", reorder)
    with attach(model, ROLLING):
        findings = found_by(lambda: generate(model, "beams", **{CACHE: cache}))
    assert expected
    assert {(f.code, f.layers) for f in findings} == {("T1", (1,))}
    assert sorted((f.page, f.position) for f in findings) == sorted(expected)


def test_a_beam_reorder_that_never_comes_is_found(models, generate) -> None:
    """The cache is sound, but its rows are not those of the sequences that the model is called for."""
    model, calls = models(), []

    def forget(cache, beam_idx):
        calls.append(beam_idx.tolist())
        return cache

    model._reorder_cache = forget
    with attach(model, ROLLING):
        findings = found_by(lambda: generate(model, "beams"))
    assert {f.code for f in findings} == {"R6"}
    row = findings[0].page
    assert findings[0].expected["row"] == row
    assert findings[0].position == findings[0].found["first_different_position"] >= 7
    assert calls


@pytest.mark.parametrize("layers", [(1,), (0, 1, 2)])
def test_a_crop_that_does_nothing_is_found(models, generate, monkeypatch, layers: tuple[int, ...]) -> None:
    """Rejected guesses that stay in the cache: the layers, and the position at which it should have ended."""
    right, lengths, cache = cache_utils.DynamicLayer.crop, [], transformers.DynamicCache()

    def crop(layer, tokens_to_remove) -> None:
        if tokens_to_remove and any(layer is cache.layers[number] for number in layers):
            lengths.append(layer.get_seq_length() + tokens_to_remove)
            return
        right(layer, tokens_to_remove)

    monkeypatch.setattr(cache_utils.DynamicLayer, "crop", crop)
    model = models()
    with attach(model, ROLLING):
        [finding] = found_by(lambda: generate(model, "assisted", **{CACHE: cache}))
    assert (finding.code, finding.layers, finding.position) == ("R10", layers, lengths[0])


def test_a_crop_that_never_comes_is_found(models, generate, monkeypatch) -> None:
    """The model is called for shorter rows than the cache holds."""
    monkeypatch.setattr(CanaryCache, "crop", lambda cache, tokens_to_remove: None)
    model = models()
    with attach(model, ROLLING):
        [finding] = found_by(lambda: generate(model, "assisted"))
    assert finding.code == "R10"
    assert finding.found["length"] > finding.expected["length"] == finding.position


def test_a_skipped_copy_is_found(models, generate, monkeypatch) -> None:
    """A static layer that does not store what it is given: layer and position, as unwritten."""
    right = cache_utils.StaticLayer.update

    def update(layer, keys, values, *args, **kwargs):
        if keys.shape[2] == 1 and int(layer.cumulative_length) == 10 and layer is cache.layers[2]:
            layer.cumulative_length.add_(1)
            return layer.keys, layer.values
        return right(layer, keys, values, *args, **kwargs)

    monkeypatch.setattr(cache_utils.StaticLayer, "update", update)
    model = models()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with attach(model, ROLLING):
        findings = found_by(lambda: generate(model, **{CACHE: cache}, disable_compile=True))
    assert [(f.code, f.layer, f.page, f.position) for f in findings] == [("R12", 2, 0, 10), ("R12", 2, 1, 10)]
    assert {f.causes[0].family for f in findings} == {"uninitialised"}


def test_an_append_that_never_comes_is_found(models, generate, monkeypatch) -> None:
    """A dynamic layer that gives attention what it had: shorter than it was told to be."""
    right, cache = cache_utils.DynamicLayer.update, transformers.DynamicCache()

    def update(layer, keys, values, *args, **kwargs):
        if layer.get_seq_length() == 10 and layer is cache.layers[2]:
            return layer.keys, layer.values
        return right(layer, keys, values, *args, **kwargs)

    monkeypatch.setattr(cache_utils.DynamicLayer, "update", update)
    model = models()
    with attach(model, ROLLING):
        [finding] = found_by(lambda: generate(model, **{CACHE: cache}))
    assert (finding.code, finding.layer, finding.position) == ("R10", 2, 10)
    assert (finding.expected["length"], finding.found["length"]) == (11, 10)


def test_a_wrong_window_is_found(models, generate, monkeypatch) -> None:
    """A window that keeps the first entries in the place of the last: each position holds another's bytes."""
    right, cache = cache_utils.DynamicSlidingWindowLayer.update, None

    def update(layer, keys, values, *args, **kwargs):
        full = right(layer, keys, values, *args, **kwargs)
        if layer is cache.layers[0] and layer.cumulative_length == 12:
            kept = layer.keys.shape[2]
            layer.keys, layer.values = (tensor[:, :, -kept - 1 : -1] for tensor in full)
        return full

    monkeypatch.setattr(cache_utils.DynamicSlidingWindowLayer, "update", update)
    model = models("Gemma2")
    cache = transformers.DynamicCache(config=model.config)
    with attach(model, FULL):
        findings = found_by(lambda: generate(model, **{CACHE: cache}))
    assert [(f.code, f.layer, f.page, f.position, f.found["position"]) for f in findings] == [
        ("R4", 0, 0, 5, 4),
        ("R4", 0, 1, 5, 4),
    ]
    assert {f.causes[0].family for f in findings} == {"windows"}


def test_what_a_rolling_check_has_not_read_is_read_when_generate_ends(models, generate) -> None:
    """A flip behind the cursor, in the last step: no slice comes by any more, the last re-read does."""
    model, cache = models(), transformers.DynamicCache()
    with attach(model, ROLLING):
        harm = damage(cache, 31, lambda cache: flip(cache.layers[1].keys, (0, 1, 2, 5), 30))
        [finding] = found_by(lambda: generate(model, **harm))
    assert (finding.code, finding.layer, finding.page, finding.position) == ("R9", 1, 0, 2)
    assert finding.site == ("release", 0)


def test_one_cache_alone(models) -> None:
    """CanaryCache gives the same cache back; a copy of it, a selection and a reset are followed."""
    model, cache = models(), transformers.DynamicCache()
    assert CanaryCache(cache, FULL) is cache
    assert isinstance(cache, transformers.DynamicCache)
    prompt = torch.arange(3, 12)[None]
    with torch.no_grad():
        model(prompt, **{CACHE: cache})
        twin = copy.deepcopy(cache)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([2, 0]))
        model(prompt[:, :1].repeat(2, 1), **{CACHE: cache})
        flip(twin.layers[0].keys, (0, 0, 3, 1), 4)
        [finding] = found_by(lambda: model(prompt[:, :1], **{CACHE: twin}))
        cache.reset()
        left = cache.get_seq_length()  # 5.17 leaves zeros where the entries were, and attends to them
        rows = prompt.repeat(2, 1)
        if left:
            assert [(f.code, f.found["length"]) for f in found_by(lambda: model(rows, **{CACHE: cache}))] == [
                ("R10", left + 9)
            ]
        else:
            model(rows, **{CACHE: cache})
            assert cache.kv_rows.length == 9
    assert (finding.code, finding.layer, finding.position) == ("R9", 0, 3)
    assert cache.kv_rows.canary is twin.kv_rows.canary


def test_a_selection_that_one_layer_skips_is_found(models, monkeypatch) -> None:
    """Rows of a copied batch are read again as well."""
    model, cache = models(), CanaryCache(transformers.DynamicCache(), ROLLING)
    with torch.no_grad():
        model(torch.arange(3, 13).view(2, 5), **{CACHE: cache})
        cache.layers[2].batch_select_indices = lambda indices: None
        [finding, _] = found_by(lambda: cache.batch_select_indices(torch.tensor([1, 0])))
    assert (finding.code, finding.layers, finding.found["row"]) == ("T1", (2,), 1)


def test_an_offloaded_layer_is_read_when_it_is_back(models) -> None:
    """Bytes that were damaged on their way are found by the next forward that attends to them."""
    model, cache = models(), CanaryCache(transformers.DynamicCache(), FULL)
    with torch.no_grad():
        model(torch.arange(3, 8)[None], **{CACHE: cache})
        cache.offload(1)
        flip(cache.layers[1].values, (0, 0, 2, 2), 7)
        cache.layers[1].prefetch()
        [finding] = found_by(lambda: model(torch.tensor([[9]]), **{CACHE: cache}))
    assert (finding.code, finding.layer, finding.position) == ("R9", 1, 2)


def test_a_cache_that_was_filled_before_is_taken_as_it_lies(models, generate) -> None:
    """What nobody watched is counted in the certificate, and watched from then on."""
    model, cache = models(), transformers.DynamicCache()
    prompt = torch.arange(3, 10)[None]
    with torch.no_grad():
        model(prompt, **{CACHE: cache})
        with attach(model, FULL) as handle:
            model(prompt[:, :1], **{CACHE: cache})
            assert handle.certificate()["unchecked"] == {"entries taken as they lay": 21}
            flip(cache.layers[1].values, (0, 0, 2, 2), 7)
            [finding] = found_by(lambda: model(prompt[:, :1], **{CACHE: cache}))
    assert (finding.code, finding.layer, finding.position) == ("R9", 1, 2)


def test_a_conversation_goes_on(models) -> None:
    """A second generate over the first one's cache, left-padded, is clean; over other tokens it is the wrong row."""
    model, cache = models(), transformers.DynamicCache()
    prompt = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    with attach(model, FULL) as handle:
        first = model.generate(prompt, attention_mask=prompt.ne(0), max_new_tokens=6, **{CACHE: cache})
        longer = torch.cat((first, torch.tensor([[8, 9], [10, 11]])), 1)
        twin = copy.deepcopy(cache)
        model.generate(longer, attention_mask=longer.ne(0), max_new_tokens=6, **{CACHE: cache})
        assert handle.findings == []
        longer[1, 3] = 90
        [finding] = found_by(lambda: model.generate(longer, max_new_tokens=6, **{CACHE: twin}))
    assert (finding.code, finding.page, finding.position) == ("R6", 1, 3)
    assert "token" not in finding.found


def test_a_conversation_that_began_unwatched_goes_on(models) -> None:
    """Tokens of what was taken as it lay are not known: counted, and no finding."""
    model, cache = models(), transformers.DynamicCache()
    first = model.generate(torch.arange(3, 8)[None], max_new_tokens=6, **{CACHE: cache})
    with attach(model, FULL) as handle:
        model.generate(torch.cat((first, torch.tensor([[8, 9]])), 1), max_new_tokens=6, **{CACHE: cache})
        assert handle.findings == []
        assert handle.certificate()["unchecked"]["entries whose token nobody said"] == 60
        assert handle.certificate()["unchecked"]["entries taken as they lay"] == 30


@pytest.mark.skipif(
    transformers.__version__.startswith("5.14."), reason="windows of batches are damaged in this release"
)
@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, 12), pytest.param(10**6, 120, marks=pytest.mark.slow)], ids=["sample", "million"]
)
def test_rows_of_sound_generation_are_clean(rows: int, tokens: int) -> None:
    """Every way of every family, batches too: tokens are equal, no finding; the slow one reads a million rows."""
    result = transformers_clean.measure(rows, tokens)
    assert result["findings"] == 0
    assert result["rows"] >= max(rows, 20_000)
    assert all(line["rows"] for line in result["ways"])
    assert {line["way"] for line in result["ways"]} == {*transformers_clean.WAYS, "batch"}


def test_detach_leaves_nothing_behind(models, generate) -> None:
    """Hooks, methods and the class of a cache are what they were; a second detach is harmless."""
    model, cache = models(), transformers.DynamicCache()
    handle = attach(model, FULL)
    generate(model, **{CACHE: cache})
    assert isinstance(cache, CanaryCache)
    with pytest.raises(HookOrderError, match="has a canary already: detach"):
        attach(model, FULL)
    handle.detach()
    handle.detach()
    assert type(cache) is transformers.DynamicCache
    assert not hasattr(cache, "kv_rows")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not {"generate", "prepare_inputs_for_generation"} & set(model.__dict__)


def _mamba(kind: str = "Mamba") -> transformers.PreTrainedModel:
    shape = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    config = getattr(transformers, f"{kind}Config")(**shape)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def _rwkv() -> transformers.PreTrainedModel:
    config = transformers.RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    return transformers.RwkvForCausalLM(config).eval()


class _Takes(torch.nn.Module):
    """A model whose forward has these names."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.forward = forward


STATEFUL = [_mamba, lambda: _mamba("FalconMamba"), _rwkv]


@pytest.mark.parametrize("mode", ["log", "raise"])
@pytest.mark.parametrize("make", STATEFUL)
def test_a_model_of_which_nothing_can_be_watched_is_refused(make, mode: str) -> None:
    """Its state comes under a name that is no cache's: an error with the names, and nothing is attached."""
    model = make()
    if {*CACHES} & {*inspect.signature(model.forward).parameters}:
        pytest.skip("its state is a cache in this release: refused at the first forward")
    with pytest.raises(
        AdapterError,
        match=r"ForCausalLM must take its cache as past_key_values or cache or cache_params, it takes .*run",
    ):
        attach(model, CanaryConfig(mode=mode))
    assert "generate" not in model.__dict__
    assert not model._forward_hooks


@pytest.mark.parametrize("content", ["full", "rolling", "write"])
@pytest.mark.parametrize("make", STATEFUL)
def test_a_state_that_is_a_cache_is_watched(make, content: str) -> None:
    """Where a release gives such models a cache: equal tokens, and every state was judged."""
    model = make()
    if not {*CACHES} & {*inspect.signature(model.forward).parameters}:
        pytest.skip("its state is no cache in this release: refused by attach")
    prompt = torch.arange(3, 10)[None]
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
    with attach(model, CanaryConfig(content=content)) as handle, structlog.testing.capture_logs() as events:
        assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), expected)
    assert not events
    certificate = handle.certificate()
    assert (certificate["findings"], certificate["unchecked"]) == ([], {})
    assert certificate["states_checked"] >= 2 * 2


def test_a_cache_is_found_by_either_name() -> None:
    """As releases call it; a wrapper that names no cache and passes everything on is taken at its word."""
    assert cache_argument(_Takes(lambda input_ids, past_key_values=None, use_cache=True: None)) == "past_key_values"
    assert cache_argument(_Takes(lambda input_ids, cache=None, use_cache=True: None)) == "cache"
    assert cache_argument(_Takes(lambda *args, **kwargs: None)) == "past_key_values"
    with pytest.raises(AdapterError):
        cache_argument(_Takes(lambda input_ids, use_cache=True, **kwargs: None))
    with pytest.raises(AdapterError):
        cache_argument(_Takes(lambda input_ids: None))


def test_a_generate_that_nobody_watched_says_so(models) -> None:
    """Without a cache: an error at its end, in mode log an event; with one nothing is said."""
    model = models()
    prompt = torch.arange(3, 10)[None]
    with attach(model, FULL) as handle:
        with pytest.raises(
            CanaryNotRunningError, match=r"generate\(\) of LlamaForCausalLM ran 3 forwards, and no cache"
        ):
            model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False)
        with structlog.testing.capture_logs() as events:
            model.generate(prompt, max_new_tokens=3, do_sample=False)
        assert not events
        assert handle.certificate()["slots_checked"]
    with attach(model, CanaryConfig(mode="log")), structlog.testing.capture_logs() as events:
        model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False)
    assert {event["event"] for event in events} == {"kvcanary.not_watching"}
    assert events[0]["model"] == "LlamaForCausalLM"


@pytest.mark.parametrize("is_lazy", [False, True])
def test_log_goes_on_without_a_cache_that_is_not_followed(models, is_lazy: bool) -> None:
    """A layer that is not known, there from the beginning or made in the forward: told, counted, and no error."""
    model = models()
    prompt = torch.arange(3, 10)[None]
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)

    class Other(cache_utils.DynamicLayer):
        """Unknown here."""

    cache = transformers.DynamicCache()
    cache.layer_class_to_replicate = Other
    if not is_lazy:
        cache.layers += [Other() for _ in range(model.config.num_hidden_layers)]
    with attach(model, CanaryConfig(mode="log")) as handle, structlog.testing.capture_logs() as events:
        tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, **{CACHE: cache})
        assert handle.certificate()["unchecked"]["forwards without a cache that is watched"] >= 3
    assert torch.equal(tokens, expected)
    assert type(cache) is transformers.DynamicCache
    assert "got Other" in events[0]["reason"]


def test_what_is_not_known_is_refused_whole(models, monkeypatch) -> None:
    """Another version, a name that is gone, a layer that is not followed, a mode without meaning: one sentence each."""
    model = models()
    with pytest.raises(AdapterError, match=r"mode must be 'log' or 'raise' here, got 'abort'"):
        attach(model, CanaryConfig(mode="abort"))
    with pytest.raises(CanaryConfigError, match="mode 'off' installs nothing"):
        attach(model, CanaryConfig(mode="off"))
    cache = transformers.DynamicCache()
    cache.layers.append(cache_utils.DynamicIndexedLayer())
    with pytest.raises(AdapterError, match=r"layers of a cache must be one of .*, got DynamicIndexedLayer"):
        CanaryCache(cache, FULL)
    assert type(cache) is transformers.DynamicCache
    monkeypatch.setattr(transformers, "__version__", "6.1.0")
    monkeypatch.setenv("KVCANARY_ACCEPT", "strict")
    with pytest.raises(AdapterError, match=r"transformers 6\.1\.0 is not known here: install 5\.14 or .* or 5\.24"):
        attach(model, FULL)
    monkeypatch.undo()
    monkeypatch.setattr(cache_utils.Cache, "update", lambda self, states: None)
    monkeypatch.delattr(PagedAttentionCache, "update")
    with pytest.raises(AdapterError, match=r"Cache\.update must begin with .*; .*PagedAttentionCache\.update is gone"):
        attach(model, FULL)
    assert "generate" not in model.__dict__


def test_a_release_that_is_newer_than_all_tested_is_told_and_watched(models, generate, monkeypatch) -> None:
    """Names and signatures decide: one warning with the page that says what that means, and everything is checked."""
    monkeypatch.setattr(transformers, "__version__", "5.25.0")
    monkeypatch.setattr(compatibility, "_warned", set())
    model = models()
    with structlog.testing.capture_logs() as events:
        for _ in range(2):
            with attach(model, FULL) as handle:
                generate(model)
                assert handle.certificate()["slots_checked"] > 200
    assert [(event["event"], event["version"]) for event in events] == [("kvcanary.untested_release", "5.25.0")]


#: By path, what is taken away of transformers, and a generation that uses it.
GONE = {
    "crop": ((cache_utils.Cache, "crop"), "lookup"),
    "reorder_cache": ((cache_utils.Cache, "reorder_cache"), "beams"),
}


@pytest.mark.parametrize("path", GONE)
def test_a_name_that_is_gone_closes_its_path_alone(models, generate, monkeypatch, path: str) -> None:
    """attach works and says which; another path is watched; the closed one is refused when it is used, by the name."""
    (owner, name), way = GONE[path]
    model = models()
    monkeypatch.delattr(owner, name)
    with structlog.testing.capture_logs() as events, attach(model, FULL) as handle:
        assert adapter.check() == []
        generate(model)
        certificate = handle.certificate()
        assert certificate["slots_checked"] > 200
        assert certificate["closed_paths"] == {path: f"transformers.cache_utils:Cache.{name} is gone"}
        with pytest.raises(AdapterError, match=rf"{path} is not watched: .*Cache\.{name} is gone; install"):
            generate(model, way)
    assert [(event["event"], event["path"]) for event in events] == [("kvcanary.closed_path", path)]


def test_a_closed_operation_is_left_alone_in_mode_log(models, monkeypatch) -> None:
    """The cache is given up by it, the next forward watches it again, as it lies, and nothing false is found."""
    model, cache = models(), transformers.DynamicCache()
    with torch.no_grad(), attach(model, CanaryConfig(mode="log", content="full")) as handle:
        handle._canary.closed["crop"] = "gone"
        model(torch.arange(3, 10)[None], **{CACHE: cache})
        cache.crop(-3)
        assert type(cache) is transformers.DynamicCache
        for _ in range(2):
            model(torch.tensor([[5]]), **{CACHE: cache})
        certificate = handle.certificate()
    assert certificate["findings"] == []
    assert certificate["unchecked"]["entries taken as they lay"] == 4 * model.config.num_hidden_layers
    assert certificate["slots_checked"] > 10


def test_a_cut_by_an_unknown_name_is_no_finding(models, monkeypatch) -> None:
    """Where crop() has another name, a layer that is shorter than its records is refused, not taken for damage."""
    model, cache = models(), transformers.DynamicCache()
    monkeypatch.setattr(cache_utils.Cache, "roll_back", cache_utils.Cache.crop, raising=False)
    monkeypatch.delattr(cache_utils.Cache, "crop")
    with torch.no_grad(), attach(model, FULL):
        model(torch.arange(3, 10)[None], **{CACHE: cache})
        cache.roll_back(-3)
        with pytest.raises(AdapterError, match=r"crop is not watched: .*Cache\.crop is gone"):
            model(torch.tensor([[5]]), **{CACHE: cache})


def test_a_missing_name_of_generate_batch_does_not_close_generate(models, generate, monkeypatch) -> None:
    """And the other way round: what is left is watched, what is gone says so in the certificate and when it is used."""
    model = models(batched=True)
    monkeypatch.delattr(PagedAttentionCache, "update")
    with attach(model, FULL) as handle:
        generate(model)
        assert handle.certificate()["slots_checked"] > 200
        with pytest.raises(AdapterError, match=r"generate_batch is not watched: .*PagedAttentionCache\.update is gone"):
            transformers_clean.generate_batch(model)
    monkeypatch.undo()
    monkeypatch.delattr(cache_utils.Cache, "get_seq_length")
    monkeypatch.delattr(cache_utils.CacheLayerMixin, "get_seq_length")
    assert set(adapter.closed_paths()) == {"generate"}
    monkeypatch.undo()
    model = models(batched=True)
    with attach(model, FULL) as handle:
        handle._canary.closed["generate"] = "gone"
        transformers_clean.generate_batch(model)
        assert handle.certificate()["slots_checked"] > 500
        with pytest.raises(AdapterError, match="generate is not watched: gone"):
            model(torch.arange(3, 10)[None], **{CACHE: transformers.DynamicCache()})


def test_a_generate_of_another_model_is_not_taken_for_watched(models) -> None:
    """A model whose generate() runs another one: no forward of its own was seen, which is an error."""
    model, other = models(), models()
    model.generate = other.generate
    with attach(model, FULL), pytest.raises(CanaryNotRunningError, match="ran no forward of this model: attach to"):
        model.generate(torch.arange(3, 10)[None], max_new_tokens=3, do_sample=False)


def test_a_layer_that_is_left_out_is_found(models, generate, monkeypatch) -> None:
    """A forward after which one layer has nothing new: unwritten, by name of the layer."""
    model, cache = models(), transformers.DynamicCache()
    right = CanaryCache.update

    def update(cache, keys, values, layer_idx, *args, **kwargs):
        if layer_idx == 1 and cache.get_seq_length(1) == 10:
            return keys, values
        return right(cache, keys, values, layer_idx, *args, **kwargs)

    monkeypatch.setattr(CanaryCache, "update", update)
    with attach(model, ROLLING):
        [finding] = found_by(lambda: generate(model, **{CACHE: cache}))
    assert (finding.code, finding.layers, finding.position) == ("R12", (1,), 10)


def test_arguments_by_place_and_embeddings(models) -> None:
    """A cache that is given by place is followed too; a forward without any is counted, as are unknown tokens."""
    model, cache = models(), transformers.DynamicCache()
    prompt = torch.arange(3, 10)[None]
    with torch.no_grad(), attach(model, FULL) as handle:
        model(prompt, None, None, cache)
        assert isinstance(cache, CanaryCache)
        assert cache.kv_rows.tokens.tolist() == prompt.tolist()
        model(prompt, use_cache=False)
        assert handle.certificate()["unchecked"] == {"forwards without a cache that is watched": 1}
        embeds = model.get_input_embeddings()(prompt[:, :2])
        model(inputs_embeds=embeds, **{CACHE: cache})
        assert cache.kv_rows.tokens[0, 7:].tolist() == [-1, -1]


def test_rolling_says_what_went_unread(models) -> None:
    """A budget too small to come round shows in the certificate, and so does what a window drops unread."""
    model = models("Gemma2")
    certificates = {}
    for name, config in {"small": CanaryConfig(budget=1, seed=7), "full": FULL}.items():
        with torch.no_grad(), attach(model, config) as handle:
            cache = transformers.DynamicCache(config=model.config)
            for start in range(3, 33, 5):
                model(torch.arange(start, start + 5)[None], **{CACHE: cache})
            certificates[name] = handle.certificate()
    assert certificates["small"]["max_unread_steps"] > 3
    assert certificates["small"]["freed_unread_bytes"] > 0
    assert certificates["small"]["peak_live_bytes"] >= certificates["small"]["live_bytes"] > 0
    assert certificates["full"]["max_unread_steps"] == 1
    assert certificates["full"]["freed_unread_bytes"] == 0


def test_the_certificate_lists_what_is_not_fed(models, generate) -> None:
    """A dense cache has no pages and no plans: those classes are inactive, and JSON says so."""
    model = models()
    with attach(model, ROLLING) as handle:
        generate(model)
        certificate = json.loads(json.dumps(handle.certificate()))
    assert set(certificate["classes"]) == {"N1", "R4", "R6", "R9", "R10", "R12", "T1", "W5"}
    assert certificate["inactive_classes"]["R7"] == "not fed"


def test_content_write_compares_nothing_and_says_so(models, generate) -> None:
    """Fingerprints are taken and never compared: beams pass, bytes are unread, and the classes are inactive."""
    model = models()
    with attach(model, CanaryConfig(content="write", seed=7)) as handle:
        generate(model, "beams")
        certificate = handle.certificate()
    assert certificate["bytes_checked"] == 0
    assert certificate["slots_sealed"] > 0
    assert certificate["store"] == "not proved"
    assert set(certificate["classes"]) == {"N1", "R6", "R10", "R12", "W5"}


def test_without_transformers_one_sentence_says_what_to_install() -> None:
    """Importing the adapter is the only thing that needs it."""
    script = "import sys; sys.modules['transformers'] = None\nimport kvcanary.adapters.transformers"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = child.stderr.strip().splitlines()[-1]
    assert last == "ImportError: kvcanary.adapters.transformers needs transformers: pip install 'kvcanary[hf]'"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 5, 8), (3, 2, 1, 16)])
def test_both_ways_give_equal_fingerprints(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The compiled loop over heads and the float64 products of rows, also where entries are a slice of longer rows."""
    from kvcanary.adapters.transformers.judging import DenseCanary, words_of
    from kvcanary.records.fingerprints import fingerprints_of_words

    canary = DenseCanary(FULL)
    long = (*shape[:2], shape[2] + 4, shape[3])
    k, v = (torch.randn(long, generator=torch.Generator().manual_seed(n)).to(dtype)[:, :, 2:-2] for n in range(2))
    for layer in (0, 3):
        fingerprints = canary.fingerprints(layer, k, v)
        rows = words_of(k, v)
        wanted = torch.stack(fingerprints_of_words(canary.keys(layer, rows.shape[1], rows.device), layer, rows))
        assert torch.equal(fingerprints.flatten(1), wanted)
    assert canary.fingerprints(0, k[:, :, :0], v[:, :, :0]).shape == (2, shape[0], 0)
