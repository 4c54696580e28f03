"""Loads of vLLM's connectors: what they bring is judged before the forward that reads it, and what is wrong is told.

In mode heal blocks in which something else arrived than was stored are reported as failed, in the same step: vLLM takes
the row back, and computes them again.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.hosted.loads import Loads
from kvcanary.adapters.hosted.replacements import replaced_by
from kvcanary.adapters.observed import moves as paged_moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Forward
from kvcanary.adapters.vllm.compatibility import HEAL_SIDE
from kvcanary.adapters.vllm.handle import Handle
from kvcanary.errors import AdapterError
from kvcanary.report.healing import LoadHealing


class LoadingHandle(Handle):
    """The canary of a worker whose requests may begin with what a connector brings."""

    _healing: LoadHealing | None = None  # in mode heal
    _pending: Forward | None = None  # until an external load is there

    # what the runners differ in

    @abstractmethod
    def _connector(self) -> Any:
        """The worker's connector; None where it has none."""

    @abstractmethod
    def _begin_again(self, name: str, number: int, before: int, now: int) -> None:
        """The scheduler has taken a row back from one entry to another: follow it."""

    # attaching

    def _bind(self) -> PagedCanary:
        canary, connector = super()._bind(), self._connector()
        if connector is None:
            return canary
        if replaced_by(connector, "wait_for_layer_load") is None:
            self._hook(connector, ("wait_for_layer_load",))
        waits = replaced_by(connector, "wait_for_layer_load")
        own = self._published_names(), self._shard_of_model()
        self._loads = Loads(canary, connector_name(connector), self._stored_layers(), waits, *own)
        if self.config.mode == "heal":
            self._healing = canary.response.healing = LoadHealing("vLLM", canary.log)
        is_told = self._healing is not None or (self._repeats_loads and self._is_ahead)
        if is_told and replaced_by(connector, "get_block_ids_with_load_errors") is None:
            self._hook(connector, ("get_block_ids_with_load_errors",))
        return canary

    def _stored_layers(self) -> list[str]:
        """Layers that the target's forward stores, in its order."""
        late, groups = self._late_layers(), self._of_caches(self.runner.kv_cache_config.kv_cache_groups)
        pooled = {name for group in groups for name in group.layer_names}
        context = self.runner.compilation_config.static_forward_context
        return [name for name in context if name in pooled and name not in late]

    @property
    def _repeats_loads(self) -> bool:
        """Whether vLLM computes again what failed to load, and does not end the request."""
        transfer = getattr(self.worker.vllm_config, "kv_transfer_config", None)
        return getattr(transfer, "kv_load_failure_policy", None) == "recompute" and not missing(HEAL_SIDE)

    @property
    def _is_ahead(self) -> bool:
        """Whether the scheduler schedules a step before it has seen what came of the one before."""
        return bool(getattr(getattr(self.worker.vllm_config, "scheduler_config", None), "async_scheduling", False))

    def _expect_healing(self) -> None:
        """AdapterError where mode heal could not heal."""
        transfer, gone = getattr(self.worker.vllm_config, "kv_transfer_config", None), missing(HEAL_SIDE)
        if "T1" in self.config.disable or self.config.content == "write":
            why = "what a connector brings is not compared, so leave T1 on, and KVCANARY_CONTENT at rolling or full"
        elif transfer is None:
            why = "what vLLM computes again are loads, so serve with a connector"
        elif getattr(transfer, "kv_load_failure_policy", None) != "recompute":
            why = "vLLM ends requests whose loads fail: give --kv-transfer-config a kv_load_failure_policy of recompute"
        elif len(self.runner.kv_cache_config.kv_cache_groups) > 1:
            why = "vLLM computes loads again where a model has one group of layers"
        elif self._drafts():
            why = "loads are not computed again where the server drafts"
        elif self._is_ahead:
            why = "a scheduler that is ahead returns a wrong token behind a failed load: give --no-async-scheduling"
        elif gone:
            why = "; ".join(gone)
        else:
            return
        raise AdapterError(f"mode must be 'log' or 'raise' here, got 'heal': {why}")

    # a step

    def _begin_loads(self) -> None:
        """A connector is about to bring bytes."""
        if self._loads is not None:
            self._flush()
            self._loads.begin()

    def _judge_loads(self) -> None:
        """Bytes were brought, or are on their way, for the forward that is next."""
        if not self.is_armed or self._pending is None or self._loads is None or self.canary is None:
            return
        forward, self._pending = self._pending, None
        self._loads.wait()
        self._loads.arrived(self._lines_of)
        if self._healing is not None:
            for name, *_ in self._loads.wrong:
                self._healing.failed(name, self.canary.step)
        self._read(forward)

    def _wait_for_layer_load(self, method: Any, layer_name: str) -> Any:
        """Attention asks for its layer: one that was waited for is there, and some connectors count the calls."""
        return None if self._loads is not None and self._loads.was_waited_for(layer_name) else method(layer_name)

    def _get_block_ids_with_load_errors(self, method: Any) -> set[int]:
        """Mode heal: blocks in which something else arrived than was stored, too.

        A scheduler that is ahead has scheduled the row's next token by now, and returns it: what that reads failed.
        """
        failed = set(method())
        if self.canary is None or self._loads is None:
            return failed
        if self._healing is not None:
            for _, group, slots in self._loads.wrong:
                size, ratio = self._block_of(group.number)
                failed |= set((slots // (size * ratio)).tolist())
            self._loads.wrong = []
        elif failed and self.is_armed:
            for group in self.canary.groups:
                paged_moves.failed(
                    self.canary, group, self._slots_of(self.canary, group, sorted(failed)), self._loads.connector
                )
        return failed

    def _taken_back(self, name: str, number: int, before: int, now: int) -> None:
        """The scheduler has this row computed again from an earlier entry: of its loads, some failed."""
        if self.canary is None:
            return
        if self._healing is not None:
            self.canary.coverage.healed += self._healing.went_back(name, now, self.canary.step)
        if self._ledger is not None:
            held = []
            for group, line in enumerate(self._lines_of(name, number)):  # it waits for the device
                size, ratio = self._block_of(group)
                blocks = [block // ratio for block in line[::ratio].tolist()]
                held.append(blocks[now // (size * ratio) : -(-before // (size * ratio))])
            self._ledger.taken_back(name, held)
        self._begin_again(name, number, before, now)


def connector_name(connector: Any) -> str:
    """What vLLM calls a connector; of several, each."""
    name, parts = type(connector).__name__, getattr(connector, "_connectors", None)
    return name if not parts else f"{name} of {', '.join(type(part).__name__ for part in parts)}"
