"""The host tier, the split pool, windows, scales, and stores that go astray."""

# Edits are lines of source and stay as long as these.
# ruff: noqa: E501

from __future__ import annotations

from kvcanary_tools.breaks.broken import Break, Edit
from kvcanary_tools.breaks.cases import Case
from kvcanary_tools.breaks.catalogue.traffic import CHAIN, FP8, FP8_PAGED, SPLIT, TREE, WINDOW

BREAKS = (
    Break(
        "restore_into_wrong_page",
        "A block comes back from the host with its pages rotated by one",
        (
            Edit(
                "spec_engine.memory.cache.host_tier",
                "host.load(places, own)",
                "host.load(places, own.roll(self._page_size))",
            ),
        ),
        (
            Case(
                page_size=16,
                topk=2,
                num_steps=2,
                pages=14,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
            Case(
                page_size=4,
                topk=1,
                num_steps=2,
                pages=36,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
        ),
        ends=("T1",),
        cause="transfer",
    ),
    Break(
        "restore_only_target",
        "The draft's pages of a block do not come back",
        (
            Edit(
                "spec_engine.memory.cache.host_tier",
                "for host, own in zip(self._rows, slots, strict=True):\n                host.load(places, own)",
                "for host, own in list(zip(self._rows, slots, strict=True))[:1]:\n                host.load(places, own)",
            ),
        ),
        (
            Case(
                page_size=16,
                topk=2,
                num_steps=2,
                pages=14,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
            Case(
                page_size=4,
                topk=1,
                num_steps=2,
                pages=36,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
        ),
        ends=("T1",),
        cause="transfer",
    ),
    Break(
        "restore_one_page_less",
        "The last page of a block does not come back",
        (
            Edit(
                "spec_engine.memory.cache.host_tier",
                "host.load(places, own)",
                "host.load(places[:-self._page_size], own[:-self._page_size])",
            ),
        ),
        (
            Case(
                page_size=16,
                topk=2,
                num_steps=2,
                pages=14,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
            Case(
                page_size=4,
                topk=1,
                num_steps=2,
                pages=36,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
        ),
        ends=("T1",),
        cause="transfer",
    ),
    Break(
        "offload_of_other_place",
        "An offload writes another block's place",
        (
            Edit(
                "spec_engine.memory.cache.host_tier",
                "host.save(own, rows)",
                "host.save(own, (rows + self._page_size) % ((self.num_pages + 1) * self._page_size))",
            ),
        ),
        (
            Case(
                page_size=16,
                topk=2,
                num_steps=2,
                pages=14,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
            Case(
                page_size=4,
                topk=1,
                num_steps=2,
                pages=36,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
        ),
        ends=("T1",),
        cause="transfer",
    ),
    Break(
        "restored_length_one_more",
        "A restored request counts one token more than its block holds",
        (
            Edit(
                "spec_engine.memory.kv_memory",
                "request.committed_len = request.cached_len = block.length",
                "request.committed_len = request.cached_len = block.length + 1",
            ),
        ),
        (
            Case(
                page_size=16,
                topk=2,
                num_steps=2,
                pages=14,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
            Case(
                page_size=4,
                topk=1,
                num_steps=2,
                pages=36,
                first=5,
                engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64, "prefix_cache": False},
            ),
        ),
        ends=("ChunkError",),
        off=("ChunkError",),
    ),
    Break(
        "swap_out_of_changed_page_skipped",
        "A page that was written since it was saved counts as saved",
        (
            Edit(
                "spec_engine.memory.pools.split_pool",
                "for page in row.pages[row.first_new // self.page_size :]:\n                self._saved.pop(page, None)",
                "pass",
            ),
        ),
        (SPLIT,),
        ends=("R5", "T1", "R12"),
        cause="transfer",
    ),
    Break(
        "swap_in_first_only",
        "Of several pages that come back only the first is copied",
        (
            Edit(
                "spec_engine.memory.pools.split_pool",
                "places, target = slots_of(copied, self.page_size), slots_of(own, self.page_size)",
                "places, target = slots_of(copied[:1], self.page_size), slots_of(own[:1], self.page_size)",
            ),
        ),
        (SPLIT,),
        ends=("T1",),
        cause="transfer",
    ),
    Break(
        "swap_in_not_waited",
        "The forward does not wait for the copy of its pages",
        (
            Edit(
                "spec_engine.memory.pools.split_pool",
                'self._copy = side.submit("swap in", operation, reads=_names(pages), writes=pages)\n        self._streams.main.wait(self._copy)',
                'self._copy = side.submit("swap in", operation, reads=_names(pages), writes=pages)',
            ),
        ),
        (SPLIT,),
        ends=("O1",),
        cause="order",
    ),
    Break(
        "wanted_page_leaves",
        "A page that the next forward reads makes room",
        (
            Edit(
                "spec_engine.memory.pools.split_pool",
                "leaving = [page for page in self._places if page not in wanted][:lack]",
                "leaving = [page for page in self._places][-lack:]",
            ),
        ),
        (SPLIT,),
        ends=("ResidencyError",),
        off=("ResidencyError",),
    ),
    Break(
        "window_slides_a_page_early",
        "A window page is given back one page too early",
        (
            Edit(
                "spec_engine.memory.pools.window_pool",
                "end = max(done, first_visible(row.committed_len, self.window) // size * size)",
                "end = max(done, (first_visible(row.committed_len, self.window) // size + 1) * size)",
            ),
        ),
        (WINDOW,),
        ends=("WindowMapError",),
        off=("WindowMapError",),
    ),
    Break(
        "window_starts_late",
        "Rows of a windowed forward begin one entry late",
        (
            Edit(
                "spec_engine.core",
                "first_visible(length - new, window) for length, new",
                "first_visible(length - new, window) + (length > window + new) for length, new",
            ),
        ),
        (WINDOW,),
        ends=("R10",),
        cause=("windows", "lengths"),
    ),
    Break(
        "fp8_scales_not_moved",
        "A move takes the numbers and leaves the scales",
        (
            Edit(
                "spec_engine.memory.pools.fp8_pool",
                "self.parts = (self._bytes, self.scales)",
                "self.parts = (self._bytes, self.scales); self.move = lambda s, d: self._bytes.__setitem__((slice(None), d), self._bytes[:, s])",
            ),
        ),
        (
            FP8,
            FP8_PAGED,
        ),
        ends=("T1",),
        cause=("transfer", "scales"),
    ),
    Break(
        "fp8_scale_of_v_for_k",
        "K is stored with V's scale",
        (
            Edit(
                "spec_engine.memory.pools.fp8_pool",
                "self.scales[layer].index_copy_(0, slots, scales)",
                "self.scales[layer].index_copy_(0, slots, scales.flip(1))",
            ),
        ),
        (FP8,),
        ends=("R9",),
        cause=("scales", "transfer"),
    ),
    Break(
        "attention_slot_shift_in_layer",
        "Layer 1 of a verify stores one entry further",
        (
            Edit(
                "spec_engine.attention.base",
                "self.pool.store(layer, self.slots, k, v, self.substep)",
                "self.pool.store(layer, self.slots.roll(1) if layer == 1 and len(self.slots) > 8 else self.slots, k, v, self.substep)",
            ),
        ),
        (TREE,),
        ends=("R9",),
        cause=("addressing", "transfer", "uninitialised", "order"),
    ),
    Break(
        "verify_window_one_further",
        "A verify writes and reads its window one slot further",
        (
            Edit(
                "spec_engine.step.runner",
                "slots=concat([table[row, end - num_nodes : end] for row, end in zip(rows, kv_lens, strict=True)])",
                "slots=concat([table[row, end - num_nodes + 1 : end + 1] for row, end in zip(rows, kv_lens, strict=True)])",
            ),
        ),
        (
            TREE,
            CHAIN,
        ),
        ends=("R12",),
        cause=("lengths", "addressing", "uninitialised"),
    ),
    Break(
        "standalone_not_ahead",
        "A draft model of its own forgets that its pool is one entry ahead",
        (
            Edit(
                "spec_engine.drafting.drafter",
                "self._grow(growth, batch.shifted([self.head.ahead] * len(batch)), num_steps)",
                "self._grow(growth, batch, num_steps)",
            ),
        ),
        (CHAIN,),
        ends=("R10",),
        cause="lengths",
    ),
)
