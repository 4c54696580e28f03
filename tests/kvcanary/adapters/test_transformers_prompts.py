"""Prompts that generate() feeds in parts, or does not know, and caches that models make by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.adapters.transformers import CanaryCache, attach
from kvcanary.adapters.transformers.unwatched import cache_argument, cache_in
from kvcanary_tools.bench.transformers_clean import WAYS

FULL = CanaryConfig(content="full", seed=3)
PROMPT = torch.arange(3, 13)[None]
SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1}
SMALL |= {"eos_token_id": None, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
#: Models with layers that store nothing, since they have no attention or read what other layers store.
STORING_LESS: dict[str, tuple[str, dict[str, Any]]] = {
    "NemotronH": (
        "NemotronHConfig",
        {"hybrid_override_pattern": "M*M-", "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8}
        | {"n_groups": 1, "chunk_size": 8, "use_mamba_kernels": False},
    ),
    "Gemma3n": (
        "Gemma3nTextConfig",
        {"sliding_window": 8, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
        | {"vocab_size_per_layer_input": 97, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [32] * 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
RECURRENT: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "FalconMamba": {"state_size": 8},
    "MiniMax": {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8},
}
HAS_FAULTS = transformers.__version__.startswith(("5.20.", "5.23.", "5.24."))  # that were tried


def make(config: str, shape: dict[str, Any], scale: float = 0.0, seed: int = 0) -> Any:
    """scale: of weights that make the model say something else for every token; 0: as the release draws them."""
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    torch.manual_seed(seed)
    own = getattr(transformers, config)(**SMALL | shape)
    model = transformers.AutoModelForCausalLM.from_config(own).eval()
    for weight in model.parameters() if scale else ():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=scale)
    return model


def more(model: Any, prompt: torch.Tensor, tokens: int = 6, **settings: Any) -> Any:
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **settings)


def turn(model: Any, text: torch.Tensor, **settings: Any) -> torch.Tensor:
    """A prompt, and then this one over the cache of the first."""
    first = more(model, PROMPT, return_dict_in_generate=True)
    whole = torch.cat((first.sequences, text), 1)
    settings |= {cache_argument(model): cache_in(first), "attention_mask": torch.ones_like(whole)}
    return more(model, whole, **settings)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("assisted", "static")])
def test_prompts_in_parts_and_of_no_tokens_are_sound(models, generate, way: str) -> None:
    """Chunks, embeddings, and turns of which generate() is given all or the new tokens: no finding, equal tokens."""
    model = models()
    expected = generate(model, way)
    with attach(model, FULL) as handle:
        assert torch.equal(generate(model, way), expected)
    told = handle.certificate()
    assert (told["findings"], told["slots_checked"] > 500) == ([], True)
    unsaid = "entries whose token nobody said"
    assert set(told["unchecked"]) == ({unsaid} if way in ("embeddings", "new tokens") else set())


def test_padded_prompts_in_chunks_are_sound(models) -> None:
    """Rows of which some begin with padding, whose mask grows with the chunks."""
    model, prompt = models(), torch.cat((PROMPT, PROMPT.roll(4, 1)))
    prompt[1, :4] = 0
    settings = {"attention_mask": (prompt != 0).long(), "prefill_chunk_size": 4}
    expected = more(model, prompt, **settings)
    with attach(model, FULL) as handle:
        assert torch.equal(more(model, prompt, **settings), expected)
    assert (handle.findings, handle.certificate()["unchecked"]) == ([], {})


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_turn_over_the_cache_of_another_text_is_found(models, chunk: int | None) -> None:
    """The whole prompt is not what the cache was filled with: R6 at its first other token, before any is generated."""
    model = models()
    with attach(model, FULL):
        first = more(model, PROMPT, return_dict_in_generate=True)
        other = torch.cat((first.sequences, torch.tensor([[5, 6, 7]])), 1)
        other[0, 4] += 1
        with pytest.raises(KVCorruptionError) as caught:
            more(model, other, prefill_chunk_size=chunk, **{cache_argument(model): cache_in(first)})
    [finding] = caught.value.findings
    if chunk is None or not transformers.__version__.startswith("5.14."):  # which feeds all of it again
        assert (finding.code, finding.position) == ("R6", 4)


@pytest.mark.parametrize("is_padded", [False, True])
def test_entries_that_are_lost_between_chunks_are_found(models, monkeypatch, is_padded: bool) -> None:
    """The cache is cut behind the first chunk: shorter than the mask says, or what was fed before."""
    model, mask = models(), torch.ones_like(PROMPT)
    mask[0, :2] = 1 - is_padded
    with attach(model, FULL):
        right, seen = model.prepare_inputs_for_generation, list[Any]()

        def cut(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(tokens)
            if len(seen) == 2:
                kwargs[cache_argument(model)].crop(2 if transformers.__version__.startswith("5.14.") else -2)
            return right(tokens, *args, **kwargs)

        monkeypatch.setattr(model, "prepare_inputs_for_generation", cut)
        with pytest.raises(KVCorruptionError) as caught:
            more(model, PROMPT, attention_mask=mask, prefill_chunk_size=4)
    [finding] = caught.value.findings
    assert (finding.code, finding.expected["length"], finding.found["length"]) == ("R10", 4, 2)


def test_a_loop_of_ones_own_behind_embeddings_is_sound(models) -> None:
    """Who prepares inputs by himself, behind a generate() that had no tokens, is not taken for that one."""
    model = models()
    with torch.no_grad(), attach(model, FULL) as handle:
        more(model, None, inputs_embeds=model.get_input_embeddings()(PROMPT))
        cache = transformers.DynamicCache()
        for end in 10, 11, 12:
            text = torch.cat((PROMPT, PROMPT), 1)[:, :end]
            fed = None if end == 10 else 1
            own = {cache_argument(model): cache, "next_sequence_length": fed, "is_first_iteration": end == 10}
            model(**model.prepare_inputs_for_generation(text, **own))
    assert handle.findings == []


def test_an_entry_too_many_in_chunks_is_found(models, monkeypatch) -> None:
    """A chunk that is fed twice: rows are longer than what the prompt says."""
    model = models()
    with attach(model, FULL):
        right, seen = model.prepare_inputs_for_generation, list[torch.Tensor]()

        def twice(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(tokens)
            return right(seen[-2] if len(seen) == 2 else tokens, *args, **kwargs)

        monkeypatch.setattr(model, "prepare_inputs_for_generation", twice)
        with pytest.raises(KVCorruptionError) as caught:
            more(model, PROMPT, prefill_chunk_size=4)
    assert caught.value.findings[0].code == "R6"


@pytest.mark.parametrize("family", STORING_LESS)
def test_layers_that_store_nothing_are_no_hindrance(family: str) -> None:
    """Layers without attention, and those that read what others store: greedy, beams and a second turn are sound."""
    if family == "NemotronH" and transformers.__version__.startswith("5.14."):
        pytest.skip("transformers 5.14 makes no NemotronH with layers of an MLP alone")
    model = make(*STORING_LESS[family])
    for settings in {}, {"num_beams": 3}:
        expected = more(model, PROMPT, **settings)
        with attach(model, FULL) as handle:
            assert torch.equal(more(model, PROMPT, **settings), expected)
        told = handle.certificate()
        assert (told["findings"], told["unchecked"], told["slots_checked"] > 50) == ([], {}, True)
    with attach(model, FULL) as handle:
        turn(model, torch.tensor([[5, 6, 7]]))
    assert handle.findings == []


# what a model makes by itself


def test_the_cache_that_a_first_call_makes_is_followed(models) -> None:
    """A loop of one's own, whose first call gives no cache: tokens, positions and bytes are known from there on."""
    model = models()
    with torch.no_grad(), attach(model, FULL) as handle:
        cache = cache_in(model(PROMPT))
        assert isinstance(cache, CanaryCache)
        assert cache.kv_rows.tokens.tolist() == PROMPT.tolist()
        assert set(handle.certificate()["unchecked"]) == {"entries taken as they lay"}
        with pytest.raises(KVCorruptionError, match="W5"):
            model(torch.tensor([[5]]), position_ids=torch.tensor([[11]]), **{cache_argument(model): cache})


