"""The packaged model is small, complete, and has learned what Python looks like."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from spec_engine.models import load_draft, load_target
from spec_engine.models.embedded import EMBEDDED_MODEL, load_excerpts
from spec_engine.models.tokenizer import Tokenizer

MIB = 1 << 20


class GrowingKV:
    """One sequence: keys and values kept dense, a block of new tokens attends causally."""

    def __init__(self) -> None:
        self.stored = {}

    def attend(self, layer, q, k, v):
        if layer in self.stored:
            k, v = (torch.cat(pair) for pair in zip(self.stored[layer], (k, v), strict=True))
        self.stored[layer] = k, v
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


@pytest.fixture(scope="module")
def target():
    return load_target(EMBEDDED_MODEL)


@torch.no_grad()
def continued(target, ids: list[int], num_new: int) -> list[int]:
    kv, new = GrowingKV(), torch.tensor(ids)
    position, out = 0, []
    for _ in range(num_new):
        hidden = target(new, torch.arange(position, position + len(new)), kv).hidden
        position += len(new)
        new = target.logits(hidden[-1:]).argmax(-1)
        out.append(int(new))
    return out


def test_sizes() -> None:
    """Every shard stays below 15 MB, all weights together below 22 MB, and the target comes in two shards."""
    shards = {
        str(path.relative_to(EMBEDDED_MODEL)): path.stat().st_size for path in EMBEDDED_MODEL.rglob("*.safetensors")
    }
    assert set(shards) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "eagle/model.safetensors",
        "eagle3/model.safetensors",
    }
    assert max(shards.values()) <= 15_000_000
    assert sum(shards.values()) <= 22_000_000


def test_both_heads_fit(target) -> None:
    """EAGLE and EAGLE-3 heads load onto the target; EAGLE-3 has its own, smaller vocabulary."""
    eagle, eagle3 = (load_draft(EMBEDDED_MODEL / kind, target) for kind in ("eagle", "eagle3"))
    assert (eagle.kind, eagle.tap_layers) == ("eagle", ())
    assert (eagle3.kind, eagle3.tap_layers) == ("eagle3", (2, 12, 21))
    assert eagle3.num_draft_vocab < target.config.vocab_size
    ids = eagle3.to_target_ids(torch.arange(eagle3.num_draft_vocab))
    assert ids.unique().equal(ids)
    assert eagle3.t2d.nonzero().flatten().equal(ids)


def test_it_completes_code(target) -> None:
    """Greedy completion writes what nearly every Python file would have there, indentation included."""
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    prompt = "def write(self, data):\n    try:\n        self.file.write(data)\n    except OSError:\n"
    assert tokenizer.decode(continued(target, tokenizer.encode(prompt), 3)) == "        pass\n"


def test_it_predicts_held_out_code(target) -> None:
    """On held-out continuations the mean loss is that of a trained model (a blind one has 7.6 nats a token)."""
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    losses = []
    for excerpt in load_excerpts()[:3]:
        prompt, rest = tokenizer.encode(excerpt.prompt), tokenizer.encode(excerpt.continuation)[:100]
        ids = torch.tensor(prompt + rest)
        with torch.no_grad():
            hidden = target(ids[:-1], torch.arange(len(ids) - 1), GrowingKV()).hidden
            losses.append(F.cross_entropy(target.logits(hidden[len(prompt) - 1 :]), ids[len(prompt) :]))
    assert torch.stack(losses).mean() < 2.0


def test_excerpts_are_held_out_and_of_the_promised_length() -> None:
    """120 prompts of held-out files, each ending after a line; a prompt and its rest tokenize as one."""
    tokenizer, excerpts = Tokenizer.from_folder(EMBEDDED_MODEL), load_excerpts()
    assert len(excerpts) == 120
    for excerpt in excerpts:
        assert excerpt.sha256.startswith("0")
        assert excerpt.prompt.endswith("\n")
        prompt = tokenizer.encode(excerpt.prompt)
        assert 150 <= len(prompt) <= 400
        assert tokenizer.encode(excerpt.prompt + excerpt.continuation)[: len(prompt)] == prompt


def test_measured_figures_meet_the_bars() -> None:
    """Both recorded trainings reach the bars, and the second lands within 2 % of loss and 0.1 of accepted length."""
    runs = [json.loads((EMBEDDED_MODEL / name).read_text()) for name in ("evaluation.json", "evaluation_rerun.json")]
    lengths = []
    for run in runs:
        assert run["completions_that_tokenize"]["physical_lines"] >= 80
        by_name = {f"{row['head']} {row['shape']}": row["tokens_per_verify"] for row in run["accepted_length"]}
        assert by_name["eagle3 tree"] >= 3.0
        assert by_name["eagle3 tree"] > by_name["eagle3 chain"]
        lengths.append(by_name["eagle3 tree"])
    assert runs[1]["held_out_loss"] == pytest.approx(runs[0]["held_out_loss"], rel=0.02)
    assert lengths[1] == pytest.approx(lengths[0], abs=0.1)


def test_the_model_card_quotes_the_records() -> None:
    """The card's loss and accepted lengths are those that the scripts wrote."""
    card = (EMBEDDED_MODEL / "MODEL_CARD.md").read_text()
    for name in ("evaluation.json", "evaluation_rerun.json"):
        record = json.loads((EMBEDDED_MODEL / name).read_text())
        assert f"{record['held_out_loss']:.4f}" in card
        assert all(f"{row['tokens_per_verify']:.2f}" in card for row in record["accepted_length"])
