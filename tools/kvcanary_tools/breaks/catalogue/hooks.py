"""Forwards without hooks, and what is wrong of position and token in one of them."""

# Edits are lines of source and stay as long as these.
# ruff: noqa: E501

from __future__ import annotations

from kvcanary_tools.breaks.broken import Break, Edit
from kvcanary_tools.breaks.cases import Case
from kvcanary_tools.breaks.catalogue.traffic import CHAIN, CHAIN_KNOWN, CHUNKED, OVERLAP, PLAIN, TREE

BREAKS = (
    Break(
        "hook_skipped_in_substep",
        "Draft forward 1 runs without hooks",
        (
            Edit(
                "spec_engine.step.hooks",
                "substep = self.canary.forward(batch.kind, batch.index, self.pool.name, puts=True)",
                "substep = None if (batch.kind, batch.index) == ('draft', 1) else self.canary.forward(batch.kind, batch.index, self.pool.name, puts=True)",
            ),
        ),
        (
            Case(topk=2, num_steps=4, nodes=8),
            CHAIN,
        ),
        ends=("H1",),
        cause="hooks",
        says="draft[1]",
    ),
    Break(
        "hook_skipped_in_verify",
        "Every third verify runs without hooks",
        (
            Edit(
                "spec_engine.step.hooks",
                "if self.canary is not None:\n            substep = self.canary",
                "self._n = getattr(self, '_n', 0) + (batch.kind == 'verify')\n        if self.canary is not None and not (batch.kind == 'verify' and self._n % 3 == 0):\n            substep = self.canary",
            ),
        ),
        (
            TREE,
            OVERLAP,
        ),
        ends=("H1",),
        cause="hooks",
        says="verify",
    ),
    Break(
        "hook_skipped_in_extend",
        "The extend runs without hooks",
        (
            Edit(
                "spec_engine.step.hooks",
                "if self.canary is not None:\n            substep = self.canary",
                "if self.canary is not None and batch.kind != 'extend':\n            substep = self.canary",
            ),
        ),
        (
            TREE,
            CHAIN,
        ),
        ends=("H1",),
        cause="hooks",
        says="extend",
    ),
    Break(
        "hook_skipped_in_prefill_chunk",
        "The draft's forward of a prompt chunk runs without hooks",
        (
            Edit(
                "spec_engine.step.hooks",
                "if self.canary is not None:\n            substep = self.canary",
                "if self.canary is not None and not (batch.kind == 'prefill' and self.pool.name == 'draft'):\n            substep = self.canary",
            ),
        ),
        (CHUNKED,),
        ends=("H1",),
        cause="hooks",
        says="prefill",
    ),
    Break(
        "hook_skipped_in_decode",
        "Every fifth decode runs without hooks",
        (
            Edit(
                "spec_engine.step.hooks",
                "if self.canary is not None:\n            substep = self.canary",
                "self._n = getattr(self, '_n', 0) + (batch.kind == 'decode')\n        if self.canary is not None and not (batch.kind == 'decode' and self._n % 5 == 0):\n            substep = self.canary",
            ),
        ),
        (PLAIN,),
        ends=("H1",),
        cause="hooks",
        says="decode",
    ),
    Break(
        "hook_skipped_in_last_draft",
        "The last draft forward of each step runs without hooks",
        (
            Edit(
                "spec_engine.step.hooks",
                "if self.canary is not None:\n            substep = self.canary",
                "if self.canary is not None and (batch.kind, batch.index) != ('draft', 2):\n            substep = self.canary",
            ),
        ),
        (
            Case(topk=2, num_steps=4, nodes=8),
            CHAIN_KNOWN,
        ),
        ends=("H1",),
        cause="hooks",
        says="draft[2]",
    ),
    Break(
        "captured_hook_missing",
        "A captured program is built without hooks in draft forward 1",
        (
            Edit(
                "spec_engine.graphs.hooks",
                "if self.canary is None:\n            return Hooked(forward, rows, out, workspace, None)",
                "if self.canary is None or (forward.kind, forward.index) == ('draft', 1):\n            return Hooked(forward, rows, out, workspace, None)",
            ),
        ),
        (Case(topk=2, num_steps=4, nodes=8, engine={"graphs": "on"}),),
        ends=("MissingHooksError",),
    ),
    Break(
        "close_skipped",
        "The hooks of draft forward 1 are opened and not closed",
        (
            Edit(
                "spec_engine.step.hooks",
                "if substep is not None:\n            substep.close()",
                "if substep is not None and (batch.kind, batch.index) != ('draft', 1):\n            substep.close()",
            ),
        ),
        (Case(topk=2, num_steps=4, nodes=8),),
        ends=("HookOrderError",),
    ),
    Break(
        "substep_numbers_equal",
        "All draft forwards of a step carry number 0",
        (
            Edit(
                "spec_engine.step.hooks",
                "batch.kind, batch.index, self.pool.name, puts=True",
                "batch.kind, 0, self.pool.name, puts=True",
            ),
        ),
        (
            Case(topk=2, num_steps=4, nodes=8),
            CHAIN,
        ),
        ends=("H1", "H2", "HookOrderError", "R10"),
        cause="hooks",
    ),
    Break(
        "offset_in_one_substep",
        "Positions of draft forward 1 are one too far",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "positions=row_positions(batch.lens_tensor, step, topk),",
                "positions=row_positions(batch.lens_tensor, step + (step == 1), topk),",
            ),
        ),
        (
            Case(topk=2, num_steps=4, nodes=8),
            CHAIN,
            CHAIN_KNOWN,
        ),
        ends=("W5",),
        cause=("draft", "lengths", "order"),
    ),
    Break(
        "positions_not_raised",
        "Draft forward 1 has the positions of forward 0",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "positions=row_positions(batch.lens_tensor, step, topk),",
                "positions=row_positions(batch.lens_tensor, step - (step == 1), topk),",
            ),
        ),
        (
            Case(topk=2, num_steps=4, nodes=8),
            CHAIN,
        ),
        ends=("W5",),
        cause=("draft", "lengths", "order"),
    ),
    Break(
        "token_offset_of_target",
        "The draft pool is announced with the token offset of a target",
        (Edit("spec_engine.assembly", "head.token_offset, head.ahead)", "0, head.ahead)"),),
        (TREE,),
        ends=("W6",),
        cause=("identity", "draft", "hooks"),
        says="offset",
    ),
    Break(
        "standalone_with_offset",
        "The pool of a draft model of its own is announced with the token offset of a head",
        (Edit("spec_engine.assembly", "head.token_offset, head.ahead)", "1, head.ahead)"),),
        (CHAIN,),
        ends=("W6",),
        cause=("identity", "draft", "hooks"),
        says="offset",
    ),
    Break(
        "rotation_over_the_batch",
        "Input ids of the draft's prefill are shifted over the whole batch, not prompt by prompt",
        (
            Edit(
                "spec_engine.step.runner",
                "fed = to_device([token for part in following for token in part], self.device)",
                "fed = to_device([token for part in following for token in part], self.device); own = torch.cat([torch.tensor(c.tokens) for c in chunks]); fed = torch.cat((own[1:], fed[-1:])) if len(fed) == len(own) else fed",
            ),
        ),
        (
            TREE,
            CHUNKED,
        ),
        ends=("R6", "W6"),
        cause=("draft", "identity", "order"),
    ),
    Break(
        "rotation_wrong_at_chunk_end",
        "The last entry of a chunk is fed the chunk's first token, behind the host's check",
        (
            Edit(
                "spec_engine.step.runner",
                "check_chunk_feed(chunk.request.request_id, chunk.start - count, part, chunk.request.tokens)",
                "part.__setitem__(-1, chunk.tokens[0]) if not chunk.samples and not count else None",
            ),
        ),
        (CHUNKED,),
        ends=("W6",),
        cause=("draft", "order"),
    ),
    Break(
        "rotation_wrong_host_sees",
        "The last entry of a chunk is fed the chunk's first token",
        (
            Edit(
                "spec_engine.step.runner",
                "return chunk.request.tokens[chunk.start + 1 : chunk.end + 1] + sampled",
                "return (chunk.tokens[1:] + [chunk.tokens[0]]) if not sampled else chunk.tokens[1:] + sampled",
            ),
        ),
        (CHUNKED,),
        ends=("ChunkError",),
        off=("ChunkError",),
    ),
)