def test_bytes_that_change_behind_a_first_call_are_found(models) -> None:
    """One flipped bit between the call that made the cache and the next one."""
    model = models()
    with torch.no_grad(), attach(model, FULL):
        cache = cache_in(model(PROMPT))
        cache.layers[1].values.view(torch.int32)[0, 1, 6, 2] ^= 1 << 9
        with pytest.raises(KVCorruptionError) as caught:
            model(torch.tensor([[5]]), **{cache_argument(model): cache})
    [finding] = caught.value.findings
    assert (finding.code, finding.layers, finding.position) == ("R9", (1,), 6)


def test_a_tuple_may_hold_the_cache(models) -> None:
    """Outputs of `return_dict=False` too; of those without a cache one is told."""
    model = models()
    with torch.no_grad(), attach(model, FULL) as handle:
        assert isinstance(cache_in(model(PROMPT, return_dict=False)), CanaryCache)
        assert cache_in(model(PROMPT, use_cache=False)) is None
        assert handle.certificate()["unchecked"]["forwards without a cache that is watched"] == 1


def test_a_cache_that_is_not_followed_is_counted_where_nobody_asked_for_one() -> None:
    """An encoder and a decoder, called as for a loss: no error, in mode raise."""
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad(), attach(model, FULL) as handle:
        model(input_ids=PROMPT, decoder_input_ids=PROMPT)
    assert handle.certificate()["unchecked"] == {"forwards without a cache that is watched": 1}


