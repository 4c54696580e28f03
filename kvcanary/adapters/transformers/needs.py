"""Needs: the names and parameters of transformers that each path uses; one that is gone closes its own path alone."""

from __future__ import annotations

from collections.abc import Mapping

import transformers

from kvcanary.adapters.compatibility import Needed, accept, missing

#: Releases (major and minor) that the tests of this adapter ran with, oldest first.
TESTED = ("5.14", "5.16", "5.17", "5.20", "5.23", "5.24")
_CACHE, _LAYER = "transformers.cache_utils:Cache.", "transformers.cache_utils:CacheLayerMixin."
_PAGED = "transformers.generation.continuous_batching.cache:PagedAttentionCache."
_GENERATION = "transformers.generation.utils:GenerationMixin."
_STORED = ("self", "key_states", "value_states", "layer_idx")
_PLACED = ("self", "request_id", "past_length", "query_length", "read_index", "write_index")
_BATCHING = (
    Needed(f"{_GENERATION}generate_batch", ("self",)),
    Needed(f"{_PAGED}extend_read_and_write_indices", _PLACED),
    Needed(f"{_PAGED}free_blocks", ("self", "request_id")),
)
Alternatives = tuple[tuple[Needed, ...], ...]
#: By path, the names that it uses. Where releases differ there are several lists, the newest last: one must be whole.
PATHS: Mapping[str, Alternatives] = {
    "generate": (
        (
            Needed(f"{_GENERATION}generate", ("self",)),
            Needed(f"{_CACHE}update", _STORED),
            Needed(f"{_LAYER}update", ("self", "key_states", "value_states")),
            Needed(f"{_LAYER}get_seq_length", ("self",)),
        ),
    ),
    "tokens of rows": (
        (
            Needed(f"{_GENERATION}prepare_inputs_for_generation", ("self", "input_ids", "next_sequence_length")),
            Needed(f"{_GENERATION}_prefill", ("self", "input_ids", "generation_config", "model_kwargs")),
        ),
    ),
    "crop": (
        (Needed(f"{_CACHE}crop", ("self", "max_length")),),  # 5.14
        (Needed(f"{_CACHE}crop", ("self", "tokens_to_remove")),),
    ),
    "reorder_cache": ((Needed(f"{_CACHE}reorder_cache", ("self", "beam_idx")),),),
    "batch_repeat_interleave": ((Needed(f"{_CACHE}batch_repeat_interleave", ("self", "repeats")),),),
    "batch_select_indices": ((Needed(f"{_CACHE}batch_select_indices", ("self", "indices")),),),
    "reset": ((Needed(f"{_CACHE}reset", ("self",)),),),
    "generate_batch": (
        (*_BATCHING, Needed(f"{_PAGED}update", (*_STORED, "read_index", "write_index"))),  # 5.14 to 5.17
        (*_BATCHING, Needed(f"{_PAGED}update", (*_STORED, "kwargs"))),
    ),
    "prefix sharing": ((Needed(f"{_PAGED}search_prefix_match", ("self", "request_id", "prompt_ids")),),),
    "forks": (
        (
            Needed(f"{_PAGED}copy_cache"),  # 5.14 to 5.17
            Needed(f"{_PAGED}fork_request"),
        ),
        (
            Needed(f"{_PAGED}perform_cache_copy"),
            Needed(f"{_PAGED}prepare_fork_request"),
        ),
    ),
}
#: Where each of them is closed there is nothing left to watch.
ENTRIES = ("generate", "generate_batch")
NEEDED = tuple(need for lists in PATHS.values() for need in lists[-1])


def check(version: str | None = None) -> list[str]:
    """What speaks against attaching to the transformers that is installed, one sentence each; empty: nothing."""
    refusal = accept("transformers", transformers.__version__ if version is None else version, TESTED)
    closed = closed_paths()
    nothing_left = [closed[path] for path in ENTRIES] if closed.keys() >= set(ENTRIES) else []
    return [*([refusal] if refusal else []), *nothing_left]


def closed_paths() -> dict[str, str]:
    """By path, what is gone of its names, one sentence; paths that are whole are left out."""
    return {path: "; ".join(gone) for path, lists in PATHS.items() if (gone := _gone(lists))}


def _gone(lists: Alternatives) -> list[str]:
    """Of the newest list, unless one of them is whole."""
    gone = [missing(needs) for needs in lists]
    return [] if [] in gone else gone[-1]
