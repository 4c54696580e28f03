"""The canary of one vLLM worker: what both runners have in common.

Everything is replaced on the instances, and comes back with `detach()`. In every step the canary is shown what the
forward is about to write and to read once the block tables are there (or after an external load), and takes the bytes
after the forward.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.hosted.cells import Shard
from kvcanary.adapters.hosted.handle import HostHandle
from kvcanary.adapters.hosted.loads import Loads
from kvcanary.adapters.hosted.sampled import new_group, of_one_seed
from kvcanary.adapters.hosted.states import NOT_WATCHED
from kvcanary.adapters.observed import moves as paged_moves
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.state import Forward, Group, depth_of
from kvcanary.adapters.vllm.attention_probe import probe_layers
from kvcanary.adapters.vllm.compatibility import DRAFT_STATES_SIDE, PARALLEL, RANKS_SIDE, STATES_SIDE
from kvcanary.adapters.vllm.identity import Contents, Identities, New, contents_of
from kvcanary.adapters.vllm.layout import pools_of
from kvcanary.adapters.vllm.owners import BlockLedger
from kvcanary.adapters.vllm.states import BlockStates, is_state, not_followed, states_of
from kvcanary.config import CanaryConfig
from kvcanary.errors import AdapterError, PlanError

WORKER_HOOKS = ("initialize_from_config", "compile_or_warm_up_model", "sleep", "wake_up")
#: Where weights and adapters are replaced, of those that a release has.
LOADS = ("reload_weights", "update_weights", "load_weights", "add_lora")


class Handle(HostHandle):
    """The canary of one worker, until `detach()`.

    hooks: methods of the runner that are replaced
    """

    host = "vllm"
    hooks: ClassVar[tuple[str, ...]]

    def __init__(self, worker: Any, config: CanaryConfig) -> None:
        parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
        is_alone = getattr(parallel, "world_size", 1) == 1
        super().__init__(config, getattr(worker, "rank", 0), is_alone, is_collected(worker))
        self.worker, self.runner = worker, worker.model_runner
        self._loads: Loads | None = None
        self._ledger: BlockLedger | None = None
        self._contents: Contents | None = None
        self._states: BlockStates | None = None
        self._caches: list[int] | None = None  # vLLM's groups of K and V, where others keep states; None: all are
        self._not_watched: list[str] = []
        self._shown: Forward | None = None  # the forward that was read last
        self.identities = Identities()
        self._scheduled: Any = None  # what the step that runs was told
        self._given: list[Any] = []  # blocks that it gives to requests
        self._moves = False  # blocks are zeroed or copied for it, which the canary was not told yet
        self._hook(worker, WORKER_HOOKS)
        self._hook(self.runner, self.hooks)
        self.replaced.put(worker, "kvcanary", self)
        self.replaced.put(worker, "kvcanary_report", self.report)
        self._hook(worker, [name for name in LOADS if hasattr(worker, name)])
        if getattr(self.runner, "kv_caches", None):  # it serves already
            self._follow_weights()
            self.canary = self._bind()
            self._prepare(self.canary)
            self.canary.coverage.not_probed = "the worker served already, and may have given any block away"
            self._arm(self.canary)

    def report(self) -> dict[str, Any]:
        """The certificate of this worker: `llm.collective_rpc("kvcanary_report")`."""
        loads_checked = 0 if self._loads is None else self._loads.compared  # entries whose bytes had a name
        owners = (self._ledger.fed_by if self._ledger is not None else None) or "not fed"
        transfer = getattr(getattr(self.worker, "vllm_config", None), "kv_transfer_config", None)
        own = {"connector": getattr(transfer, "kv_connector", None), "loads_checked": loads_checked, "owners": owners}
        if self._published is not None:
            own["names"] = self._published.told
        told = {**super().report(), **own, "not_watched": self._not_watched}
        if self._states is not None and "watched" in told:
            told["watched"] = [*told["watched"], *self._states.described]
        return told

    # what the runners differ in

    @abstractmethod
    def _new_canary(self) -> PagedCanary:
        """Without groups."""

    @abstractmethod
    def _table_block(self, group: int) -> tuple[int, int]:
        """Of vLLM's group, entries of a block of the block table, and how many of these a block of the manager has.

        A tensor may be cut in other pages: slots are the same numbers in both.
        """

    @abstractmethod
    def _block_tables(self) -> Sequence[torch.Tensor]:
        """Of all vLLM's groups, in batch order, as forwards read them."""

    @abstractmethod
    def _drafts(self) -> bool:
        """Whether requests have drafts."""

    @abstractmethod
    def _late_layers(self) -> Collection[str]:
        """Layers that a draft model stores, after the target's forward."""

    # the worker

    def _initialize_from_config(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.is_armed = False
        self._follow_weights()
        self.canary = self._bind()
        return result

    def _follow_weights(self) -> None:
        """The model is there: whoever gives it weights goes through one of these, by a worker's method or its own."""
        self._hook(self.runner, [name for name in ("reload_weights",) if hasattr(self.runner, name)])
        model = getattr(self.runner, "model", None)
        if hasattr(model, "load_weights"):
            self._hook(model, ["load_weights"])

    def _reload_weights(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.identities.changed()
        return method(*args, **kwargs)

    _update_weights = _load_weights = _reload_weights

    def _add_lora(self, method: Any, lora_request: Any) -> Any:
        self.identities.loaded(lora_request.lora_name)
        return method(lora_request)

    def _compile_or_warm_up_model(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if self.canary is not None:  # compiled before vLLM begins to watch for late compilations
            self._prepare(self.canary)
        result = method(*args, **kwargs)
        if self.canary is not None:
            self.probe_reader()
            self._arm(self.canary)
        return result

    def _prepare(self, canary: PagedCanary) -> None:
        """Compile and capture what steps launch."""
        forward = self._empty_forward()
        canary.prepare(forward)
        if self._states is not None:
            self._states.prepare(forward, self._block_tables())

    def probe_reader(self) -> None:
        """Ask the worker's attention what it reads, over blocks that nobody has: before it serves. KVCorruptionError in
        mode raise.
        """
        if self.canary is not None:
            groups = self._of_caches(self.runner.kv_cache_config.kv_cache_groups)
            probe_layers(self.canary, self.runner, self.worker.vllm_config, groups)

    def _sleep(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_armed = self._is_running = False
        return method(*args, **kwargs)

    def _wake_up(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.canary = self._bind()
        self.probe_reader()
        self._arm(self.canary)
        return result

    # a step

    def _moving(self, scheduler_output: Any) -> bool:
        """Whether blocks are zeroed or copied for this step; then what waits to be read is read now."""
        moves = bool(scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies)
        if moves:
            self._flush()
        return moves

    def _moved(self, scheduler_output: Any) -> None:
        """Blocks were zeroed or copied for this step."""
        self._moves = False
        zeroed, copies = scheduler_output.new_block_ids_to_zero, scheduler_output.kv_cache_block_copies
        if self.canary is None:
            return
        for group in self.canary.groups:
            requests = self._new_blocks(scheduler_output, group.number)
            if zeroed:
                paged_moves.zeroed(self.canary, group, self._slots_of(self.canary, group, zeroed), requests)
            if copies:
                src, dst = (self._slots_of(self.canary, group, [pair[side] for pair in copies]) for side in (0, 1))
                paged_moves.copied(self.canary, group, src, dst, requests)
        if copies and self._states is not None:
            self._states.copied(copies)

    def _execute_model(self, method: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        self._scheduled = scheduler_output
        self.identities.told(scheduler_output)
        if self.is_armed and self.canary is not None:
            self._given = self.canary.recent.scheduled(scheduler_output)
            if self._ledger is not None:
                self._ledger.begin(scheduler_output)
            if self._states is not None:
                self._states.given(self._given)
            self._told(scheduler_output)
        result = method(scheduler_output, *args, **kwargs)
        if self._moves:  # for no forward
            self._moved(scheduler_output)
        if self._wrote() and self._loads is not None:
            self._loads.name()
        return result

    def _told(self, scheduler_output: Any) -> None:
        """What the scheduler says of the step that is next, before anything of it is done."""

    def _read_again(self) -> bool:
        """The last forward comes once more, each row by one entry; False: it is to be read as any other."""
        if self.canary is None or not self.canary.read_again():
            return False
        self._is_running = True
        return True

    def _sample_tokens(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._hold(method(*args, **kwargs))

    # helpers

    def _bind(self) -> PagedCanary:
        """Read where everything lies now; the pools are new, or moved."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        self._caches, self._states = self._groups_of_caches(groups), None
        group_of_ranks = self._group_of_ranks()
        self.config = of_one_seed(self.config, group_of_ranks)
        canary, late = self._adopt(self._new_canary()), self._late_layers()
        canary.dumps.environment |= {"version": engine_version(), "runner": type(self).__name__.removeprefix("Handle")}
        context = self.runner.compilation_config.static_forward_context
        canary.recent.groups = self._caches
        for number, spec in enumerate(self._of_caches(groups)):
            size, ratio = self._block_of(number)
            canary.recent.ratios.append(ratio)
            layers = [(name, context[name]) for name in spec.layer_names]
            pools = pools_of(layers, spec.kv_cache_spec, late, null_slots=size * ratio, shard=self._shard_of)
            window = int(getattr(spec.kv_cache_spec, "sliding_window", None) or 0)
            window = window or -int(getattr(spec.kv_cache_spec, "attention_chunk_size", None) or 0)
            group = canary.memory.add_group(number, size, pools[0][0].num_slots, window, null_slots=size * ratio)
            for view, names in pools:
                is_late, goes_on = view.name.startswith("draft"), depth_of(names[0])[:1] > (0,)
                canary.memory.add_layers(group, view, names, is_late=is_late, reads_hidden=goes_on)
        self._compare_ranks(canary, group_of_ranks, self._num_ranks)
        blocks = map(self._block_of, range(len(canary.groups)))
        self._ledger = BlockLedger(canary, [size * ratio for size, ratio in blocks], self._caches is not None)
        self._contents = Contents(canary)
        if self._caches is not None:
            self._states = self._bind_states(canary, groups)
        if self._states is not None:
            self._ledger.freed = self._states.freed
        return canary

    def _groups_of_caches(self, groups: Sequence[Any]) -> list[int] | None:
        """vLLM's groups of K and V; None: all are. AdapterError where none is."""
        own = [number for number, group in enumerate(groups) if not is_state(group.kv_cache_spec)]
        if not own:
            raise AdapterError(
                "no layer of this model keeps K and V, and states are followed beside these: unset KVCANARY_MODE"
            )
        return None if len(own) == len(groups) else own

    def _of_caches(self, by_group: Sequence[Any]) -> Sequence[Any]:
        """Of what vLLM keeps by group, that of groups of K and V."""
        return by_group if self._caches is None else [by_group[number] for number in self._caches]

    def _block_of(self, group: int) -> tuple[int, int]:
        """`_table_block` of the canary's group."""
        return self._table_block(group if self._caches is None else self._caches[group])

    def _bind_states(self, canary: PagedCanary, groups: Sequence[Any]) -> BlockStates | None:
        """What happens to states is followed; None where `_not_watched` says why not."""
        context = self.runner.compilation_config.static_forward_context
        alignment = getattr(self.worker.vllm_config.cache_config, "cache_hit_alignment_tokens", None) or 0
        reasons = [self._without_states(n, own.kv_cache_spec) for n, own in enumerate(groups)]
        self._not_watched = [why for why in reasons if why is not None][:1]
        try:
            return None if self._not_watched else states_of(canary, groups, context, alignment)
        except PlanError as error:
            self._not_watched = [str(error)]
            return None

    def _without_states(self, group: int, spec: Any) -> str | None:
        """Why states of vLLM's group cannot be followed; None: they can, or it has none."""
        if not is_state(spec):
            return None
        gone = missing((*STATES_SIDE, *(DRAFT_STATES_SIDE if self._drafts() else ())))
        if gone:
            return f"{NOT_WATCHED}{'; '.join(gone)}"
        if self._table_block(group)[1] > 1:
            return f"{NOT_WATCHED}tables name parts of their blocks"
        connector = getattr(self.worker.vllm_config, "kv_transfer_config", None)
        return not_followed(spec, self._drafts(), connector is not None)

    def _shard_of_model(self) -> str:
        """Under which names of blocks are kept: the model, and which part of it this worker has."""
        vllm_config = getattr(self.worker, "vllm_config", None)
        model = self.config.model or getattr(getattr(vllm_config, "model_config", None), "model", "")
        world_size = getattr(getattr(vllm_config, "parallel_config", None), "world_size", 1)
        return f"{model}, rank {self.rank} of {world_size}"

    @property
    def _num_ranks(self) -> int:
        """Over which a layer is cut."""
        parallel = getattr(getattr(self.worker, "vllm_config", None), "parallel_config", None)
        return int(getattr(parallel, "tensor_parallel_size", 1))

    def _shard_of(self, is_late: bool) -> Shard | None:
        """Of layers of the target, or of a draft: what this worker has of them; None: all."""
        if self._num_ranks == 1 or missing(RANKS_SIDE):
            return None
        config = self.worker.vllm_config
        model = config.speculative_config.draft_model_config if is_late else config.model_config
        rank = import_module(PARALLEL).get_tp_group().rank_in_group
        return Shard(rank, self._num_ranks, model.get_total_num_kv_heads())

    def _group_of_ranks(self) -> Any:
        """A new group of the workers that sample the same; None where there is one, or some have no turn.

        Each of them comes here at the same time: none has served yet, or all wake up.
        """
        if self.sampled is not None or self._num_ranks == 1 or missing(RANKS_SIDE):
            return None
        return new_group(import_module(PARALLEL).get_tp_group().ranks, self.config)

    def _admit(self, canary: PagedCanary, new: Sequence[New], features: Sequence[Any]) -> None:
        """Rows begin; as `PagedCanary.admit` takes them, with vLLM's `mm_features` of each."""
        uids = canary.admit(new)
        if self._contents is not None:
            self._contents.came(uids, new, list(map(contents_of, features)))
        if self._ledger is not None:
            self._ledger.came(dict(zip([request for _, request, *_ in new], uids, strict=True)))

    @abstractmethod
    def _lines_of(self, request: str, number: int) -> Sequence[torch.Tensor]:
        """Of a row, its lines of all block tables, as the forward that is next will read them."""

    def _read(self, forward: Forward) -> None:
        if self._contents is not None:
            self._contents.judge(self._lines_of)
        self._shown = forward
        super()._read(forward)

    def _take(self, tables: Sequence[torch.Tensor], metadata: Any) -> None:
        """What was read, or read again, goes on from its rows' states.

        tables: of all groups, in batch order;  metadata: of attention, by layer
        """
        if self._states is not None and self._is_running and self._shown is not None:
            self._states.taken(self._shown, tables, metadata if self._drafts() else None)

    def _wrote(self) -> bool:
        if self._states is not None:
            self._states.left()
        return super()._wrote()

    def _accepted(self, counts: torch.Tensor) -> None:
        """Of a server that drafts, how many tokens of the last forward's rows were: states are where they are now."""
        if self.is_armed and self._states is not None:
            self._states.accepted(counts)

    def _give(self) -> None:
        """Rows are there: tell whose the blocks are that this step gives them."""
        given, self._given = self._given, []
        if given and self._ledger is not None:
            if self._caches is not None:
                given = [(name, self._of_caches(blocks), length) for name, blocks, length in given]
            self._ledger.given(given)

    def _table_blocks(self, group: int, blocks: Iterable[int]) -> list[int]:
        """Of the manager's blocks."""
        _, ratio = self._block_of(group)
        return [block * ratio + part for block in blocks for part in range(ratio)]

    def _slots_of(self, canary: PagedCanary, group: Group, blocks: Iterable[int]) -> torch.Tensor:
        """Of the manager's blocks; without a wait."""
        own = torch.tensor(self._table_blocks(group.number, blocks), dtype=torch.int64)
        return paged_moves.slots_of(group, canary.memory.upload(own))

    def _new_blocks(self, scheduler_output: Any, group: int) -> dict[int, str]:
        """By block of a group's table, the request that was given it for this step, in whichever group: what moves
        bytes of a block moves those of all groups.
        """
        cached = scheduler_output.scheduled_cached_reqs
        given = [(new.req_id, new.block_ids) for new in scheduler_output.scheduled_new_reqs]
        given += [pair for pair in zip(cached.req_ids, cached.new_block_ids, strict=True) if pair[1] is not None]
        return {block: name for name, own in given for blocks in own for block in self._table_blocks(group, blocks)}


def is_collected(worker: Any) -> bool:
    """Whether the engine takes this worker's outputs: of several processes, those of one alone."""
    parallel: Any = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    if getattr(parallel, "distributed_executor_backend", None) != "mp":
        return True
    ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return bool(worker.rank == parallel.world_size - ranks)


def engine_version() -> str:
    """Of the vLLM that runs here."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "of unknown version"))
