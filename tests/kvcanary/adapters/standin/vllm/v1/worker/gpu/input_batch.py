"""The batch of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


class InputBuffers:
    def __init__(self, max_num_reqs: int, max_num_tokens: int) -> None:
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int32)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32)


@dataclass
class InputBatch:
    req_ids: list[str]
    num_reqs: int
    num_reqs_after_padding: int
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_tokens: int
    num_tokens_after_padding: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
