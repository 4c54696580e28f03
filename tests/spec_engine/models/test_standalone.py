"""A small model as the draft: the same interface as a head, rows one ahead of the committed length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spec_engine.models import CheckpointError, Decoder, load_standalone, load_target
from spec_engine.models.config import parse_config

TOKENS = torch.tensor([5, 40, 3, 77, 40, 0, 96, 12, 13, 50, 51])


def with_config(toy_model: Path, folder: Path, **changes) -> Path:
    raw = json.loads((toy_model / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").write_bytes((toy_model / "model.safetensors").read_bytes())
    return folder


@torch.no_grad()
def test_a_draft_equal_to_the_target_proposes_what_it_chooses(toy_model: Path, plain_kv) -> None:
    """Prefill, extend and draft steps, each at positions of the draft's convention, give the target's logits."""
    target = load_target(toy_model, torch.float64)
    draft = load_standalone(toy_model, target, torch.float64)
    wanted = target.logits(target(TOKENS, torch.arange(11), plain_kv()).hidden)
    kv, ends = plain_kv(), []
    for start, end in ((0, 5), (5, 8), (8, 9), (9, 10), (10, 11)):  # prefill of 4 and the sample, extend, branch
        positions = torch.arange(start, end) - draft.token_offset
        hidden = draft(TOKENS[start:end], torch.empty(end - start, 0), positions, kv)
        ends.append(draft.logits(hidden))
    torch.testing.assert_close(torch.cat(ends), wanted, atol=1e-12, rtol=0)
    assert draft.to_target_ids(wanted.argmax(-1)).equal(wanted.argmax(-1))


@torch.no_grad()
def test_it_reads_nothing_of_the_target(toy_model: Path, plain_kv) -> None:
    """What stands in for the target's hidden states does not change a proposal, and no layer is tapped."""
    target = load_target(toy_model, torch.float64)
    draft = load_standalone(toy_model, target, torch.float64)
    output = target(TOKENS, torch.arange(11), plain_kv(), draft.tap_layers)
    assert output.taps is None
    one = draft(TOKENS, draft.features(output), torch.arange(11), plain_kv())
    other = draft(TOKENS, output.hidden * 7, torch.arange(11), plain_kv())
    assert one.equal(other)


def test_its_shape_is_that_of_its_pool(toy_model: Path) -> None:
    """Layers, heads and the row convention are there for whoever makes the pool."""
    target = load_target(toy_model)
    draft = load_standalone(toy_model, target)
    assert (draft.kind, draft.token_offset, draft.ahead, draft.tap_layers) == ("standalone", 0, 1, ())
    assert (draft.num_layers, draft.num_kv_heads, draft.head_dim, draft.num_draft_vocab) == (8, 2, 8, 97)


def test_another_vocabulary_is_refused(toy_model: Path) -> None:
    """A draft with other tokens than the target has is refused with both sizes."""
    raw = json.loads((toy_model / "config.json").read_text()) | {"vocab_size": 96}
    with torch.device("meta"):
        target = Decoder(parse_config(raw))
    with pytest.raises(CheckpointError, match="standalone draft's vocab_size must be the target's, got 97 and 96: "):
        load_standalone(toy_model, target)


def test_a_shorter_context_is_stretched(toy_model: Path, tmp_path: Path) -> None:
    """A draft made for fewer positions than the target serves has angles for all of the target's."""
    target = load_target(toy_model)
    draft = load_standalone(with_config(toy_model, tmp_path, max_position_embeddings=16), target, torch.float64)
    cos, sin = draft.model.rotary(torch.tensor([511]))
    assert cos.shape == sin.shape == (1, 1, 8)
    assert cos.dtype == torch.float64