def test_a_forward_that_fails_leaves_nothing_behind(models) -> None:
    """The next one has a cache, and is judged as any other."""
    model, cache = models(), transformers.DynamicCache()
    with torch.no_grad(), attach(model, FULL) as handle:
        with pytest.raises(IndexError):
            model(PROMPT + 1000)
        model(PROMPT, **{cache_argument(model): cache})
        assert cache.kv_rows.tokens.tolist() == PROMPT.tolist()
    assert (handle.findings, handle.certificate()["unchecked"]) == ([], {})


# states, and what a release does to them


def test_a_state_in_a_list_of_the_cache_is_watched() -> None:
    """MiniMax keeps its states beside the layers of its cache: a changed word is R9 of its layer."""
    model = make("MiniMaxConfig", RECURRENT["MiniMax"])
    with torch.no_grad(), attach(model, FULL) as handle:
        cache = cache_in(model(PROMPT))
        model(torch.tensor([[5]]), **{cache_argument(model): cache})
        assert handle.certificate()["states_checked"] == 2
        cache.linear_cache[2].view(torch.int32)[0, 0, 0, 0] ^= 1 << 20
        with pytest.raises(KVCorruptionError) as caught:
            model(torch.tensor([[6]]), **{cache_argument(model): cache})
    [finding] = caught.value.findings
    assert (finding.code, finding.layers) == ("R9", (2,))


@pytest.mark.skipif(not HAS_FAULTS, reason="a fault of transformers 5.20, 5.23 and 5.24")
def test_beams_of_minimax_leave_states_where_they_were() -> None:
    """transformers to 5.24: `reorder_cache` passes by them, so that beams go on from each other's, and say something
    else than without a cache: T1 where rows move, no token leaves.
    """
    model = make("MiniMaxConfig", RECURRENT["MiniMax"], scale=0.3)
    beams = {"num_beams": 4, "tokens": 14}
    assert not torch.equal(more(model, PROMPT, **beams), more(model, PROMPT, use_cache=False, **beams))
    with attach(model, FULL), pytest.raises(KVCorruptionError) as caught:
        more(model, PROMPT, **beams)
    [finding] = caught.value.findings
    assert (finding.code, finding.layers) == ("T1", (0, 2))


@pytest.mark.skipif(not HAS_FAULTS, reason="a fault of transformers 5.20, 5.23 and 5.24")
@pytest.mark.parametrize("family", RECURRENT)
def test_a_second_turn_feeds_states_the_whole_row_again(family: str) -> None:
    """transformers to 5.24: of a cache that has states alone the tokens are not cut off which it has absorbed, and
    answers are others than without it: R10 in front of the first forward, no token leaves.
    """
    model, text = make(f"{family}Config", RECURRENT[family], scale=0.5), torch.tensor([[11, 12, 13]])
    once = more(model, torch.cat((more(model, PROMPT), text), 1), tokens=10)
    assert not torch.equal(turn(model, text, tokens=10), once)
    with attach(model, FULL), pytest.raises(KVCorruptionError) as caught:
        turn(model, text)
    [finding] = caught.value.findings
    assert (finding.code, finding.expected["length"], finding.found["length"]) == ("R10", 0, 15)
