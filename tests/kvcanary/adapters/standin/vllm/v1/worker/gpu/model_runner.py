"""Runner V2 over plain torch: K and V depend on token and position, a token on the one before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm import RELEASE
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, KVConnector
from vllm.v1.worker.gpu.states import RequestState

VOCABULARY = 97


class Impl:
    """A backend's store: K and V packed in the last axis of (blocks, heads, block_size, 2 * dim)."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        size, live = kv_cache.shape[2], slot_mapping >= 0
        slots = slot_mapping[live]
        packed = torch.cat((key, value), -1)[: len(slot_mapping)][live]
        kv_cache[slots // size, :, slots % size] = packed


class Speculator:
    """It stores one draft layer for every entry of the step, rejected ones included."""

    num_steps = 2

    def __init__(self, runner: GPUModelRunner, layers: list[str]) -> None:
        self.runner, self.draft_attn_layer_names = runner, set(layers)

    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
        num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
    ):  # fmt: skip
        runner = self.runner
        for name in sorted(self.draft_attn_layer_names):
            runner.store(name, input_batch, slot_mappings[0])
        tables, starts = runner.block_tables, torch.arange(input_batch.num_reqs + 1)
        positions = input_batch.seq_lens[: input_batch.num_reqs].long() - num_rejected
        for step in range(1, self.num_steps):  # draft decodes write behind what is accepted, over the shared buffer
            slots = tables.compute_slot_mappings(
                input_batch.idx_mapping, starts, positions + step - 1, input_batch.num_reqs
            )
            for name in self.draft_attn_layer_names:
                runner.store(name, None, slots[0], positions + 13)


