"""What kernels of gated delta nets are told of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class GDNAttentionMetadata:
    spec_sequence_masks: torch.Tensor | None
    spec_state_indices_tensor: torch.Tensor | None
    non_spec_state_indices_tensor: torch.Tensor | None
    num_accepted_tokens: torch.Tensor | None
