"""StaticTree: a manager of one request whose prefill and verify are launched substeps, and K and V a rig's."""

from __future__ import annotations

import torch

from kvcanary import CanaryConfig, CanaryManager
from kvcanary.captured.buffers import StaticBuffers

TOKENS = [50, 51, 52, 53, 54, 55]


class StaticTree:
    """One request whose prefill and verify are launched substeps: a chain of two nodes behind three entries."""

    def __init__(self, rig, static_row, **settings: object) -> None:
        self.rig, self.static_row = rig, static_row
        self.canary = CanaryManager(CanaryConfig(seed=7, mode="log", **settings), [rig.pool.view])
        self.mask = torch.zeros(2, 2, 2, dtype=torch.bool)
        self.prefill, self.verify = (
            self.canary.registry.add("target", kind, 0, StaticBuffers.allocate(2, 4, 16, **own), **settings)
            for kind, own, settings in (
                ("prefill", {}, {}),
                ("verify", {"is_tree": True}, {"max_depth": 2, "tree_mask": self.mask}),
            )
        )
        self.move = self.canary.registry.add_move("target", 2)
        self.canary.arm()
        self.canary.admit("ann", TOKENS[:4])
        self.canary.on_alloc("ann", [1, 2])
        self.uid = self.canary.session.ledger.known(["ann"])[0].uid

    def launch(self, number: int, substep, ids: list[int], tokens: list[int], parents: list[int] | None = None):
        """A forward of these entries; what the host gave for its row."""
        self.canary.begin_step(number)
        truth = self.canary.launch(substep, ["ann"], [len(tokens)], len(ids))
        substep.buffers.fill(self.rig.batch([self.static_row(self.uid, ids, tokens, parents)]))
        self.rig.body(substep)
        return truth

    def fired(self) -> list[tuple[str, tuple[str, int], int]]:
        self.canary.collect(self.canary.end_step())
        return [(finding.code, finding.site, finding.slot) for finding in self.canary.findings]
