"""The parts of an agreement that need no second process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from kvcanary import KVCanaryError
from kvcanary.ranks.agreement import Agreement, RanksDisagreeError, first_difference, minority_of
from kvcanary.ranks.greatest import Greatest
from kvcanary.ranks.levels import digest, level


@pytest.fixture
def group(tmp_path):
    """One rank, whose collectives return what it gave."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_wrong_maximum_is_refused_at_the_start(group, monkeypatch):
    """Where another number arrives than the greatest, nothing can be compared: that is said at once."""
    monkeypatch.setattr(Greatest, "__call__", lambda self, numbers, seconds: [2 * one for one in numbers])
    with pytest.raises(KVCanaryError, match=r"must be the last and ~0, got \[0, -2\]: use a gloo group"):
        Agreement(group)


def test_after_one_disagreement_no_step_passes(group, monkeypatch):
    """Histories differ from then on, so a later step that happens to be equal does not clear it."""
    agreement = Agreement(group)
    agreement.check(1, {"tokens": level({"a": [1]})})
    with monkeypatch.context() as patch:
        patch.setattr(agreement, "_greatest", lambda numbers, step: [one + 1 for one in numbers])
        with pytest.raises(RanksDisagreeError, match="step 2"):
            agreement.check(2, {"tokens": level({"a": [1]})})
    with pytest.raises(RanksDisagreeError, match="step 2"):
        agreement.check(3, {"tokens": level({"a": [1]})})


@pytest.mark.parametrize(
    ("values", "minority"),
    [([1, 1, 2], [2]), ([2, 1, 1, 1], [0]), ([1, 2], []), ([1, 2, 3], []), ([1, 1, 2, 2], []), ([None, None, 2], [2])],
)
def test_the_minority_needs_a_majority_against_it(values, minority):
    """With two ranks, or halves, nobody can say who is wrong."""
    assert minority_of(values) == minority


def test_the_first_difference_is_where_rows_part_or_one_ends():
    """A position, and None where a rank has no such row."""
    assert first_difference([[1, 2, 3], [1, 5, 3]]) == 1
    assert first_difference([[1, 2], [1, 2, 3]]) == 2
    assert first_difference([[1], None]) is None


def test_a_digest_knows_names_order_and_numbers():
    """Equal numbers under another name, or in another order, are others; 63 bits, so that ~d fits as well."""
    rows = [{"a": [1, 2]}, {"b": [1, 2]}, {"a": [2, 1]}, {"a": [1], "b": [2]}]
    assert len({digest(row) for row in rows}) == len(rows)
    assert all(0 <= digest(row) < 1 << 63 for row in rows)
    assert digest({"a": (1, 2)}) == digest({"a": [1, 2]})
