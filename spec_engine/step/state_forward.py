"""One forward's recurrent states: which rows it takes them from, and what it leaves; a canary is told of both."""

from __future__ import annotations

from collections.abc import Sequence

from kvcanary.faults import seam
from spec_engine.core import Batch, ForwardBatch
from spec_engine.drafting.tree import Tree
from spec_engine.memory.recurrent import RecurrentPool
from spec_engine.step.verify import Accepted


class StateForward:
    """``states``: what the model's recurrent layers go on from; `close` when they have."""

    def __init__(self, pool: RecurrentPool, forward: ForwardBatch, batch: Batch, tree: Tree | None) -> None:
        self._pool, self._forward, self._batch, self._tree = pool, forward, batch, tree
        rows = [request.row for request in batch.requests]
        self._rows = seam("states.foreign_row", rows)
        if pool.watch is not None:
            pool.watch.begin(forward.kind, batch.ids, rows, self._rows, batch.lens)
        if tree is None:
            self._kept = seam("states.last_token_left_out", forward.new_lens, kind=forward.kind)
            self.states = pool.chain(self._rows, forward.new_lens, self._kept)
        else:
            self._columns = seam("states.two_nodes_one_column", list(range(tree.parents.shape[1])))
            self.states = pool.tree(self._rows, tree.parents, self._columns)

    def close(self) -> None:
        """The model has run."""
        watch, batch, tree = self._pool.watch, self._batch, self._tree
        if watch is None:
            return
        if tree is None:
            lens = [before + new for before, new in zip(batch.lens, self._kept, strict=True)]
            watch.left(self._forward.kind, batch.ids, self._rows, lens)
        else:
            paths = [_paths(*own) for own in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)]
            watch.left_nodes(self._forward.kind, batch.ids, self._rows, batch.lens, paths, self._columns)


def last_nodes(tree: Tree, accepted: Sequence[Accepted]) -> list[int]:
    """Of each request the node from whose state it goes on."""
    nodes = [path.nodes[-1] for path in accepted]
    where = {"paths": [path.nodes for path in accepted], "parents": tree.parents.tolist()}
    nodes = seam("states.stale_column", nodes, **where)
    nodes = seam("states.lookahead_kept", nodes, **where)
    return seam("states.other_branch", nodes, **where)


def _paths(parents: list[int], tokens: list[int]) -> list[list[int]]:
    """By node, the tokens from the root down to it."""
    paths: list[list[int]] = []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return paths
