"""A loss and its gradients replayed as one CUDA graph: a small deep model spends its time on launches otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class GraphedStep:
    """Calls `losses_of(batch, key)` and its first value's backward; on a GPU captured once for each key."""

    def __init__(
        self, losses_of: Callable[[Tensor, Any], Tensor], parameters: list[nn.Parameter], enabled: bool = True
    ) -> None:
        self.losses_of, self.parameters, self.enabled = losses_of, parameters, enabled
        self.captured: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor, list[Tensor | None], Tensor]] = {}
        self.pool = None

    def __call__(self, batch: Tensor, key: Any = None) -> Tensor:
        """Leaves the gradients in place and returns the losses, detached."""
        if not (self.enabled and batch.is_cuda):
            return self._run(batch, key)
        if key not in self.captured:
            self.captured[key] = self._capture(batch, key)
        graph, static, gradients, losses = self.captured[key]
        static.copy_(batch)
        graph.replay()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return losses.clone()

    def _run(self, batch: Tensor, key: Any) -> Tensor:
        losses = self.losses_of(batch, key)
        losses[0].backward()
        return losses.detach()

    def _capture(self, batch: Tensor, key: Any) -> tuple[torch.cuda.CUDAGraph, Tensor, list[Tensor | None], Tensor]:
        static = batch.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run(static, key)
                self._forget_gradients()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            losses = self._run(static, key)
        self.pool = graph.pool()
        gradients = [parameter.grad for parameter in self.parameters]
        self._forget_gradients()
        return graph, static, gradients, losses

    def _forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
