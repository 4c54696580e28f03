"""Runner V1 of vLLM: rows of the batch move from step to step, so the canary gives each request a row of its own.

Order of a step: _update_states (zeroed and copied blocks, rows that come and go), _build_attention_metadata (block
tables and slots are there by then), an external load, the forward (_model_forward), the sampler (_sample),
sample_tokens. Tokens (W6) are compared with what the scheduler said of a request and with what was sampled of it, not
with this runner's own books; layers of a draft are not followed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from kvcanary.adapters.compatibility import missing
from kvcanary.adapters.hosted.replacements import replaced_by
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.inputs import NOTHING, UNKNOWN, Entries, SampledTokens, judge_fed
from kvcanary.adapters.observed.state import Forward
from kvcanary.adapters.vllm.compatibility import ACCEPTED, KV_TRANSFER, LOADS_V1_SIDE
from kvcanary.adapters.vllm.connectors import LoadingHandle
from kvcanary.errors import AdapterError


class HandleV1(LoadingHandle):
    """The canary of a worker with runner V1."""

    hooks = ("_update_states", "_build_attention_metadata", "execute_model", "_sample", "sample_tokens")
    _row_ends: dict[str, int]  # of the last step, where a connector loads
    _prepared: Any = None  # what the step that is being prepared was told
    _names, _places = list[str](), list[int]()  # of the last forward, where each row had one token; where tensors lay
    _are_kept: np.ndarray | None = None  # by row of the last forward, whether what is sampled counts; None: of all

    def _update_states(self, method: Any, scheduler_output: Any) -> Any:
        if not self.is_armed or self.canary is None:
            return method(scheduler_output)
        self._prepared = scheduler_output if scheduler_output.total_num_scheduled_tokens else None
        cached = scheduler_output.scheduled_cached_reqs
        ended = [*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())]
        self._leave(self.canary, [name for name in ended if name in self._numbers])
        if self._loads is not None:
            self._begin_loads()  # into blocks that were free until now
            self._look_back(scheduler_output)
        moves = self._moving(scheduler_output)
        result = method(scheduler_output)
        new = []
        for data in scheduler_output.scheduled_new_reqs:
            new.append((data.req_id, data.prompt_token_ids, data.num_computed_tokens))
        for name, length in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name not in self._numbers:
                state = self.runner.requests[name]
                new.append((name, [*(state.prompt_token_ids or ()), *state.output_token_ids], length))
        self._come(self.canary, new)
        self._give()
        if moves:
            self._moved(scheduler_output)
        return result

    def _build_attention_metadata(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        output, self._prepared = self._prepared, None
        is_forward = self.is_armed and output is not None and not kwargs.get("for_cudagraph_capture")
        if is_forward:
            if self._loads is not None:
                self._pending = self._forward_of(output)
            elif not self._goes_on(output):
                self._read(self._forward_of(output))
            if self._states is not None:
                self._take(self._block_tables(), result[0])
        return result

    def _forward_behind_loads(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """A load that this forward needs was started."""
        self._judge_loads()
        return method(*args, **kwargs)

    def _sample(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Each row goes on with the last of the tokens that this gives of it."""
        result = method(*args, **kwargs)
        if self._is_running:
            self._samples.sampled(result.sampled_token_ids, self._are_kept)
        return result

    def _read(self, forward: Forward) -> None:
        super()._read(forward)
        self._samples.compare(forward)

    def _read_again(self) -> bool:
        goes_on = self._are_kept is None and super()._read_again()
        if goes_on and self._shown is not None:
            self._samples.compare(self._shown)
        return goes_on

    def _count_accepted(self, method: Any, output_token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Behind the sampler."""
        result = method(output_token_ids, *args, **kwargs)
        self._accepted(self.runner.num_accepted_tokens.gpu)
        return result

    def _look_back(self, output: Any) -> None:
        """Rows that the scheduler has computed again from an earlier entry."""
        cached, ends = output.scheduled_cached_reqs, self._row_ends
        self._row_ends = {}
        counts = {own.req_id: own.num_computed_tokens for own in output.scheduled_new_reqs}
        counts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, now in counts.items():
            self._row_ends[name] = now + output.num_scheduled_tokens[name]
            if now < ends.get(name, 0) and name in self._numbers and self._max_new == 1:  # drafts are rejected
                self._taken_back(name, self._numbers[name], ends[name], now)

    def _begin_again(self, name: str, number: int, before: int, now: int) -> None:
        """This runner's counts are the scheduler's."""
        if self.canary is not None:
            state = self.runner.requests[name]
            tokens = [*(state.prompt_token_ids or ()), *state.output_token_ids]
            self.canary.take_back(number, name, before, now, tokens, self.identities.of(state, name))
            self._samples.begun([number])

    def _goes_on(self, output: Any) -> bool:
        """Whether the last forward comes once more, each row by one entry, and was read so."""
        runner, batch = self.runner, self.runner.input_batch
        names = batch.req_ids[: batch.num_reqs] if output.total_num_scheduled_tokens == batch.num_reqs else []
        used = runner.seq_lens, runner.query_start_loc.gpu, runner.input_ids.gpu, runner.positions
        lines = [line for table in self._own_tables() for line in (table.block_table.gpu, table.slot_mapping.gpu)]
        places = [tensor.data_ptr() for tensor in (*used, *lines)]
        goes_on = bool(names) and names == self._names and places == self._places
        self._names, self._places = list(names), places
        return goes_on and self._read_again()

    def _leave(self, canary: PagedCanary, names: Sequence[str]) -> None:
        """Requests end or are preempted."""
        canary.leave([self._numbers[name] for name in names], names)
        self._free += [self._numbers.pop(name) for name in names]
        for name in names:
            self._came_with.pop(name, None)

    def _come(self, canary: PagedCanary, new: Sequence[tuple[str, Sequence[int] | None, int]]) -> None:
        """Requests begin or are resumed, each (name, tokens, entries that it has)."""
        admitted = []
        for name, tokens, length in new:
            if name not in self._numbers:
                self._numbers[name] = self._free.pop()
            identity = self.identities.of(self.runner.requests[name], name)
            admitted.append((self._numbers[name], name, tokens, length, identity))
            self._came_with[name] = None if tokens is None else np.array(tokens, dtype=np.int64)
        self._samples.begun([number for number, *_ in admitted])
        self._admit(canary, admitted, [self.runner.requests[name].mm_features for name, *_ in new])
        if self._loads is not None:
            self._loads.expect(admitted)

    def _forward_of(self, output: Any) -> Forward:
        runner, batch = self.runner, self.runner.input_batch
        names = batch.req_ids[: batch.num_reqs]
        new = max(output.num_scheduled_tokens.values())
        kind = "decode" if new == 1 else "verify" if new <= self._max_new else "prefill"
        lengths = runner.optimistic_seq_lens_cpu
        numbers = np.array([self._numbers[name] for name in names], dtype=np.int64)
        forward = self._made(names, numbers, (kind, 0), output.total_num_scheduled_tokens, lengths)
        self._judge_prompts(forward, output)
        return forward

    def _judge_prompts(self, forward: Forward, output: Any) -> None:
        """Compare what rows are fed of the tokens that they came with, and see of which rows the prompt goes on."""
        cached, came = output.scheduled_cached_reqs, self._came_with
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        begin = np.array([starts[name] for name in forward.requests])
        new = np.array([output.num_scheduled_tokens[name] for name in forward.requests])
        known = np.array([np.inf if own is None else len(own) for own in map(came.get, forward.requests)])
        are_kept = begin + new >= known
        self._are_kept = None if are_kept.all() else are_kept
        if (begin >= known).all() or self.canary is None:
            return
        wanted, first = np.full(forward.num_tokens, UNKNOWN), np.cumsum(new) - new
        for row, name in enumerate(forward.requests):
            tokens = came[name]
            own = () if tokens is None else tokens[begin[row] : begin[row] + new[row]]
            wanted[first[row] : first[row] + len(own)] = own
            if len(own) and not self._is_ahead:  # else it may count a token that nobody has sampled yet
                wanted[first[row] + len(own) : first[row] + new[row]] = NOTHING
        rows = np.repeat(np.arange(len(new)), new)
        fed, positions, slots = (
            own[: forward.num_tokens] for own in (forward.tokens, forward.positions, forward.slots[0])
        )
        expected, entries = torch.from_numpy(wanted), Entries(forward.requests, rows, positions, slots)
        judge_fed(self.canary, "W6", "token", fed, self.canary.memory.upload(expected), entries, forward.site)

    def _made(
        self, names: Sequence[str], numbers: np.ndarray, site: tuple[str, int], num_tokens: int, lengths: torch.Tensor
    ) -> Forward:
        runner = self.runner
        slots = [table.slot_mapping.gpu for table in self._own_tables()]
        return Forward(
            names, numbers, site, lengths, num_tokens, self._tables(), runner.seq_lens, runner.query_start_loc.gpu,
            runner.input_ids.gpu, runner.positions, slots,
        )  # fmt: skip

    def _new_canary(self) -> PagedCanary:
        runner, device = self.runner, self.runner.device
        if runner.dcp_world_size != 1 or getattr(self._table(0), "pcp_world_size", 1) != 1:
            raise AdapterError("context parallelism is not followed: set its sizes to 1, or unset KVCANARY_MODE")
        self._max_new = 1 + int(runner.num_spec_tokens)
        if self.config.mode == "heal":
            self._expect_healing()
        self._numbers: dict[str, int] = {}
        self._names = []
        self._row_ends = {}
        self._free = list(range(runner.max_num_reqs))
        #: Tokens of each request, as the scheduler said them; None: it did not.
        self._came_with: dict[str, np.ndarray | None] = {}
        own = runner.max_num_reqs, self._max_new, runner.max_num_tokens, device
        canary = PagedCanary(self.config, *own, can_heal=True)
        canary.fed |= {"W6"}
        self._samples = SampledTokens(canary, self._max_new)
        return canary

    def _prepare(self, canary: PagedCanary) -> None:
        super()._prepare(canary)
        self._samples.prepare(self._empty_forward())

    def _bind(self) -> PagedCanary:
        canary = super()._bind()
        if self._loads is not None and replaced_by(self.runner, "_model_forward") is None:
            self.replaced.replace(self.runner, "_model_forward", self._forward_behind_loads)
        if self._states is not None and self._drafts() and replaced_by(self.runner, ACCEPTED) is None:
            self.replaced.replace(self.runner, ACCEPTED, self._count_accepted)
        return canary

    def _connector(self) -> Any:
        """That of the process, where this worker has one."""
        if getattr(self.worker.vllm_config, "kv_transfer_config", None) is None:
            return None
        if gone := missing(LOADS_V1_SIDE):
            raise AdapterError(f"external loads cannot be followed ({'; '.join(gone)}): serve without a connector")
        group = import_module(KV_TRANSFER)
        return group.get_kv_transfer_group() if group.has_kv_transfer_group() else None

    def _table_block(self, group: int) -> tuple[int, int]:
        table = self._table(group)
        return table.block_size, getattr(table, "blocks_per_kv_block", 1)  # until 0.31

    def _late_layers(self) -> Collection[str]:
        return getattr(getattr(self.runner, "drafter", None), "_draft_attn_layer_names", None) or ()

    def _empty_forward(self) -> Forward:
        none = np.empty(0, dtype=np.int64)
        return self._made((), none, ("decode", 0), 0, torch.empty(0, dtype=torch.int64))

    def _held(self) -> Collection[int]:
        return list(self._numbers.values())

    def _lines_of(self, request: str, number: int) -> Sequence[torch.Tensor]:
        return [table[self.runner.input_batch.req_id_to_index[request]] for table in self._tables()]

    def _table(self, group: int) -> Any:
        return self.runner.input_batch.block_table[group]

    def _every_table(self) -> Sequence[Any]:
        """vLLM's, by group, those of states as well."""
        return [self._table(group) for group in range(len(self.runner.kv_cache_config.kv_cache_groups))]

    def _own_tables(self) -> Sequence[Any]:
        """Those of groups of K and V."""
        return self._of_caches(self._every_table())

    def _tables(self) -> Sequence[torch.Tensor]:
        return self._of_caches(self._block_tables())

    def _block_tables(self) -> Sequence[torch.Tensor]:
        return [table.block_table.gpu for table in self._every_table()]

    def _drafts(self) -> bool:
        return self._max_new > 1
