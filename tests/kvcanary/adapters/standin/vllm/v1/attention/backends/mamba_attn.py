"""What kernels of Mamba are told of a batch, whose rows that decode lie in front."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class BaseMambaAttentionMetadata:
    num_decodes: int
    state_indices_tensor_d: torch.Tensor
    state_indices_tensor_p: torch.Tensor
    num_accepted_tokens: torch.Tensor | None
