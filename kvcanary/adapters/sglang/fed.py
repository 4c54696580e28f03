"""What a forward of SGLang is fed, in tensors that stay where they are; and what a request says of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcanary.adapters.observed.inputs import Entries
from kvcanary.adapters.sglang.windows import MappedRows
from kvcanary_kernels.record.layout import Identity


@dataclass(frozen=True)
class FedForward:
    """What one forward writes.

    new:     by row, how many entries
    tokens:  [n];  lengths: [rows] entries of each row, new ones included; ends: the same on the host, if it knows
    """

    entries: Entries
    new: NDArray[np.integer]
    tokens: Tensor
    lengths: Tensor
    ends: Tensor | None


class Given:
    """Tensors that stay where they are, into which those of a batch are copied: launches are captured over them."""

    def __init__(self, rows: Tensor, most_tokens: int, slot_maps: Sequence[Tensor | None]) -> None:
        """rows: SGLang's table; slot_maps: by group, as a `Part` has it"""

        def new(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=rows.device)

        num_rows = len(rows)
        self.lengths, self.starts = new(num_rows), new(num_rows + 1)
        self.tokens, self.positions, own = new(most_tokens), new(most_tokens), new(most_tokens)
        mapped = [None if each is None else MappedRows(rows, each, most_tokens) for each in slot_maps]
        self.tables = [rows if each is None else each.table for each in mapped]
        self.slots = [own if each is None else each.slots for each in mapped]
        self.mapped = [each for each in mapped if each is not None]

    def fill(self, fed: FedForward, starts: Tensor) -> None:
        n, total, entries = len(fed.new), len(fed.entries.rows), fed.entries
        self.lengths[:n].copy_(fed.lengths)
        self.starts[n:] = total
        self.starts[: n + 1].copy_(starts)
        self.tokens[:total].copy_(fed.tokens)
        self.positions[:total].copy_(entries.positions)
        self.slots[0][:total].copy_(entries.slots)


def tokens_of(request: Any, start: int, end: int | None = None) -> list[int] | None:
    """Tokens [start, end) of a request as far as the host has them; None: it was given embeddings."""
    if request.input_embeds is not None:
        return None
    prompt, answer = request.origin_input_ids, request.output_ids
    behind = None if end is None else max(end - len(prompt), 0)
    return [*prompt[start:end], *answer[max(start - len(prompt), 0) : behind]]


def are_named(request: Any) -> bool:
    """Whether every place of an image, or another content, in the prompt holds a name that SGLang made of it."""
    contents = getattr(getattr(request, "multimodal_inputs", None), "mm_items", None) or ()
    return all(
        set(request.origin_input_ids[start : end + 1]) <= set(item.padding_values())
        for item in contents
        for start, end in item.offsets or ()
    )


def identity_of(request: Any) -> Identity:
    """What makes equal tokens mean other K and V: the adapter, and what the client said or gave in place of tokens.

    Nothing of a request with embeddings of its own is another's; the next turn of a session goes on from it.
    """
    adapter, said, embeddings, session = (
        getattr(request, name, None) for name in ("lora_id", "extra_key", "positional_embed_overrides", "session")
    )
    alone = "" if embeddings is None or session is not None else f", embeddings of {request.rid}"
    return Identity(f"{said or ''}{alone}", str(adapter or ""))
