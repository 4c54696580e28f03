"""A runner V2 without a model: what vLLM's does to its state in a step, and nothing else, so that hooks can be timed.

Its rows have one token a step each; requests come and go as they are told. Tensors lie where vLLM keeps them, for the
whole life of the runner, and each step hands out views of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

BLOCK, ROWS, LENGTH, TOKENS = 16, 64, 4096, 2048
HEADS, DIM, LAYERS = 2, 16, 4
BLOCKS = ROWS * LENGTH // BLOCK // 2


class Store:
    """A backend that packs K and V into the last axis of (blocks, heads, block, 2 * dim)."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        live = slot_mapping >= 0
        slots = slot_mapping[live]
        kv_cache[slots // BLOCK, :, slots % BLOCK] = torch.cat((key, value), -1)[: len(slot_mapping)][live]


class Output:
    """Of a step; its tokens are there when somebody asks for them."""

    def get_output(self) -> None:
        return None


class BareRunner:
    """Its methods are those that a canary replaces."""

    def __init__(self, device: str) -> None:
        self.device, self.num_speculative_steps = torch.device(device), 0
        self.speculator, self.kv_connector, self.pcp_manager = None, None, None

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
        spec.sliding_window = None
        names = [f"layer{number}" for number in range(LAYERS)]
        self.kv_caches = [zeros(BLOCKS, BLOCK, HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2) for _ in names]
        context = {
            name: SimpleNamespace(impl=Store(), kv_cache=cache, kv_cache_torch_dtype=torch.bfloat16)
            for name, cache in zip(names, self.kv_caches, strict=True)
        }
        self.compilation_config = SimpleNamespace(static_forward_context=context)
        group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)
        width = LENGTH // BLOCK
        self.block_tables = SimpleNamespace(
            block_sizes=[BLOCK], max_num_reqs=ROWS, cp_size=1, input_block_tables=[zeros(ROWS, width)],
            block_tables=[SimpleNamespace(gpu=zeros(ROWS, width))], slot_mappings=zeros(1, TOKENS, dtype=torch.int64),
        )  # fmt: skip
        self.kernel_block_sizes = [BLOCK]
        self.req_states = SimpleNamespace(
            req_id_to_index={}, all_token_ids=SimpleNamespace(gpu=zeros(ROWS, LENGTH)),
            total_len=SimpleNamespace(gpu=zeros(ROWS)),
        )  # fmt: skip
        self.input_buffers = SimpleNamespace(
            input_ids=zeros(TOKENS), positions=zeros(TOKENS, dtype=torch.int64), query_start_loc=zeros(ROWS + 1),
            seq_lens=zeros(ROWS),
        )  # fmt: skip
        self.free, self.lengths = list(range(ROWS)), np.zeros(ROWS, dtype=np.int32)

    def execute_model(self, scheduler_output: Any) -> None:
        rows = self.req_states.req_id_to_index
        for name in scheduler_output.finished_req_ids:
            self.free.append(rows.pop(name))
        for new in scheduler_output.scheduled_new_reqs:
            rows[new.req_id] = self.free.pop()
            self.lengths[rows[new.req_id]] = new.num_computed_tokens
        self.update_requests(scheduler_output)
        self.prepare_attn(self.batch_of(scheduler_output))

    def batch_of(self, output: Any) -> Any:
        names, buffers = list(output.num_scheduled_tokens), self.input_buffers
        scheduled = np.array(list(output.num_scheduled_tokens.values()), dtype=np.int32)
        numbers, total = np.array([self.req_states.req_id_to_index[name] for name in names], dtype=np.int32), 0
        self.lengths[numbers] += scheduled
        n, total = len(names), int(scheduled.sum())
        return SimpleNamespace(
            req_ids=names, num_reqs=n, idx_mapping_np=numbers, num_tokens=total, num_scheduled_tokens=scheduled,
            query_start_loc=buffers.query_start_loc[: n + 1], seq_lens=buffers.seq_lens[:n],
            seq_lens_cpu_upper_bound=torch.from_numpy(self.lengths[numbers]), input_ids=buffers.input_ids[:total],
            positions=buffers.positions[:total],
        )  # fmt: skip

    def update_requests(self, scheduler_output: Any) -> None: ...

    def prepare_attn(self, input_batch: Any) -> tuple[Any, Any]:
        tables = self.block_tables
        own = tuple(table[: input_batch.num_reqs] for table in tables.input_block_tables)
        return own, tables.slot_mappings[:, : input_batch.num_tokens]

    def sample_tokens(self, grammar_output: Any) -> Output:
        return Output()


class BareWorker:
    """What has a runner."""

    rank = 0

    def __init__(self, device: str) -> None:
        self.model_runner = BareRunner(device)

    def initialize_from_config(self, kv_cache_config: Any) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: Any = None) -> None: ...


def told(kind: int, blocks: list[int]) -> tuple[int, ...]:
    """As the scheduler's side of the plug-in notes what the pool did."""
    return (kind, len(blocks), *blocks) if blocks else ()


def outputs(seed: int, every: int) -> Iterator[tuple[str, Any]]:
    """Steps of a scheduler without end, and of what kind each is.

    In one of `every` a request ends and another comes (`arriving`), in the next one the rows are others than before
    (`settling`), in the rest every row goes on by one (`quiet`). Blocks are granted as they are needed in all of them.
    """
    draw, number, free = np.random.default_rng(seed), 0, list(range(1, BLOCKS))
    lengths: dict[str, int] = {}
    blocks: dict[str, list[int]] = {}
    returned: list[int] = []
    step = -1
    while True:
        step += 1
        new, given, ended, old = [], [], [], list(lengths)
        if old and step % every == 0:
            ended = [old.pop(int(draw.integers(len(old))))]
            returned += blocks[ended[0]]
            free += blocks.pop(ended[0])
            del lengths[ended[0]]
        for name in old:
            lengths[name] += 1
            need = lengths[name] > len(blocks[name]) * BLOCK
            given.append(([free.pop(0)],) if need else None)
            blocks[name] += given[-1][0] if given[-1] else []
        counts = dict.fromkeys(old, 1)
        for _ in range(ROWS - len(old)) if not old or ended else ():
            name, length = f"request-{number}", int(draw.integers(100, 200)) if old else int(draw.integers(8, 24))
            number += 1
            blocks[name], free = free[: -(-length // BLOCK)], free[-(-length // BLOCK) :]
            lengths[name] = counts[name] = length
            tokens = [0] * length  # as the runner keeps them
            new.append(
                SimpleNamespace(
                    req_id=name, prompt_token_ids=tokens, prefill_token_ids=tokens, prompt_embeds=None,
                    num_computed_tokens=0, lora_request=None, mm_features=[], block_ids=(list(blocks[name]),),
                )
            )  # fmt: skip
        granted = [block for own in given if own for block in own[0]]
        granted += [block for data in new for block in data.block_ids[0]]
        freed, returned = returned, []
        cached = SimpleNamespace(req_ids=old, new_block_ids=given, num_computed_tokens=[lengths[name] for name in old])
        cached.resumed_req_ids = set()
        kind = "arriving" if new else "settling" if step % every == 1 else "quiet"
        yield kind, SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()), finished_req_ids=set(ended), preempted_req_ids=set(),
            new_block_ids_to_zero=None, kv_cache_block_copies=None,
            kvcanary_blocks=array("i", (step, *told(2, freed), *told(0, granted))).tobytes(),
        )  # fmt: skip
