"""Requests as runner V1 keeps them, and the batch, whose rows move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class CachedRequestState:
    prompt_token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[list[int]]
    output_token_ids: list[int] = field(default_factory=list)
    lora_request: Any = None
    mm_features: list = field(default_factory=list)


class InputBatch:
    def __init__(self, max_num_reqs: int) -> None:
        self.req_ids, self.req_id_to_index = [], {}
        self.num_computed_tokens_cpu = np.zeros(max_num_reqs, dtype=np.int32)
        self.block_table = None

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)
