"""Images over a cache that has one already: transformers refuses their pixels, so no other image is answered for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvcanary.adapters.transformers import attach  # noqa: E402
from kvcanary.adapters.transformers.unwatched import cache_argument  # noqa: E402
from kvcanary.config import CanaryConfig  # noqa: E402

IMAGE = 98  # placeholder
TEXT = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
EYES = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
EYES |= {"image_size": 16, "patch_size": 8}
PROMPT = torch.tensor([[1, 2, 96, *[IMAGE] * 4, 95, 6, 7]])


def llava() -> tuple[Any, dict[str, Any]]:
    text, eyes = {"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", "projection_dim": 32, **EYES}
    config = transformers.LlavaConfig(text_config=text, vision_config=eyes, image_token_index=IMAGE, image_seq_length=4)
    return transformers.LlavaForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


def gemma() -> tuple[Any, dict[str, Any]]:
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=EYES, mm_tokens_per_image=4, image_token_id=IMAGE, boi_token_index=96,
        eoi_token_index=95,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


@pytest.mark.parametrize("family", [llava, gemma])
def test_pixels_of_placeholders_that_are_cached_are_refused(family: Any) -> None:
    """The first turn is watched without a finding; other pixels over its cache are an error of transformers' own, and
    a prompt that goes on without pixels is silent: it says of no other image.
    """
    torch.manual_seed(0)
    model, given = family()
    model, cache = model.eval(), transformers.DynamicCache(config=model.config.get_text_config())
    name, said = cache_argument(model), {"max_new_tokens": 3, "do_sample": False}
    with attach(model, CanaryConfig(mode="raise", content="full")) as handle:
        answer = model.generate(PROMPT, **given, **said, **{name: cache})
        more = torch.cat((answer, torch.tensor([[9, 10]])), 1)
        others = given | {"pixel_values": torch.randn(1, 3, 16, 16)}
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            model.generate(more, **others, **said, **{name: copy.deepcopy(cache)})
        assert model.generate(more, **said, **{name: cache}).shape == (1, more.shape[1] + 3)
        assert handle.findings == []
        assert handle.certificate()["slots_checked"] > 0
