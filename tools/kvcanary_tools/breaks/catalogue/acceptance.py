"""Acceptance, commit, compaction, and the extend behind them."""

# Edits are lines of source and stay as long as these.
# ruff: noqa: E501

from __future__ import annotations

from kvcanary_tools.breaks.broken import Break, Edit
from kvcanary_tools.breaks.cases import Case
from kvcanary_tools.breaks.catalogue.traffic import CHAIN, CHAIN_KNOWN, GRAPH, OVERLAP, TREE, TREE64

BREAKS = (
    Break(
        "committed_one_more_on_device",
        "The device commits one entry more than was accepted wherever something was rejected",
        (
            Edit(
                "spec_engine.step.runner",
                "self._publish(batch, lens, [new[-1] for new in tokens])",
                "self._publish(batch, [n + (len(t) <= 2) for n, t in zip(lens, tokens)], [new[-1] for new in tokens])",
            ),
        ),
        (
            TREE,
            CHAIN_KNOWN,
            OVERLAP,
        ),
        ends=("RelayError",),
        off=("RelayError",),
    ),
    Break(
        "committed_one_less_on_device",
        "The device commits one entry less after a full acceptance",
        (
            Edit(
                "spec_engine.step.runner",
                "self._publish(batch, lens, [new[-1] for new in tokens])",
                "self._publish(batch, [n - (len(t) > 3) for n, t in zip(lens, tokens)], [new[-1] for new in tokens])",
            ),
        ),
        (
            TREE,
            CHAIN,
        ),
        ends=("RelayError",),
        off=("RelayError",),
    ),
    Break(
        "committed_one_more_always",
        "Host and device commit one entry more than was accepted",
        (
            Edit(
                "spec_engine.step.runner",
                "lens = [length + len(path.nodes) for length, path in zip(batch.lens, accepted, strict=True)]",
                "lens = [length + len(path.nodes) + 1 for length, path in zip(batch.lens, accepted, strict=True)]",
            ),
        ),
        (
            TREE,
            OVERLAP,
            CHAIN_KNOWN,
        ),
        ends=("CommitError", "RelayError"),
        off=("CommitError", "RelayError"),
    ),
    Break(
        "committed_rejected_kept",
        "Rejected nodes count as committed",
        (
            Edit(
                "spec_engine.step.runner",
                "lens = [length + len(path.nodes) for length, path in zip(batch.lens, accepted, strict=True)]",
                "lens = [length + windows_n for length, windows_n in zip(batch.lens, [self.drafter.num_draft_tokens if self.drafter else 1] * len(batch.lens))]",
            ),
        ),
        (
            TREE,
            Case(topk=1, num_steps=4, engine={"schedule": "overlap"}),
        ),
        ends=("CommitError", "RelayError"),
        off=("CommitError", "RelayError"),
    ),
    Break(
        "bonus_is_first_accepted",
        "The next step begins with the first accepted token, not the bonus",
        (
            Edit(
                "spec_engine.step.runner",
                "self._publish(batch, lens, [new[-1] for new in tokens])",
                "self._publish(batch, lens, [new[0] for new in tokens])",
            ),
        ),
        (
            TREE,
            CHAIN_KNOWN,
        ),
        ends=("W6",),
        off=("AcceptanceError",),
        cause=("order", "identity"),
    ),
    Break(
        "accepts_a_wrong_draft",
        "The walk takes the first child whatever the target chose",
        (
            Edit(
                "spec_engine.acceptance.walk",
                "if above[node] == end and own[node] == after[end] and len(path) <= num_steps:",
                "if above[node] == end and (own[node] == after[end] or len(path) == 1) and len(path) <= num_steps:",
            ),
        ),
        (
            TREE,
            CHAIN_KNOWN,
            GRAPH,
        ),
        ends=("AcceptanceError",),
        off=("AcceptanceError",),
    ),
    Break(
        "compaction_one_place_off",
        "Accepted nodes move one place too far",
        (
            Edit(
                "spec_engine.step.runner",
                "source, destination = windows[rows, nodes], windows[rows, places]",
                "source, destination = windows[rows, nodes], windows[rows, (places + 1).clamp_max(windows.shape[1] - 1)]",
            ),
        ),
        (
            TREE,
            TREE64,
        ),
        ends=("R6", "R4"),
        cause=("draft", "transfer"),
    ),
    Break(
        "compaction_undeclared",
        "Accepted nodes are moved, and the canary is not told",
        (
            Edit(
                "spec_engine.step.hooks",
                "with self.canary.move(self.pool.name, source, destination, guesses=guesses):",
                "with __import__('contextlib').nullcontext() if self.pool.name == 'target' else self.canary.move(self.pool.name, source, destination, guesses=guesses):",
            ),
        ),
        (TREE,),
        ends=("R9", "R6"),
        cause=("transfer", "draft"),
    ),
    Break(
        "compaction_one_layer_less",
        "Moves leave out the last layer",
        (
            Edit(
                "spec_engine.memory.pools.pool",
                "part[:, destination] = part[:, source]",
                "part[:-1, destination] = part[:-1, source]",
            ),
        ),
        (
            TREE,
            GRAPH,
        ),
        ends=("T1",),
        cause=("transfer", "draft"),
    ),
    Break(
        "compaction_across_requests",
        "Accepted nodes move into the window of another request",
        (
            Edit(
                "spec_engine.step.runner",
                "source, destination = windows[rows, nodes], windows[rows, places]",
                "source, destination = windows[(rows + 1) % len(windows), nodes], windows[rows, places]",
            ),
        ),
        (TREE,),
        ends=("R4",),
        cause=("draft", "addressing", "transfer", "identity"),
    ),
    Break(
        "extend_reversed",
        "The extend feeds accepted tokens in reverse order",
        (
            Edit(
                "spec_engine.step.runner",
                "tokens = [token for b in going for token in accepted[b].tokens]",
                "tokens = [token for b in going for token in reversed(accepted[b].tokens)]",
            ),
        ),
        (
            TREE,
            CHAIN_KNOWN,
        ),
        ends=("W6",),
        cause=("draft", "order"),
    ),
    Break(
        "extend_skips_last",
        "The extend leaves out the last accepted entry",
        (
            Edit(
                "spec_engine.step.runner",
                "lens = [len(accepted[b].tokens) for b in going]\n",
                "lens = [max(1, len(accepted[b].tokens) - (len(accepted[b].tokens) > 2)) for b in going]\n        tokens = [t for b, n in zip(going, lens) for t in accepted[b].tokens[:n]]\n        rows = [b * num_nodes + node for b, n in zip(going, lens) for node in accepted[b].nodes[:n]]\n",
            ),
        ),
        (
            TREE,
            CHAIN_KNOWN,
        ),
        ends=("RelayError",),
        off=("RelayError",),
    ),
    Break(
        "features_of_neighbour",
        "The extend's hidden states are those of the next node",
        (
            Edit(
                "spec_engine.step.runner",
                "features = drafter.features(output, to_device(rows, self.device))",
                "features = drafter.features(output, to_device(rows, self.device).roll(1))",
            ),
        ),
        (TREE,),
        silent="no byte is wrong that is not a function of them; acceptance falls",
    ),
    Break(
        "proposals_of_neighbour",
        "A request drafts from the proposals of the row beside it",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "grow(growth, slots, self.proposals(batch.rows), forward, self._path)",
                "grow(growth, slots, self.proposals(batch.rows.roll(1)), forward, self._path)",
            ),
        ),
        (
            TREE,
            CHAIN,
        ),
        ends=("RelayError",),
        off=("RelayError",),
    ),
    Break(
        "attention_reads_siblings",
        "The verify's mask lets every node see all nodes, and the plan is right",
        (
            Edit(
                "spec_engine.attention.torch_backend",
                "(batch.tree_mask.gather(2, node) & (column < num_new))",
                "(torch.ones_like(batch.tree_mask).gather(2, node) & (column < num_new))",
            ),
        ),
        (Case(topk=2, num_steps=3, draft="self", nodes=8),),
        silent="values are computed wrongly before they are written",
        harmless=False,
    ),
)
