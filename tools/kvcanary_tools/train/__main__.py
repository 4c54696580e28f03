"""`python -m kvcanary_tools.train STAGE`: corpus, tokenizer, target, generate, eagle, eagle3, export, evaluate."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from kvcanary_tools.train import corpus, evaluate, excerpts
from kvcanary_tools.train.data import Documents, tokenize_archive
from kvcanary_tools.train.dense import continue_greedily
from kvcanary_tools.train.export import export_head, export_target, write_json
from kvcanary_tools.train.heads import frozen_target, generate_rows, train_head
from kvcanary_tools.train.settings import FULL, TINY, Settings
from kvcanary_tools.train.target import held_out_loss, train_target
from kvcanary_tools.train.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer
from spec_engine.models.decoder import Decoder
from spec_engine.models.loader import load_draft, load_target

STAGES = ("corpus", "tokenizer", "target", "generate", "eagle", "eagle3", "export", "evaluate")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcanary_tools.train", description=__doc__)
    parser.add_argument("stage", choices=(*STAGES, "all"))
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="archive, checkpoints, curves")
    parser.add_argument("--out", type=Path, default=Path("build/train/embedded_model"), help="the exported folder")
    parser.add_argument("--stdlib", type=Path, help="library folder of the CPython release the manifest names")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--max-seconds", type=float, default=500.0, help="stop a training stage after this long; rerun to go on"
    )
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights, to try the pipeline")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a setting")
    options = parser.parse_args(arguments)
    run = Run(options)
    for stage in STAGES if options.stage == "all" else (options.stage,):
        started = time.monotonic()
        done = getattr(run, stage)()
        print(
            f"{stage}: {'done' if done else 'stopped, run it again to go on'} in {time.monotonic() - started:.1f} s",
            flush=True,
        )
        if not done:
            return 3
    return 0


class Run:
    """One training: a work folder, an output folder, settings; each stage reads what earlier ones wrote."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work, self.out = options.work, options.out
        self.device = torch.device(options.device)
        self.settings = _overridden(TINY if options.tiny else FULL, options.set)
        self.archive = self.work / "corpus.tar.gz"
        self.is_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32

    def corpus(self) -> bool:
        if not self.archive.is_file():
            files = corpus.read_folder(self.options.stdlib)
            corpus.verify_manifest(files)
            corpus.write_archive(files, self.archive)
        return True

    def tokenizer(self) -> bool:
        if not (self.work / "tokenizer" / "tokenizer.json").is_file():
            texts = [file.text for file in corpus.read_archive(self.archive) if not file.held_out and file.text]
            tokenizer = train_tokenizer(texts, 384 if self.options.tiny else VOCAB_SIZE)
            save_tokenizer(tokenizer, self.work / "tokenizer", self.settings.context_len)
        return True

    def target(self) -> bool:
        train, held_out = self._documents
        return train_target(
            self.settings,
            self._vocab_size(),
            train,
            held_out,
            self.work / "target.pt",
            self.device,
            self.options.max_seconds,
            say=_say,
        )

    def generate(self) -> bool:
        path = self.work / "generated.pt"
        if not path.is_file():
            torch.save(
                generate_rows(self.settings, self._frozen(compiled=False), self._documents[0]).to(torch.int16), path
            )
        return True

    def eagle(self) -> bool:
        return self._head("eagle")

    def eagle3(self) -> bool:
        return self._head("eagle3")

    def export(self) -> bool:
        export_target(self.work / "target.pt", self.settings, self._vocab_size(), self.out)
        save_tokenizer(self._tokenizer(), self.out, self.settings.context_len)
        target = load_target(self.out)
        for kind in ("eagle", "eagle3"):
            export_head(kind, self.work / f"{kind}.pt", self.settings, target, self.out / kind)
        chosen = excerpts.choose_excerpts(self.archive, self._tokenizer())
        write_json(self.out / "excerpts.json", chosen)
        curves = {}
        for name in ("target", "eagle", "eagle3"):
            state = torch.load(self.work / f"{name}.pt", map_location="cpu", weights_only=True)
            curves[name] = {"seconds": round(state["seconds"], 1), "steps": state["step"], "curve": state["curve"]}
        write_json(
            self.out / "training.json", {"settings": asdict(self.settings), "where": _where(self.device)} | curves
        )
        return True

    def evaluate(self) -> bool:
        result = self._evaluation()
        write_json(self.out / "evaluation.json", result)
        print(json.dumps({name: value for name, value in result.items() if name != "completions"}), flush=True)
        return True

    def _evaluation(self) -> dict[str, Any]:
        """Everything is measured on the exported folder, as a user will load it."""
        tokenizer, (train, held_out) = self._tokenizer(), self._documents
        target = load_target(self.out, torch.float32, self.device)
        samples = json.loads((self.out / "excerpts.json").read_text(encoding="utf-8"))[
            -self.settings.evaluated_prompts :
        ]
        prompts = [sample["prompt"] for sample in samples]
        ids = [
            torch.tensor(tokenizer.encode(prompt, add_special_tokens=False).ids, device=self.device)
            for prompt in prompts
        ]
        completions = [tokenizer.decode(row) for row in continue_greedily(target, ids, 64, torch.float32).tolist()]
        truth = [
            tokenizer.decode(tokenizer.encode(s["continuation"], add_special_tokens=False).ids[:64]) for s in samples
        ]
        result: dict[str, Any] = {
            "where": _where(self.device),
            "train_tokens": train.num_tokens,
            "held_out_tokens": held_out.num_tokens,
            "held_out_loss": held_out_loss(target, held_out),
            "completions_that_tokenize": evaluate.completion_rates(prompts, completions),
            "true_continuations_that_tokenize": evaluate.completion_rates(prompts, truth),
            "accepted_length": [],
            "completions": completions,
        }
        for kind in ("eagle", "eagle3"):
            head = load_draft(self.out / kind, target, torch.float32, self.device)
            for name, shape in (("tree", evaluate.TREE), ("chain", evaluate.CHAIN)):
                length = evaluate.accepted_length(target, head, ids, 128, shape, torch.float32)
                measured = {"head": kind, "shape": name, **asdict(shape), "tokens_per_verify": length}
                result["accepted_length"].append(measured)
        return result

    def _head(self, kind: str) -> bool:
        generated = torch.load(self.work / "generated.pt", weights_only=True).long()
        return train_head(
            kind,
            self.settings,
            self._frozen(compiled=self.is_gpu),
            self._documents[0],
            generated,
            self.work / f"{kind}.pt",
            self.options.max_seconds,
            say=_say,
        )

    def _frozen(self, compiled: bool) -> Decoder:
        return frozen_target(self.work / "target.pt", self.settings, self._vocab_size(), self.device, compiled)

    @cached_property
    def _documents(self) -> tuple[Documents, Documents]:
        return tokenize_archive(self.archive, self._tokenizer())

    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.work / "tokenizer" / "tokenizer.json"))

    def _vocab_size(self) -> int:
        return self._tokenizer().get_vocab_size()


def _overridden(settings: Settings, changes: list[str]) -> Settings:
    for change in changes:
        name, value = change.split("=", 1)
        settings = replace(settings, **{name: type(getattr(settings, name))(value)})
    return settings


def _where(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {package: version(package) for package in ("torch", "tokenizers", "safetensors", "numpy")}
    return {"device": name, "python": platform.python_version(), **versions}


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
