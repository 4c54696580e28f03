"""A target without weights: it chooses what the oracle says, as long as attention brings it the right rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_engine.mock.oracle import TokenOracle
from spec_engine.mock.probe import check_dtype, mock_config, probe
from spec_engine.models.decoder import DecoderOutput, KVAccess

HIDDEN_SIZE = 4  # request, committed length, draft depth, whether all was read right
SURE = 50.0  # logit of what is chosen; the others have 0


class MockModel(nn.Module):
    """The interface of a Decoder. The request is the prompt's first token, which attention fetches from position 0.

    After a forward that read a wrong, missing or doubled row, in any layer, it chooses the token after the oracle's.
    A hidden state [4] says: of this request, `committed` tokens stand behind this one's end, depth 0, read right.
    """

    def __init__(
        self,
        oracle: TokenOracle,
        *,
        num_layers: int = 2,
        max_positions: int = 4096,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        self.oracle, self.dtype = oracle, dtype
        self.config = mock_config(oracle.vocab_size, num_layers, max_positions, HIDDEN_SIZE)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVAccess,
        tap_layers: tuple[int, ...] = (),
        wanted: Tensor | None = None,
    ) -> DecoderOutput:
        requests, intact = probe(self.config, self.dtype, input_ids, positions, kv)
        hidden = torch.stack((requests, positions + 1, torch.zeros_like(positions), intact), -1).to(self.dtype)
        taps = hidden.repeat(1, len(tap_layers)) if tap_layers else None
        return DecoderOutput(hidden if wanted is None else hidden[wanted], taps)

    def logits(self, hidden: Tensor) -> Tensor:
        requests, positions, _, intact = hidden.long().unbind(-1)
        chosen = (self.oracle.tokens(requests, positions) + 1 - intact) % self.oracle.vocab_size
        return F.one_hot(chosen, self.oracle.vocab_size).to(self.dtype) * SURE
