"""Forwards that are launched together: what is refused when a series of them is made."""

from __future__ import annotations

import pytest

from kvcanary import CanaryConfig, CanaryManager, PlanError
from kvcanary.captured.buffers import StaticBuffers


@pytest.mark.parametrize(
    ("numbers", "words"), [((0, 2), "draft[0], draft[1], got draft[0], draft[2]"), ((1, 0), "draft[1], draft[2], got")]
)
def test_draft_forwards_are_numbered_without_gaps(make_fake_pool, numbers, words):
    """A launch group in which one has no substep is refused with the numbers that it should have; a part of a loop is
    not.
    """
    pool = make_fake_pool("stacked", name="draft", num_pages=4, page_size=4, heads=1, dim=4, layers=1)
    registry = CanaryManager(CanaryConfig(seed=1), [pool.view]).registry
    drafts = [registry.add("draft", "draft", number, StaticBuffers.allocate(2, 4, 16)) for number in range(3)]
    for part in (drafts, drafts[1:], drafts[2:]):
        assert len(registry.launch_group(part)) == len(part)
    with pytest.raises(PlanError, match=r"draft forwards of the draft pool .* must be numbered without gaps") as caught:
        registry.launch_group([drafts[number] for number in numbers])
    assert words in str(caught.value)