class GPUModelRunner:
    def __init__(self, max_num_reqs=8, max_model_len=256, max_num_tokens=512, drafts=(), connector=None, packed=True):
        self.device = torch.device("cpu")
        self.max_model_len, self.max_num_tokens, self.max_num_reqs = max_model_len, max_num_tokens, max_num_reqs
        self.compilation_config = SimpleNamespace(static_forward_context={})
        self.speculator = Speculator(self, list(drafts)) if drafts else None
        self.num_speculative_steps = Speculator.num_steps if drafts else 0
        self.kv_connector = KVConnector() if connector is None else ActiveKVConnector(connector)
        self.pcp_manager, self.kv_caches, self.attn_groups = None, [], []
        self.input_buffers = InputBuffers(max_num_reqs, max_num_tokens)
        self.req_states = RequestState(max_num_reqs, max_model_len)
        self.batch: InputBatch | None = None

    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.kernel_block_sizes = [min(spec.block_size, 4) for spec in specs]
        self.block_tables = BlockTables(
            [spec.block_size for spec in specs], self.max_num_reqs, self.max_num_tokens,
            [self.max_model_len // spec.block_size for spec in specs], self.device,
            *((self.kernel_block_sizes,) if RELEASE < (0, 32) else ()),
        )  # fmt: skip
        context = self.compilation_config.static_forward_context
        for group, size in zip(kv_cache_config.kv_cache_groups, self.kernel_block_sizes, strict=True):
            spec = group.kv_cache_spec
            blocks = kv_cache_config.num_blocks * spec.block_size // size
            for name in group.layer_names:
                # memory as (blocks, block_size, heads, 2 * dim), seen as (blocks, heads, block_size, 2 * dim)
                memory = torch.zeros(blocks, size, spec.num_kv_heads, 2 * spec.head_size, dtype=spec.dtype)
                own = context.setdefault(name, SimpleNamespace(impl=Impl(), kv_cache_torch_dtype=spec.dtype))
                own.kv_cache, own.group = memory.transpose(1, 2), kv_cache_config.kv_cache_groups.index(group)
                self.kv_caches.append(own.kv_cache)

    def finish_requests(self, scheduler_output) -> None:
        for name in scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()):
            number = self.req_states.req_id_to_index.pop(name, None)
            if number is not None:
                self.req_states.free.append(number)

    def add_requests(self, scheduler_output) -> None:
        states = self.req_states
        for new in scheduler_output.scheduled_new_reqs:
            number = states.req_id_to_index[new.req_id] = states.free.pop()
            length = len(new.prefill_token_ids)
            states.all_token_ids.gpu[number, :length] = torch.tensor(new.prefill_token_ids, dtype=torch.int32)
            states.total_len.gpu[number] = states.prefill_len.np[number] = length
            states.num_computed_tokens_np[number] = new.num_computed_tokens
            self.block_tables.append_block_ids(number, new.block_ids, overwrite=True)

    def update_requests(self, scheduler_output) -> None:
        cached, states = scheduler_output.scheduled_cached_reqs, self.req_states
        for name, count, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            number = states.req_id_to_index[name]
            states.num_computed_tokens_np[number] = count
            if blocks is not None:
                self.block_tables.append_block_ids(number, blocks, overwrite=False)
        if scheduler_output.new_block_ids_to_zero:
            self.zero(scheduler_output.new_block_ids_to_zero)
        if scheduler_output.kv_cache_block_copies:
            self.copy(scheduler_output.kv_cache_block_copies)

    def zero(self, blocks) -> None:
        for _, cache, ratio in self.caches():
            for block in blocks:
                cache[block * ratio : (block + 1) * ratio] = 0

    def copy(self, copies) -> None:
        for _, cache, ratio in self.caches():
            for src, dst in copies:
                cache[dst * ratio : (dst + 1) * ratio] = cache[src * ratio : (src + 1) * ratio]

    def caches(self):
        for name, layer in self.compilation_config.static_forward_context.items():
            size = self.kv_cache_config.kv_cache_groups[layer.group].kv_cache_spec.block_size
            yield name, layer.kv_cache, size // layer.kv_cache.shape[2]

    def prepare_attn(self, input_batch):
        tables = self.block_tables.gather_block_tables(input_batch.idx_mapping, input_batch.num_reqs_after_padding)
        slots = self.block_tables.compute_slot_mappings(
            input_batch.idx_mapping, input_batch.query_start_loc, input_batch.positions, input_batch.num_tokens
        )
        if RELEASE >= (0, 33):
            self.hide_below_windows(input_batch, tables)
        return tables, slots

    def hide_below_windows(self, batch, tables) -> None:
        """Blocks that no token of this step sees are block 0 for attention; the tables by row keep them."""
        starts = batch.query_start_loc
        past = batch.seq_lens - (starts[1:] - starts[:-1])
        for group, table in zip(self.kv_cache_config.kv_cache_groups, tables, strict=True):
            window, size = group.kv_cache_spec.sliding_window, group.kv_cache_spec.block_size
            for row, first in enumerate((past + 1 - window).tolist() if window else ()):
                table[row, : max(first, 0) // size] = 0

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False) -> None:
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output)
        self.update_requests(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return
        self.batch = batch = self.make_batch(scheduler_output)
        _, slots = self.prepare_attn(batch)
        self.kv_connector.before(scheduler_output, batch)
        drafts = self.speculator.draft_attn_layer_names if self.speculator else ()
        for name, layer in self.compilation_config.static_forward_context.items():
            if name not in drafts:
                if isinstance(self.kv_connector, ActiveKVConnector):  # attention waits for its own layer
                    self.kv_connector.kv_connector.wait_for_layer_load(name)
                self.store(name, batch, slots[layer.group])
        self.kv_connector.post_forward(scheduler_output.finished_req_ids)

    def make_batch(self, scheduler_output) -> InputBatch:
        states, counts = self.req_states, scheduler_output.num_scheduled_tokens
        names = sorted(counts, key=counts.get)
        numbers = [states.req_id_to_index[name] for name in names]
        scheduled = np.array([counts[name] for name in names], dtype=np.int32)
        past = [int(states.num_computed_tokens_np[number]) for number in numbers]
        tokens, positions = [], []
        for name, number, before in zip(names, numbers, past, strict=True):
            own = states.all_token_ids.gpu[number].tolist()
            total, drafts = (
                int(states.total_len.gpu[number]),
                scheduler_output.scheduled_spec_decode_tokens.get(name, []),
            )
            row = (own[:total] + drafts)[before : before + counts[name]]
            tokens += row
            positions += range(before, before + counts[name])
        lengths = torch.tensor([before + counts[name] for before, name in zip(past, names, strict=True)])
        starts = torch.tensor(np.concatenate(([0], np.cumsum(scheduled))))
        held, n, total = self.input_buffers, len(names), len(tokens)
        for own, values in (
            (held.seq_lens, lengths),
            (held.query_start_loc, starts),
            (held.input_ids, torch.tensor(tokens)),
            (held.positions, torch.tensor(positions)),
        ):
            own[: len(values)] = values
        return InputBatch(
            names, n, n, torch.tensor(numbers, dtype=torch.int32), np.array(numbers, dtype=np.int32), scheduled, total,
            total, held.query_start_loc[: n + 1], held.seq_lens[:n], lengths, held.input_ids[:total],
            held.positions[:total],
        )  # fmt: skip

    def store(self, name, batch, slots, tokens=None) -> None:
        layer = self.compilation_config.static_forward_context[name]
        heads, dim = layer.kv_cache.shape[1], layer.kv_cache.shape[3] // 2
        fed = tokens if batch is None else batch.input_ids.long() * 31 + batch.positions
        salt = 1 + list(self.compilation_config.static_forward_context).index(name)
        key = torch.sin(fed.float()[:, None, None] * salt + torch.arange(heads * dim).view(heads, dim))
        layer.impl.do_kv_cache_update(layer, key, key.cos(), layer.kv_cache, slots[: len(fed)])

    def sample_tokens(self, grammar_output):
        batch, states, rejected, given = self.batch, self.req_states, [], {}
        for row, name in enumerate(batch.req_ids):
            number, length = states.req_id_to_index[name], int(batch.seq_lens[row])
            total = int(states.total_len.gpu[number])
            if length < total:
                rejected.append(0)
                given[name] = []
                continue
            drafts = length - total  # one of them is accepted, if there are any
            accepted = min(drafts, 1)
            where = int(batch.query_start_loc[row + 1]) - drafts
            new = batch.input_ids[where : where + accepted].tolist()
            new += [(int(batch.input_ids[where + accepted - 1]) * 7 + length) % VOCABULARY]
            states.all_token_ids.gpu[number, total : total + len(new)] = torch.tensor(new, dtype=torch.int32)
            states.total_len.gpu[number] = total + len(new)
            rejected.append(drafts - accepted)
            given[name] = new
        if self.speculator is not None:
            counts = torch.tensor(rejected, dtype=torch.int32)
            slots = self.block_tables.slot_mappings
            self.speculator.propose(batch, None, slots, None, None, counts, counts, None, None, None, None)
        return AsyncOutput(given)
