"""Branches, copies of tails and ancestors, trees and chains."""

# Edits are lines of source and stay as long as these.
# ruff: noqa: E501

from __future__ import annotations

from kvcanary_tools.breaks.broken import Break, Edit
from kvcanary_tools.breaks.cases import Case
from kvcanary_tools.breaks.catalogue.traffic import ADAPTIVE, CHAIN, GRAPH, OVERLAP, TREE, TREE_PAGED, TREE_PAGED_KNOWN

BREAKS = (
    Break(
        "tail_copy_first_branch_only",
        "The tail of the prefix is copied for branch 1 alone",
        (
            Edit(
                "spec_engine.drafting.layout",
                "moved = stride[:, None, None] * branches[:, None]",
                "moved = stride[:, None, None] * (branches * (branches < 2))[:, None]",
            ),
        ),
        (
            TREE_PAGED,
            TREE_PAGED_KNOWN,
        ),
        ends=("R12",),
        cause=("draft", "transfer"),
        says="tail",
    ),
    Break(
        "tail_copy_one_short",
        "The copied tail is one token short",
        (Edit("spec_engine.drafting.layout", "(offsets < tail[:, None])", "(offsets < tail[:, None] - 1)"),),
        (
            TREE_PAGED,
            TREE_PAGED_KNOWN,
        ),
        ends=("R12",),
        cause=("draft", "transfer"),
        says="tail",
    ),
    Break(
        "tail_copy_wrong_layer",
        "Copies within the draft pool land one layer further",
        (
            Edit(
                "spec_engine.memory.pools.pool",
                "part[:, destination] = part[:, source]",
                "part[:, destination] = part[:, source].roll(1, 0) if self.name == 'draft' else part[:, source]",
            ),
        ),
        (TREE_PAGED,),
        ends=("T1",),
        cause=("transfer", "addressing"),
        says="layout",
    ),
    Break(
        "tail_copy_first_layer_only",
        "Copies within the draft pool leave out all layers but the first",
        (
            Edit(
                "spec_engine.memory.pools.pool",
                "part[:, destination] = part[:, source]",
                "part[:1, destination] = part[:1, source]",
            ),
        ),
        (
            TREE_PAGED,
            TREE,
        ),
        ends=("T1",),
        cause=("transfer", "draft"),
    ),
    Break(
        "tail_copy_after_forward",
        "Tails are copied one step late",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "self.forwards.move(tails.flatten(), copies.flatten())",
                "late = getattr(self, '_late', None); self._late = (tails.flatten(), copies.flatten()); (self.forwards.move(*late) if late is not None else None)",
            ),
        ),
        (TREE_PAGED,),
        ends=("R12", "T1"),
        cause=("draft", "transfer", "order"),
        says="tail",
    ),
    Break(
        "branches_swapped",
        "Branches 0 and 1 exchange their pages behind the copies of tails",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "check_branch_shape(slots.shape, len(batch), self.topk, num_steps)",
                "slots = slots[:, [1, 0, *range(2, self.topk)]]; check_branch_shape(slots.shape, len(batch), self.topk, num_steps)",
            ),
        ),
        (
            TREE_PAGED,
            Case(topk=3, num_steps=3, draft="self"),
        ),
        silent="copies make both orders equal",
    ),
    Break(
        "branch_page_of_neighbour",
        "The last branch lies on pages of the request before it",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "check_branch_shape(slots.shape, len(batch), self.topk, num_steps)",
                "slots[1:, -1] = slots[:-1, -1].clone(); check_branch_shape(slots.shape, len(batch), self.topk, num_steps)",
            ),
        ),
        (
            TREE,
            OVERLAP,
            TREE_PAGED,
        ),
        ends=("W2", "W4", "W8", "R8"),
        cause=("addressing", "draft", "bounds", "graphs"),
    ),
    Break(
        "prefix_of_neighbour",
        "Branches read the prefix of the next request",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "return [table[row, :length].expand(self.topk, -1) for row, length in lens]",
                "return [table[lens[(i + 1) % len(lens)][0], :length].expand(self.topk, -1) for i, (row, length) in enumerate(lens)]",
            ),
        ),
        (
            TREE,
            CHAIN,
        ),
        ends=("R8", "R6", "R4", "R10"),
        cause=("addressing", "identity"),
    ),
    Break(
        "branch_prefix_short",
        "Branches read their first entry twice and the last one not at all",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "return [table[row, :length].expand(self.topk, -1) for row, length in lens]",
                "return [torch.cat((table[row, :1], table[row, :length - 1])).expand(self.topk, -1) for row, length in lens]",
            ),
        ),
        (TREE,),
        ends=("R4",),
        cause=("addressing", "lengths"),
    ),
    Break(
        "ancestors_not_regathered",
        "From the third forward on survivors read the path of those before them",
        (
            Edit(
                "spec_engine.drafting.growing",
                "path = path.gather(1, parents[:, :, None].expand(-1, -1, step))",
                "path = path.gather(1, parents[:, :, None].expand(-1, -1, step)) if step < 2 else path",
            ),
        ),
        (
            Case(topk=3, num_steps=5, nodes=10, draft="stranger"),
            Case(topk=3, num_steps=5, nodes=10, draft="stranger", engine={"graphs": "on"}),
        ),
        ends=("R5",),
        cause="draft",
    ),
    Break(
        "chain_never_regathered",
        "Survivors read the entries of their own column in every forward",
        (
            Edit(
                "spec_engine.drafting.growing",
                "path = path.gather(1, parents[:, :, None].expand(-1, -1, step))",
                "path = path.expand(-1, slots.shape[1], -1)",
            ),
        ),
        (
            Case(topk=4, num_steps=5, nodes=16, draft="self", new=40),
            Case(topk=4, num_steps=5, nodes=16, draft="self", new=40, engine={"graphs": "on"}),
        ),
        ends=("R5",),
        cause="draft",
    ),
    Break(
        "ancestor_copies_in_place",
        "Entries of ancestors are copied one after another, over sources that are read later",
        (
            Edit(
                "spec_engine.memory.pools.pool",
                "part[:, destination] = part[:, source]",
                "[part.__setitem__((slice(None), d), part[:, s]) for s, d in zip(source.tolist(), destination.tolist())]",
            ),
        ),
        (
            Case(topk=3, num_steps=5, nodes=10, draft="stranger", engine={"attention_backend": "paged"}),
            Case(topk=3, num_steps=4, nodes=10),
        ),
        ends=("T1",),
        cause=("transfer", "draft"),
    ),
    Break(
        "chain_parents_off_by_one",
        "Parents of chain constants lag by one",
        (
            Edit(
                "spec_engine.drafting.chain",
                "(drafts[: parent_list_width(1, num_steps)] - 1)",
                "(drafts[: parent_list_width(1, num_steps)] - 2)",
            ),
        ),
        (
            CHAIN,
            Case(topk=1, num_steps=4, draft="self", engine={"graphs": "on"}),
            ADAPTIVE,
        ),
        ends=("ChainConstantsError",),
        off=("ChainConstantsError",),
    ),
    Break(
        "chain_mask_of_shorter",
        "The mask of a chain is that of a shorter one",
        (
            Edit(
                "spec_engine.drafting.chain",
                "return Tree(tokens, self._shape.parents[:bs], self._shape.depths[:bs], self._shape.mask[:bs])",
                "mask = self._shape.mask[:bs].clone(); mask[:, 3:, :3] = False; return Tree(tokens, self._shape.parents[:bs], self._shape.depths[:bs], mask)",
            ),
        ),
        (
            CHAIN,
            ADAPTIVE,
            Case(topk=1, num_steps=4, draft="self", engine={"graphs": "on"}),
        ),
        ends=("ChainConstantsError",),
        off=("ChainConstantsError",),
    ),
    Break(
        "chain_parents_of_another_length",
        "Parents and mask of a chain are those of another length",
        (
            Edit(
                "spec_engine.drafting.chain",
                "self._shape = build_tree(blank, self.selected, self.parent_list, 1, num_steps)",
                "self._shape = build_tree(blank, self.selected, self.parent_list, 1, num_steps); self._shape.parents[:, 2:] -= 1",
            ),
        ),
        (
            CHAIN,
            ADAPTIVE,
        ),
        ends=("ChainConstantsError",),
        off=("ChainConstantsError",),
    ),
    Break(
        "chain_fallback",
        "Chain constants hold two requests, larger batches take the general path",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "return {steps: ChainConstants(max_bs, steps, steps + 1, device) for steps in step_choices}",
                "return {steps: ChainConstants(2, steps, steps + 1, device) for steps in step_choices}",
            ),
        ),
        (
            CHAIN,
            ADAPTIVE,
            Case(topk=1, num_steps=4, draft="self", engine={"graphs": "on"}),
            Case(topk=1, num_steps=4, draft="self", engine={"graphs": "on", "schedule": "overlap"}),
        ),
        silent="the general path gives the same chains",
    ),
    Break(
        "adaptive_nodes_of_before",
        "A tree has as many nodes as that of the step before, over a change of the number of steps",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "return growth.finish(batch.bonus, num_steps + 1 if self.topk == 1 else self.num_draft_tokens)",
                "before = getattr(self, '_T', num_steps); self._T = num_steps; return growth.finish(batch.bonus, before + 1 if self.topk == 1 else self.num_draft_tokens)",
            ),
        ),
        (Case(topk=1, num_steps=5, new=70, engine={"adaptive_steps": {1: [1, 3, 5]}}),),
        ends=("ChainConstantsError",),
        off=("ChainConstantsError",),
    ),
    Break(
        "adaptive_stale_constants",
        "After a change of the number of steps chains have the constants of the start",
        (
            Edit(
                "spec_engine.drafting.chain",
                "    def tree(self, tokens: Tensor) -> Tree:",
                "    def tree(self, tokens: Tensor) -> Tree:\n        global _first\n        _first = globals().get('_first', self)\n        n, bs = tokens.shape[1], len(tokens)\n        if _first is not self and n <= _first._shape.mask.shape[1]:\n            s = _first._shape\n            return Tree(tokens, s.parents[:bs, -n:], s.depths[:bs, -n:], s.mask[:bs, -n:, -n:])\n        return self._tree(tokens)\n\n    def _tree(self, tokens: Tensor) -> Tree:",
            ),
        ),
        (Case(topk=1, num_steps=5, new=70, engine={"adaptive_steps": {1: [1, 3, 5]}}),),
        ends=("ChainConstantsError",),
        off=("ChainConstantsError",),
    ),
    Break(
        "parent_list_out_of_range",
        "One entry of a parent list is far out of range",
        (
            Edit(
                "spec_engine.drafting.tree",
                "parent_list = torch.cat((root, *self._parents), 1).to(parents_dtype(self.topk))",
                "parent_list = torch.cat((root, *self._parents), 1).to(parents_dtype(self.topk)); parent_list[:, 1:2] = 10**6",
            ),
        ),
        (Case(draft="self", topk=2, num_steps=3),),
        ends=("TreeShapeError",),
        off=("TreeShapeError",),
    ),
    Break(
        "chosen_out_of_range",
        "One of the chosen candidates is out of range",
        (
            Edit(
                "spec_engine.drafting.tree",
                "chosen = likeliest.sort(dim=-1).values",
                "chosen = likeliest.sort(dim=-1).values; chosen[:, -1] = chosen[:, -1] + scores.shape[1]",
            ),
        ),
        (Case(draft="self", topk=2, num_steps=3),),
        ends=("TreeShapeError",),
        off=("TreeShapeError",),
    ),
    Break(
        "tree_mask_without_root_path",
        "Nodes do not see their grandparents",
        (
            Edit(
                "spec_engine.drafting.tree",
                "return torch.linalg.matrix_power(step.double(), max_depth) > 0",
                "return torch.linalg.matrix_power(step.double(), min(max_depth, 1)) > 0",
            ),
        ),
        (
            TREE,
            CHAIN,
            GRAPH,
        ),
        ends=("W5", "ChainConstantsError"),
        off=("TreeShapeError", "ChainConstantsError"),
        cause="draft",
    ),
)
