"""A small ordinary decoder as the draft model, with the interface of the EAGLE heads.

It reads tokens alone: slot p of its pool holds token p at position p, where a head's holds token p+1. So with S
committed tokens and the bonus token S known, its rows are tokens 0..S, one more than a head's:

    prefill of L prompt tokens   writes tokens 0..L at positions 0..L (the last is the token just sampled)
    extend from S to S'          writes tokens S+1..S' at positions S+1..S'
    the branches of a step       begin at position S+1

Both kinds in one rule: rows of the draft pool are tokens token_offset..S, token t at position t - token_offset. A
prefill and a step's reserve therefore have to own `ahead` slots more.
"""

from __future__ import annotations

from torch import Tensor, nn

from spec_engine.models.config import CheckpointError
from spec_engine.models.decoder import Decoder, DecoderOutput, KVAccess, RotaryTable


class Standalone(nn.Module):
    kind = "standalone"
    token_offset, ahead = 0, 1  # slot p holds token p, so there is one row more than committed tokens

    def __init__(self, model: Decoder, target: Decoder) -> None:
        super().__init__()
        config, theirs = model.config, target.config
        if config.vocab_size != theirs.vocab_size:
            raise CheckpointError(
                "a standalone draft's vocab_size must be the target's, "
                f"got {config.vocab_size} and {theirs.vocab_size}: take a draft of the target's family"
            )
        if config.delta is not None:
            raise CheckpointError(
                f"a standalone draft must have attention in all layers, got {config.architecture}: nobody keeps the "
                "states of its others"
            )
        self.config = config
        self.num_layers, self.num_kv_heads, self.head_dim = config.num_layers, config.num_kv_heads, config.head_dim
        self.tap_layers: tuple[int, ...] = ()
        self.num_draft_vocab = config.vocab_size
        self.model = model
        if config.max_position_embeddings < theirs.max_position_embeddings:
            # Past its own context a draft guesses worse, which costs acceptance and nothing else.
            table = RotaryTable(config.rope, config.head_dim, theirs.max_position_embeddings, config.rotary_dim)
            model.rotary = table.to(model.embed_weight.device, model.embed_weight.dtype)

    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, kv: KVAccess) -> Tensor:
        """Tokens at their own positions; `hidden` of any width is not read."""
        output: DecoderOutput = self.model(input_ids, positions, kv)
        return output.hidden

    def features(self, output: DecoderOutput) -> Tensor:
        return output.hidden[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        return ids
