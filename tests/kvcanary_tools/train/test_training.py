"""The training pipeline on a few files and a few thousand weights: it learns, and it resumes exactly."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcanary_tools.train import heads, target
from kvcanary_tools.train.__main__ import main
from kvcanary_tools.train.corpus import SourceFile, write_archive
from kvcanary_tools.train.data import EpochBlocks, tokenize_archive
from kvcanary_tools.train.optimizer import learning_rate, orthogonalise
from kvcanary_tools.train.settings import TINY
from kvcanary_tools.train.tokenizer import train_tokenizer
from spec_engine.models import load_draft, load_target

VOCAB = 300
SETTINGS = replace(
    TINY,
    num_layers=3,
    context_len=128,
    step_tokens=512,
    lengths=((64, 0.5), (128, 0.5)),
    epochs=0.7,
    warmup_steps=3,
    draft_vocab_size=200,
    head_len=48,
    head_step_tokens=192,
    head_epochs=2.0,
)
CPU = torch.device("cpu")
MEASURED = [("eagle", "tree"), ("eagle", "chain"), ("eagle3", "tree"), ("eagle3", "chain")]


def made_up_file(number: int, sha256: str) -> SourceFile:
    """A module of small functions, each different, so that there is something to learn."""
    functions = [
        f"def step_{number}_{i}(value, other={i}):\n    total = value + {i * number}\n    return total * other\n\n\n"
        for i in range(40)
    ]
    data = "".join(functions).encode()
    return SourceFile(f"module_{number}.py", data, sha256)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory):
    """Twelve made-up modules: archive, tokenizer, training and held-out documents."""
    folder = tmp_path_factory.mktemp("corpus")
    files = [made_up_file(number, "f") for number in range(12)]
    write_archive(files, folder / "corpus.tar.gz")
    tokenizer = train_tokenizer([file.text or "" for file in files], VOCAB)
    train, held_out = tokenize_archive(folder / "corpus.tar.gz", tokenizer)
    return train, held_out if len(held_out) else train


def trained(corpus, checkpoint: Path, stops: tuple[int | None, ...]) -> dict:
    for stop in stops:
        done = target.train_target(SETTINGS, VOCAB, *corpus, checkpoint, CPU, stop_after=stop, say=lambda line: None)
        assert done == (stop is None)
    return torch.load(checkpoint, weights_only=True)


def test_the_target_learns_and_resumes_exactly(corpus, tmp_path: Path) -> None:
    """About 20 steps lower the loss; stopped after 7 and resumed they end in the very same weights."""
    straight = trained(corpus, tmp_path / "a.pt", (None,))
    resumed = trained(corpus, tmp_path / "b.pt", (7, None))
    blind = target.held_out_loss(target.new_target(SETTINGS, VOCAB), corpus[1], length=64)
    assert straight["step"] >= 15
    assert straight["curve"][-1]["held_out_loss"] < blind - 1.0
    assert all(torch.equal(straight["model"][name], resumed["model"][name]) for name in straight["model"])


def test_heads_learn_and_resume_exactly(corpus, tmp_path: Path) -> None:
    """Each head comes to agree with its target more often, and resumes to the same weights."""
    trained(corpus, tmp_path / "target.pt", (None,))
    frozen = heads.frozen_target(tmp_path / "target.pt", SETTINGS, VOCAB, CPU, compiled=False)
    generated = heads.generate_rows(SETTINGS, frozen, corpus[0])
    assert generated.shape == (SETTINGS.generated_prompts, SETTINGS.head_len + 1)
    for kind in ("eagle", "eagle3"):
        for name, stops in (("straight", (None,)), ("resumed", (5, None))):
            for stop in stops:
                path = tmp_path / f"{kind}-{name}.pt"
                heads.train_head(
                    kind, SETTINGS, frozen, corpus[0], generated, path, stop_after=stop, say=lambda line: None
                )
        straight, resumed = (
            torch.load(tmp_path / f"{kind}-{name}.pt", weights_only=True)["model"] for name in ("straight", "resumed")
        )
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)
        rows, early = generated[:8], heads.new_head(kind, SETTINGS, frozen, corpus[0])
        late = heads.new_head(kind, SETTINGS, frozen, corpus[0])
        late.load_state_dict(straight)
        losses = []
        for head in (early, late):
            head.requires_grad_(False)
            output, logits = heads.teacher(frozen, rows, head.tap_layers)
            losses.append(heads.head_loss(head, output, logits, rows, SETTINGS)[0].item())
        assert losses[1] < losses[0]


def test_the_command_runs_every_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`all` leads from an archive to a folder that loads, with records beside the weights; a rerun changes nothing."""
    work, out = tmp_path / "work", tmp_path / "out"
    files = [made_up_file(number, "f") for number in range(6)]
    write_archive([*files, held_out_file()], work / "corpus.tar.gz")
    arguments = ["all", "--tiny", "--device", "cpu", "--work", str(work), "--out", str(out)]
    for change in ("epochs=0.2", "head_epochs=0.5", "head_len=48", "context_len=1024", "step_tokens=1024"):
        arguments += ["--set", change]
    assert main(arguments) == 0
    model = load_target(out)
    for kind in ("eagle", "eagle3"):
        assert load_draft(out / kind, model).kind == kind
    record = json.loads((out / "evaluation.json").read_text())
    assert record["completions_that_tokenize"]["prompts"] == TINY.evaluated_prompts
    assert [(row["head"], row["shape"]) for row in record["accepted_length"]] == MEASURED
    assert all(row["tokens_per_verify"] >= 1.0 for row in record["accepted_length"])
    before = (out / "model-00001-of-00002.safetensors").read_bytes()
    assert main([*arguments[1:], "export"]) == 0
    assert (out / "model-00001-of-00002.safetensors").read_bytes() == before
    assert "evaluate: done" in capsys.readouterr().out


def held_out_file() -> SourceFile:
    """A made-up module whose sha256 starts with 0."""
    number = 100
    while not (file := made_up_file(number, "")).data or not _sha256(file.data).startswith("0"):
        number += 1
    return SourceFile(file.path, file.data, _sha256(file.data))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_an_epoch_shows_every_block_once(corpus) -> None:
    """Blocks of an epoch are distinct pieces of one stream, and the next epoch orders them anew."""
    train = corpus[0]
    first, again = (EpochBlocks(train, 64, seed, CPU) for seed in (1, 1))
    blocks = [first.take(step, 1)[0] for step in range(first.per_epoch)]
    assert len({tuple(block.tolist()) for block in blocks}) == first.per_epoch
    assert torch.equal(again.take(5, 1)[0], blocks[5])
    assert not torch.equal(first.take(first.per_epoch, 1)[0], blocks[0])


def test_learning_rate_rises_stays_and_falls() -> None:
    """Warmup reaches 1, the plateau stays there, the last step is near 0."""
    rates = [learning_rate(step, 100, 10, 0.5) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:50] == [1.0] * 41
    assert rates[-1] == pytest.approx(0.02)


@pytest.mark.parametrize("shape", [(3, 20, 8), (2, 8, 20), (1, 5, 5)])
def test_orthogonalise(shape: tuple[int, int, int]) -> None:
    """Singular values come out near one, tall, wide or square."""
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.4
