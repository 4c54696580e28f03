"""Engine settings: what is refused, and in what words."""

import pytest

from spec_engine import ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_size": 0}, "page_size must be a positive whole number, got 0"),
        ({"topk": -1}, "topk must be a positive whole number, got -1"),
        ({"context_length": 0}, "context_length must be a positive whole number, got 0"),
        ({"page_size": 12}, "page_size must be a power of two, got 12"),
        ({"draft": "medusa"}, "draft must be one of auto, eagle3, eagle, standalone, none, got 'medusa'"),
        ({"attend": "siblings"}, "attend must be one of ancestors, columns, got 'siblings'"),
        ({"schedule": "async"}, "schedule must be one of sync, overlap, got 'async'"),
        ({"new_token_ratio": 1.5}, r"new_token_ratio must lie in \[0, 1\], got 1.5"),
        (
            {"attention_backend": "flash"},
            "attention_backend must be one of torch, paged, block-table, dense, triton, triton-paged, flashinfer, "
            "got 'flash'",
        ),
        ({"dtype": "int4"}, "dtype must be one of auto, float32, float64, bfloat16, got 'int4'"),
        (
            {"attention_backend": "block-table", "topk": 4, "page_size": 16},
            "attention_backend 'block-table' reads draft trees with page_size 1 only, got topk 4 with page_size 16: "
            "those that can are torch, paged, dense",
        ),
        ({"topk": 2, "num_steps": 1, "num_draft_tokens": 4}, r"num_draft_tokens must lie in \[2, 3\], got 4"),
        ({"num_draft_tokens": 1}, "num_draft_tokens must lie in"),
        ({"acceptance": "guess"}, "acceptance must be one of match, tree, rejection, got 'guess'"),
        ({"acceptance": "tree", "threshold_acc": -0.1}, r"threshold_acc must lie in \[0, 1\], got -0.1"),
        ({"threshold_single": 0.5}, "must be 1 with acceptance 'match', got 0.5 and 1.0: only tree sampling has"),
        ({"acceptance": "rejection", "topk": 2}, "topk must be 1 with acceptance 'rejection', got 2: drafts are drawn"),
        (
            {"acceptance": "rejection", "draft": "none"},
            "acceptance 'rejection' needs drafts to accept, got",
        ),
        (
            {"topk": 1, "num_steps": 3, "num_draft_tokens": 3},
            r"num_draft_tokens must be num_steps \+ 1 = 4 where topk is 1, got 3: a chain is verified whole",
        ),
        ({"adaptive_steps": True}, "adaptive_steps needs topk 1, got 4"),
        ({"adaptive_steps": True, "topk": 1, "draft": "none"}, "adaptive_steps needs a draft, got draft 'none'"),
        ({"graphs": "maybe"}, "graphs must be one of off, on, got 'maybe'"),
        ({"graph_buckets": [0]}, "graph_buckets must be a positive whole number, got 0"),
        ({"graphs": "on", "attention_backend": "paged"}, "attention_backend must be torch or triton with graphs, got"),
        ({"graphs": "on", "attend": "columns"}, "attend must be ancestors with graphs, got 'columns'"),
        ({"graphs": "on", "adaptive_steps": True, "topk": 1}, "adaptive_steps must be False with graphs, got True"),
        ({"graphs": "on", "acceptance": "rejection", "topk": 1}, "acceptance must be match or tree with graphs, got"),
        ({"adaptive_steps": {2: (1,)}, "topk": 1}, r"candidates must begin at batch size 1, got \[2\]"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(settings, words):
    """Each message names the setting, the rule and the value."""
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)


@pytest.mark.parametrize(("topk", "num_steps", "nodes"), [(4, 5, 8), (1, 3, 4), (2, 1, 3), (2, 2, 7)])
def test_the_default_tree_takes_eight_nodes_or_all_there_are(topk, num_steps, nodes):
    """A chain keeps every candidate; a small tree has fewer than eight."""
    assert EngineConfig(topk=topk, num_steps=num_steps).num_draft_tokens == nodes


@pytest.mark.parametrize(("topk", "page_size", "draft"), [(1, 16, "auto"), (4, 1, "auto"), (4, 16, "none")])
def test_a_backend_without_tree_pages_reads_everything_else(topk, page_size, draft):
    """Chains on pages, trees on pages of one slot, and no drafting at all."""
    EngineConfig(attention_backend="block-table", topk=topk, page_size=page_size, draft=draft)


@pytest.mark.parametrize(
    ("settings", "choices", "nodes"),
    [
        ({"num_steps": 3}, (3,), 4),
        ({"num_steps": 3, "adaptive_steps": True}, (0, 1, 3, 5, 7), 8),
        ({"adaptive_steps": {1: (1, 2), 4: (0, 1)}}, (0, 1, 2), 3),
    ],
)
def test_chains_are_sized_for_the_longest_that_may_be_chosen(settings, choices, nodes):
    """Every T of every batch size, and N of the largest."""
    config = EngineConfig(topk=1, **settings)
    assert (config.step_choices, config.most_steps, config.most_nodes) == (choices, choices[-1], nodes)


@pytest.mark.parametrize(
    ("settings", "buckets"),
    [
        ({}, ()),
        ({"graphs": "on"}, (1, 2, 4, 8)),
        ({"graphs": "on", "max_running_requests": 1}, (1,)),
        ({"graphs": "on", "max_running_requests": 6}, (1, 2, 4, 6)),
        ({"graphs": "on", "graph_buckets": [4, 2, 4]}, (2, 4)),
    ],
)
def test_buckets_are_powers_of_two_and_the_largest_batch(settings, buckets):
    """Ascending, each once; none without graphs."""
    assert EngineConfig(**settings).buckets == buckets
