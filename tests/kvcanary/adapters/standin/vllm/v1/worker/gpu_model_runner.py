"""Runner V1 over plain torch: rows of the batch move as requests come and go."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from vllm import RELEASE
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
from vllm.v1.outputs import SamplerOutput
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.model_runner import VOCABULARY, Impl
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class GPUModelRunner:
    def __init__(self, max_num_reqs=8, max_model_len=256, max_num_tokens=512):
        self.device, self.vllm_config = torch.device("cpu"), SimpleNamespace(kv_transfer_config=None)
        self.max_model_len, self.max_num_tokens, self.max_num_reqs = max_model_len, max_num_tokens, max_num_reqs
        self.dcp_world_size, self.num_spec_tokens, self.requests = 1, 0, {}
        self.compilation_config = SimpleNamespace(static_forward_context={})
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32)
        self.optimistic_seq_lens_cpu = torch.zeros(max_num_reqs, dtype=torch.int32)
        self.query_start_loc = CpuGpuBuffer(max_num_reqs + 1, dtype=torch.int32)
        self.num_accepted_tokens = CpuGpuBuffer(max_num_reqs, dtype=torch.int32)
        self.input_ids = CpuGpuBuffer(max_num_tokens, dtype=torch.int32)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.input_batch, self.kv_caches, self.attn_groups = InputBatch(max_num_reqs), [], []

    def initialize_kv_cache(self, kv_cache_config) -> None:
        self.kv_cache_config = kv_cache_config
        tables, context = [], self.compilation_config.static_forward_context
        for group in kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            size = min(spec.block_size, 4)
            kernel = (size,) if RELEASE < (0, 32) else ()
            tables.append(
                BlockTable(
                    spec.block_size, self.max_num_reqs, self.max_model_len // spec.block_size, self.max_num_tokens,
                    False, self.device, *kernel,
                )
            )  # fmt: skip
            blocks = kv_cache_config.num_blocks * spec.block_size // size
            for name in group.layer_names:
                memory = torch.zeros(blocks, size, spec.num_kv_heads, 2 * spec.head_size, dtype=spec.dtype)
                own = context.setdefault(name, SimpleNamespace(impl=Impl(), kv_cache_torch_dtype=spec.dtype))
                own.kv_cache, own.group = memory.transpose(1, 2), len(tables) - 1
                self.kv_caches.append(own.kv_cache)
        self.input_batch.block_table = MultiGroupBlockTable(tables)

    def _update_states(self, scheduler_output) -> None:
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name, None)
        self.kv_connector = SimpleNamespace(failed=frozenset())  # what a connector said of the last step
        self.zero(scheduler_output.new_block_ids_to_zero or ())
        cached = scheduler_output.scheduled_cached_reqs
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = CachedRequestState(
                list(new.prompt_token_ids),
                new.num_computed_tokens,
                [list(blocks) for blocks in new.block_ids],
                mm_features=new.mm_features,
            )
        for name, count, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            state = self.requests[name]
            state.num_computed_tokens = count
            end = count + scheduler_output.num_scheduled_tokens[name]
            del state.output_token_ids[max(end - len(state.prompt_token_ids), 0) :]  # what a failed load has discarded
            for own, added in zip(state.block_ids, blocks or (), strict=False):
                own.extend(added)
        # the rows that are left move up, the new ones follow: nobody keeps his row
        batch, scheduled = self.input_batch, scheduler_output.num_scheduled_tokens
        held = [name for name in reversed(batch.req_ids) if name in scheduled and name in self.requests]
        batch.req_ids = held + [name for name in scheduled if name not in held]
        batch.req_id_to_index = {name: row for row, name in enumerate(batch.req_ids)}
        for row, name in enumerate(batch.req_ids):
            state = self.requests[name]
            batch.num_computed_tokens_cpu[row] = state.num_computed_tokens
            for table, blocks in zip(batch.block_table.tables, state.block_ids, strict=True):
                table.fill_row(row, blocks)

    def zero(self, blocks) -> None:
        for layer in self.compilation_config.static_forward_context.values():
            ratio = (
                self.kv_cache_config.kv_cache_groups[layer.group].kv_cache_spec.block_size // layer.kv_cache.shape[2]
            )
            for block in blocks:
                layer.kv_cache[block * ratio : (block + 1) * ratio] = 0

    def _prepare_inputs(self, scheduler_output) -> None:
        batch, begin = self.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            state, count = self.requests[name], scheduler_output.num_scheduled_tokens[name]
            past, where = state.num_computed_tokens, slice(begin, begin + count)
            tokens = [*state.prompt_token_ids, *state.output_token_ids][past : past + count]
            self.input_ids.gpu[where] = torch.tensor(tokens, dtype=torch.int32)
            self.positions[where] = torch.arange(past, past + count)
            begin += count
            self.query_start_loc.gpu[row + 1 :] = begin
            self.seq_lens[row] = self.optimistic_seq_lens_cpu[row] = past + count
            for table in batch.block_table.tables:
                line, size = table.block_table.gpu[row].long(), table.block_size
                own = self.positions[where]
                table.slot_mapping.gpu[where] = line[own // size] * size + own % size

    def _build_attention_metadata(
        self, num_tokens, num_reqs, max_query_len, num_tokens_padded=None, num_reqs_padded=None,
        for_cudagraph_capture=False, slot_mappings=None,
    ):  # fmt: skip
        return {}, None

    def execute_model(self, scheduler_output, intermediate_tensors=None) -> None:
        self._update_states(scheduler_output)
        total = scheduler_output.total_num_scheduled_tokens
        if not total:
            return
        self._prepare_inputs(scheduler_output)
        tables = self.input_batch.block_table.tables
        self._build_attention_metadata(
            num_tokens=total, num_reqs=self.input_batch.num_reqs, max_query_len=1,
            slot_mappings={number: table.slot_mapping.gpu[:total] for number, table in enumerate(tables)},
        )  # fmt: skip
        connector = get_kv_transfer_group()
        if connector is not None:
            connector.start_load_kv()
        self._model_forward(total)
        if connector is not None:
            self.kv_connector.failed = frozenset(connector.get_block_ids_with_load_errors())

    def _model_forward(self, total) -> None:
        connector, tables = get_kv_transfer_group(), self.input_batch.block_table.tables
        fed = self.input_ids.gpu[:total].long() * 31 + self.positions[:total]
        for number, (name, layer) in enumerate(self.compilation_config.static_forward_context.items()):
            if connector is not None:
                connector.wait_for_layer_load(name)
            heads, dim = layer.kv_cache.shape[1], layer.kv_cache.shape[3] // 2
            key = torch.sin(fed.float()[:, None, None] * (1 + number) + torch.arange(heads * dim).view(heads, dim))
            slots = tables[layer.group].slot_mapping.gpu[:total]
            layer.impl.do_kv_cache_update(layer, key, key.cos(), layer.kv_cache, slots)

    def _update_states_after_model_execute(self, output_token_ids, scheduler_output) -> None:
        """What was accepted is counted, and states are copied into blocks that are full by it."""
        self.num_accepted_tokens.gpu[: len(output_token_ids)] = (output_token_ids >= 0).sum(1)

    def _sample(self, logits, spec_decode_metadata) -> SamplerOutput:
        """Of rows whose prompt goes on, too."""
        last = self.input_ids.gpu[self.query_start_loc.gpu[1 : self.input_batch.num_reqs + 1].long() - 1].long()
        return SamplerOutput(((last * 7 + self.seq_lens[: len(last)]) % VOCABULARY)[:, None])

    def sample_tokens(self, grammar_output):
        given, sampled = {}, self._sample(None, None).sampled_token_ids.tolist()
        for row, name in enumerate(self.input_batch.req_ids):
            state, length = self.requests[name], int(self.seq_lens[row])
            known = len(state.prompt_token_ids) + len(state.output_token_ids)
            given[name] = sampled[row] if length == known else []
            state.output_token_ids += given[name]
        return AsyncOutput(given)
