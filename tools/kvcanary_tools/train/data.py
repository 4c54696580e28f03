"""Token streams: the text of step n is a function of seed and n alone, so training resumes exactly."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvcanary_tools.train.corpus import read_archive


class Documents:
    """Tokenized files of one part of the corpus, each beginning with the end-of-text token."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
        self.tokens, self.offsets = tokens, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def stream(self, order: np.ndarray) -> np.ndarray:
        """All documents, one after another, in the given order."""
        return np.concatenate([self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in order])


def tokenize_archive(archive: Path, tokenizer: Tokenizer) -> tuple[Documents, Documents]:
    """The training and the held-out documents."""
    parts: tuple[list[str], list[str]] = ([], [])
    for file in read_archive(archive):
        if file.text is not None:
            parts[file.held_out].append(file.text)
    return _documents(parts[0], tokenizer), _documents(parts[1], tokenizer)


class EpochBlocks:
    """Blocks of `block_len` + 1 tokens: every epoch files are shuffled into a stream, which is cut and shuffled."""

    def __init__(self, documents: Documents, block_len: int, seed: int, device: torch.device) -> None:
        self.documents, self.block_len, self.seed, self.device = documents, block_len, seed, device
        self.per_epoch = (documents.num_tokens - 1) // block_len
        self.epoch = -1

    def take(self, step: int, count: int) -> Tensor:
        """The `count` blocks of training step `step`, [count, block_len + 1]."""
        picks = []
        for number in range(step * count, (step + 1) * count):
            epoch, index = divmod(number, self.per_epoch)
            self._enter(epoch)
            picks.append(self.blocks[self.order[index]])
        return torch.stack(picks).long()

    def _enter(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        shuffle = np.random.default_rng((self.seed, epoch))
        stream = torch.from_numpy(self.documents.stream(shuffle.permutation(len(self.documents))).astype(np.int32))
        starts = torch.arange(self.per_epoch) * self.block_len
        self.blocks = stream.to(self.device).unfold(0, self.block_len + 1, self.block_len)[: len(starts)]
        self.order = shuffle.permutation(self.per_epoch)


def step_length(seed: int, step: int, lengths: tuple[tuple[int, float], ...]) -> int:
    """The sequence length of a step, drawn with the given weights."""
    choices, weights = zip(*lengths, strict=True)
    return random.Random(f"{seed}/{step}").choices(choices, weights)[0]


def _documents(texts: list[str], tokenizer: Tokenizer) -> Documents:
    ids = [[0, *encoding.ids] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    offsets = np.cumsum([0] + [len(document) for document in ids])
    tokens = np.fromiter((token for document in ids for token in document), dtype=np.int32, count=offsets[-1])
    return Documents(tokens, offsets)
