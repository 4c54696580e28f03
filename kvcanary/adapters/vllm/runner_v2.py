"""Runner V2 of vLLM: requests keep one row of its state as long as they run, and block tables lie by row.

Order of a step: finish_requests, add_requests, update_requests (zeroed and copied blocks), prepare_attn (block tables,
slots), an external load, the forward, sample_tokens (which lets a draft propose).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from kvcanary.adapters.hosted.replacements import replaced_by
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.inputs import judge_kept
from kvcanary.adapters.observed.state import Forward
from kvcanary.adapters.vllm.connectors import LoadingHandle
from kvcanary.errors import AdapterError
from kvcanary_kernels.record.layout import Identity


class HandleV2(LoadingHandle):
    """The canary of a worker with runner V2."""

    _every_table: Sequence[torch.Tensor] = ()  # of the forward that is prepared, those of states as well
    _rows, _places = b"", list[int]()  # of the last forward, where each row had one token; and where its tensors lay
    hooks = ("execute_model", "prepare_attn", "sample_tokens")

    def _told(self, scheduler_output: Any) -> None:
        if scheduler_output.finished_req_ids or scheduler_output.preempted_req_ids:
            self._leave(scheduler_output)
        self._moves = self._moving(scheduler_output)
        if self._loads is not None:
            self._flush()  # loads are into blocks that were free until now
            self._look_back(scheduler_output.scheduled_cached_reqs)

    def _look_back(self, cached: Any) -> None:
        """Rows that the scheduler has computed again from an earlier entry: of their loads, some failed."""
        states = self.runner.req_states
        held = getattr(states, "num_computed_tokens_np", None)
        if self.canary is None or held is None or self._max_new > 1:  # rejected drafts take rows back in every step
            return
        numbers = [states.req_id_to_index[name] for name in cached.req_ids]
        for place in np.flatnonzero(held[numbers] > cached.num_computed_tokens).tolist():
            number, now = numbers[place], cached.num_computed_tokens[place]
            self._taken_back(cached.req_ids[place], number, int(held[number]), now)

    def _begin_again(self, name: str, number: int, before: int, now: int) -> None:
        """Mode heal: the runner's counts of entries and tokens go back with the scheduler's, too (vllm#49250)."""
        if self.canary is not None:
            self.canary.take_back(number, name, before, now, (), Identity())
        if self._healing is None:
            return
        states = self.runner.req_states
        states.num_computed_tokens.stage_write_elem(number, now)
        states.num_computed_tokens.apply_write()
        states.total_len.gpu[number] = int(states.prefill_len.np[number])  # what was sampled from it did not leave

    def _leave(self, scheduler_output: Any) -> None:
        """Requests end or are preempted."""
        gone = [*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())]
        numbers = self.runner.req_states.req_id_to_index
        gone = [name for name in gone if name in numbers]
        if self.canary is not None:
            self.canary.leave([numbers[name] for name in gone], gone)

    def _come(self, requests: Sequence[Any]) -> None:
        """Requests begin or are resumed."""
        numbers, new = self.runner.req_states.req_id_to_index, []
        for request in requests:
            tokens = None if request.prompt_embeds is not None else request.prefill_token_ids
            number, length = numbers[request.req_id], request.num_computed_tokens
            new.append((number, request.req_id, tokens, length, self.identities.of(request, request.req_id)))
        if self.canary is not None:
            self._admit(self.canary, new, [request.mm_features for request in requests])
            judge_kept(self.canary, self._tokens[0], [own[:3] for own in new])
        if self._loads is not None:
            self._loads.expect(new)

    def _prepare_attn(self, method: Any, input_batch: Any) -> Any:
        if self._moves:
            self._moved(self._scheduled)
        result = method(input_batch)
        if self.is_armed:
            if self._scheduled.scheduled_new_reqs:
                self._come(self._scheduled.scheduled_new_reqs)
            if self._given:
                self._give()
            tables, slots = result
            self._every_table, tables = tables, self._of_caches(tables)
            if self._loads is not None:
                self._pending = self._forward_of(input_batch, tables, slots)
            elif not self._goes_on(input_batch, tables, slots):
                self._read(self._forward_of(input_batch, tables, slots))
        return result

    def _preprocess_state(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Behind `prepare_attn`: states were copied to where the forward goes on from them."""
        result = method(*args, **kwargs)
        if not self._drafts():
            self._take_prepared(None)
        return result

    def _state_metadata(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """`prepare_attn` of the runner's model state, behind `preprocess_state`: which states kernels go on from."""
        result = method(*args, **kwargs)
        self._take_prepared(result)
        return result

    def _postprocess_state(self, method: Any, idx_mapping: Any, num_sampled: Any, *args: Any, **kwargs: Any) -> Any:
        """Behind the sampler: of each row so many tokens were accepted, in batch order."""
        result = method(idx_mapping, num_sampled, *args, **kwargs)
        self._accepted(torch.full_like(idx_mapping, num_sampled) if isinstance(num_sampled, int) else num_sampled)
        return result

    def _take_prepared(self, metadata: Any) -> None:
        tables, self._every_table = self._every_table, ()
        if self.is_armed and tables:
            self._take(tables, metadata)

    def _goes_on(self, batch: Any, tables: Sequence[torch.Tensor], slots: torch.Tensor) -> bool:
        """Whether the last forward comes once more, each row by one entry, and was read so."""
        n = batch.num_reqs
        if batch.num_tokens != n:
            self._rows = b""
            return False
        rows, used = batch.idx_mapping_np[:n].tobytes(), (batch.seq_lens, batch.query_start_loc, batch.input_ids)
        places = [tensor.data_ptr() for tensor in (*used, batch.positions, slots, *tables)]
        goes_on = rows == self._rows and places == self._places
        self._rows, self._places = rows, places
        return goes_on and self._read_again()

    def _pre_forward(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin_loads()
        result = method(*args, **kwargs)
        self._judge_loads()
        return result

    def _propose(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if self._is_running and self.canary is not None:
            self.canary.took(kwargs["num_rejected"] if "num_rejected" in kwargs else args[self._rejected_at])
        return result

    def _forward_of(self, batch: Any, tables: Sequence[torch.Tensor], slots: torch.Tensor) -> Forward:
        n = batch.num_reqs
        new = 1 if batch.num_tokens == n else int(batch.num_scheduled_tokens.max())  # a live row has one at least
        names = batch.req_ids if len(batch.req_ids) == n else batch.req_ids[:n]
        kind = "decode" if new == 1 else "verify" if new <= self._max_new else "prefill"
        starts = self._starts if self._starts_at == batch.query_start_loc.data_ptr() else batch.query_start_loc
        return Forward(
            names, batch.idx_mapping_np[:n], (kind, 0), batch.seq_lens_cpu_upper_bound, batch.num_tokens, tables,
            batch.seq_lens, starts, batch.input_ids, batch.positions, self._rows_of(slots), self._tokens,
        )  # fmt: skip

    def _rows_of(self, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        """By group, where this step writes: nearly always the rows of the runner's own buffer."""
        return self._slots if slots.data_ptr() == self._slots_at else self._of_caches(list(slots))

    def _bind(self) -> PagedCanary:
        self._rows = b""
        runner, canary = self.runner, super()._bind()
        speculator = getattr(runner, "speculator", None)
        if speculator is not None and self._late_layers() and replaced_by(speculator, "propose") is None:
            self._rejected_at = list(inspect.signature(speculator.propose).parameters).index("num_rejected")
            self._hook(speculator, ("propose",))
        if self._states is not None and replaced_by(runner.model_state, "preprocess_state") is None:
            self._hook(runner.model_state, ("preprocess_state",))
            if self._drafts():
                self.replaced.replace(runner.model_state, "prepare_attn", self._state_metadata)
                self._hook(runner.model_state, ("postprocess_state",))
        connector = getattr(runner, "kv_connector", None)
        if self._loads is not None and replaced_by(connector, "pre_forward") is None:
            self._hook(connector, ("pre_forward",))
        return canary

    def _connector(self) -> Any:
        return getattr(getattr(self.runner, "kv_connector", None), "kv_connector", None)

    def _new_canary(self) -> PagedCanary:
        runner, tables, states = self.runner, self.runner.block_tables, self.runner.req_states
        if tables.cp_size != 1 or getattr(runner, "pcp_manager", None) is not None:
            raise AdapterError("context parallelism is not followed: set its sizes to 1, or unset KVCANARY_MODE")
        self._max_new = 1 + int(getattr(runner, "num_speculative_steps", 0))
        if self.config.mode == "heal":
            self._expect_healing()
        self._slots, most = self._of_caches(list(tables.slot_mappings)), tables.slot_mappings.shape[1]
        self._slots_at = tables.slot_mappings.data_ptr()
        self._tokens = states.all_token_ids.gpu, states.total_len.gpu
        self._starts = runner.input_buffers.query_start_loc
        self._starts_at = self._starts.data_ptr()
        own = tables.max_num_reqs, self._max_new, most, runner.device
        return PagedCanary(self.config, *own, has_tokens=True, can_heal=True)

    def _table_block(self, group: int) -> tuple[int, int]:
        tables = self.runner.block_tables
        ratios = getattr(tables, "blocks_per_kv_block", None)  # until 0.31; then tables are by the manager's blocks
        if ratios is None:
            return tables.block_sizes[group], 1
        return self.runner.kernel_block_sizes[group], ratios[group]

    def _block_tables(self) -> Sequence[torch.Tensor]:
        return self.runner.block_tables.input_block_tables

    def _drafts(self) -> bool:
        return self._max_new > 1

    def _late_layers(self) -> Collection[str]:
        return getattr(getattr(self.runner, "speculator", None), "draft_attn_layer_names", None) or ()

    def _empty_forward(self) -> Forward:
        tables, held = self._of_caches(self._block_tables()), self.runner.input_buffers
        return Forward(
            (), np.empty(0, dtype=np.int64), ("decode", 0), torch.empty(0, dtype=torch.int64), 0, tables,
            held.seq_lens, held.query_start_loc, held.input_ids, held.positions, self._slots, self._tokens,
        )  # fmt: skip

    def _held(self) -> Collection[int]:
        return list(self.runner.req_states.req_id_to_index.values())

    def _lines_of(self, request: str, number: int) -> Sequence[torch.Tensor]:
        return [table[number] for table in self._lines()]

    def _lines(self) -> Sequence[torch.Tensor]:
        return [table.gpu for table in self._of_caches(self.runner.block_tables.block_tables)]
