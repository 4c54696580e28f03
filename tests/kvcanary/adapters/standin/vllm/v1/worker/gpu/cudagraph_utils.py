"""Graphs of whole forwards: what was captured is called again, over the same buffers."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = 8, 16


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    """num_tokens: that a graph is for; 0: it is none"""

    num_tokens: int = 0


class Graph:
    def __init__(self, replay) -> None:
        self.replay = replay


class CudaGraphManager:
    def __init__(self) -> None:
        self.graphs, self.use_breakable_cg = {}, False
        self.candidates = [BatchExecutionDescriptor(size) for size in SIZES]

    def dispatch(self, num_reqs, num_tokens, uniform_token_count=None, num_active_loras=0):
        known = [desc for desc in self.candidates if num_tokens <= desc.num_tokens and desc in self.graphs]
        return known[0] if known else BatchExecutionDescriptor()

    def run_fullgraph(self, desc):
        self.graphs[desc].replay()


class ModelCudaGraphManager(CudaGraphManager):
    def capture(self, model, input_buffers, block_tables) -> None:
        for desc in self.candidates:
            n = desc.num_tokens

            def forward(n=n) -> None:
                model(input_ids=input_buffers.input_ids[:n], positions=input_buffers.positions[:n])

            block_tables.slot_mappings.fill_(-1)
            forward()  # to warm up
            self.graphs[desc] = Graph(forward)

    def run_fullgraph(self, desc):
        super().run_fullgraph(desc)
