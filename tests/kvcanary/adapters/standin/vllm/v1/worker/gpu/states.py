"""What the runner knows of requests, by row."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor


class RequestState:
    def __init__(self, max_num_reqs: int, max_model_len: int) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.free = list(range(max_num_reqs))
        self.all_token_ids = StagedWriteTensor((max_num_reqs, max_model_len), torch.int32)
        self.total_len = StagedWriteTensor(max_num_reqs, torch.int32)
        self.num_computed_tokens = StagedWriteTensor(max_num_reqs, torch.int32)
        self.prefill_len = SimpleNamespace(np=np.zeros(max_num_reqs, dtype=np.int32))
        self.num_computed_tokens_np = np.zeros(max_num_reqs, dtype=np.int32)
