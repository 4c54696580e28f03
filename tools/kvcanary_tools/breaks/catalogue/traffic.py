"""Cases that several breaks share: one shape of draft, schedule or pool each."""

from __future__ import annotations

from kvcanary_tools.breaks.cases import Case

TREE = Case()
TREE_PAGED = Case(topk=3, num_steps=3, draft="self", page_size=4, engine={"attention_backend": "paged"})
TREE_PAGED_KNOWN = Case(topk=4, num_steps=4, nodes=12, page_size=4, engine={"attention_backend": "paged"})
TREE64 = Case(page_size=64, topk=8, num_steps=2, nodes=8)
CHAIN = Case(topk=1, num_steps=4, draft="self")
CHAIN_KNOWN = Case(topk=1, num_steps=4)
OVERLAP = Case(engine={"schedule": "overlap"})
GRAPH = Case(engine={"graphs": "on"})
GRAPH_OVERLAP = Case(engine={"graphs": "on", "schedule": "overlap"})
GRAPH_CHAIN = Case(topk=1, num_steps=4, engine={"graphs": "on", "schedule": "overlap"})
PLAIN = Case(draft="none")
PLAIN_GRAPH = Case(draft="none", engine={"graphs": "on", "schedule": "overlap"})
ADAPTIVE = Case(topk=1, num_steps=5, engine={"adaptive_steps": True})
PRESSED = Case(
    page_size=16, topk=2, num_steps=2, pages=22, first=5, engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16}
)
HOST = Case(
    page_size=4,
    topk=2,
    num_steps=2,
    pages=52,
    first=5,
    engine={"new_token_ratio": 0.0, "prefill_chunk_tokens": 16, "host_pages": 64},
)
SPLIT = Case(
    page_size=8, topk=1, num_steps=2, first=6, draft="known", engine={"max_device_tokens": 160, "device_turn": 2}
)
WINDOW = Case(window=12, page_size=4, topk=2, num_steps=2, new=40)
FP8 = Case(engine={"kv_cache_dtype": "fp8_e4m3"})
FP8_PAGED = Case(topk=3, num_steps=3, draft="self", engine={"kv_cache_dtype": "fp8_e4m3", "attention_backend": "paged"})
SHARED = Case(shared=16, repeats=True, engine={"prefill_chunk_tokens": 8})
CHUNKED = Case(prompt=30, shared=0, engine={"prefill_chunk_tokens": 8})
EDGE = Case(page_size=64, topk=4, num_steps=3, nodes=8, engine={"context_length": 60})
