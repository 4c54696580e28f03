"""What ranks of an SGLang server compare: of a server's start, of a batch that is planned, of what a step gave."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from kvcanary import CanaryConfig
from kvcanary.adapters.hosted.sampled import new_group
from kvcanary.adapters.sglang import ranks
from kvcanary.errors import AdapterError
from kvcanary.ranks.levels import Levels


def batch_of(lengths: dict[str, int], cached: list[int], *, is_extend: bool) -> SimpleNamespace:
    """Requests by name with room for so many entries."""
    reqs = [SimpleNamespace(rid=name, kv=SimpleNamespace(kv_allocated_len=room)) for name, room in lengths.items()]
    return SimpleNamespace(
        reqs=reqs, prefix_lens=cached, forward_mode=SimpleNamespace(is_extend=lambda: is_extend)
    )  # fmt: skip


def rows_of(levels: Levels) -> dict[str, dict[str, list[int]]]:
    return {name: dict(own.rows()) for name, own in levels.items()}


def test_a_start_is_rows_and_slots() -> None:
    """Of all that ranks size by their own memory."""
    allocator = SimpleNamespace(size=96, page_size=4)
    assert rows_of(ranks.started(torch.zeros(5, 128), allocator)) == {"shape": {"": [5, 128, 96, 4]}}


def test_a_plan_is_room_and_what_the_cache_gave() -> None:
    """Lengths that a batch had when it was fed its prompts say nothing of a step that decodes."""
    allocator = SimpleNamespace(available_size=lambda: 40)
    prompts = batch_of({"a": 12, "b": 30}, [8, 0], is_extend=True)
    assert rows_of(ranks.planned(prompts, allocator)) == {"rows": {"a": [12, 8], "b": [30, 0]}, "pages": {"": [40]}}
    decoding = batch_of({"a": 13, "b": 31}, [7], is_extend=False)
    assert rows_of(ranks.planned(decoding, allocator))["rows"] == {"a": [13, 0], "b": [31, 0]}


@pytest.mark.parametrize(
    ("tokens", "accepted", "expected"),
    [
        (torch.tensor([5, 6]), None, {"a": [5], "b": [6]}),
        ([5, 6], None, {"a": [5], "b": [6]}),
        (torch.tensor([1, 2, 0, 3, 0, 0]), torch.tensor([2, 1]), {"a": [1, 2], "b": [3]}),
        (None, None, {}),
    ],
    ids=["a token a row", "a list", "accepted nodes", "none"],
)
def test_what_a_step_gave_is_what_was_accepted(tokens, accepted, expected) -> None:
    """Rows of a round with drafts are as wide as its trees; behind what was accepted lies anything."""
    result = SimpleNamespace(next_token_ids=tokens, accept_lens=accepted)
    given = ranks.given(batch_of({"a": 9, "b": 9}, [], is_extend=False), result)
    assert rows_of(given) == {"lengths": {name: [len(row)] for name, row in expected.items()}, "tokens": expected}
    assert [own.is_private for own in given.values()] == [False, True]


def test_a_step_of_embeddings_gives_no_tokens() -> None:
    """What SGLang returns of one has no field for them."""
    given = ranks.given(batch_of({"a": 9}, [0], is_extend=True), SimpleNamespace(embeddings=torch.zeros(1, 4)))
    assert rows_of(given) == {"lengths": {}, "tokens": {}}


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{"share": 0.5}, {"disable": frozenset({"X1"})}])
def test_nothing_is_compared_where_settings_say_so(alone, settings) -> None:
    """Some have no turn; X1 is disabled."""
    assert new_group([0], CanaryConfig(**settings)) is None
    assert new_group([0], CanaryConfig()) is not None


def test_a_rank_that_does_not_come_is_a_sentence(alone, monkeypatch) -> None:
    """Which must come, and what to do."""

    def none_comes(*args: object, **kwargs: object) -> None:
        raise dist.DistStoreError("timed out")

    monkeypatch.setattr(dist, "new_group", none_comes)
    with pytest.raises(AdapterError, match=r"ranks 0, 1 must each attach a canary within 60 seconds.*X1 \(timed out\)"):
        new_group([0, 1], CanaryConfig())
