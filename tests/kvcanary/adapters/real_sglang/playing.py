"""A scheduler of a real SGLang on this CPU, that plays scenes: `make real-sglang` installs it, pinned by hash."""

from __future__ import annotations

from typing import Any

import pytest

from kvcanary.scrub.free_slots import UNPOISONED
from kvcanary_tools.bench.sglang.cpu import folder_of, pinned

#: Attention of a latent pool, and of pages that are too large for the context.
NOT_PROBED = (
    "attention not probed: its layers keep no K and V of their own",
    "attention not probed: two rows of 192 entries in blocks of 64 are more than this worker has room for",
)
INSTALLED = folder_of(pinned())
Acts = list[dict[str, Any]]
is_installed = pytest.mark.skipif(
    not (INSTALLED / "sglang").is_dir(), reason=f"no sglang in build/{INSTALLED.name}: make real-sglang installs it"
)


def expect_sound(act: dict[str, Any], bare: dict[str, Any], least: int) -> None:
    """No finding in any pool, tokens as without a canary, and enough entries judged."""
    assert act["outputs"] == bare["outputs"]
    for report in act["reports"].values():
        assert (report["findings"], report["fired"]) == ([], {})
        assert set(report["unchecked"]) <= {UNPOISONED}
        assert {"R7", "R8", "W2", "W3", "W7"} <= set(report["classes"])
        assert ("P1" in report["classes"]) == (report["content"] == "full")
        assert report["untold_incidents"] == 0
        assert report["slots_checked"] > least
        assert report["reader_probes"] in (len(report["watched"]), *NOT_PROBED)
    assert bare["mode"] == "off"
    assert "reports" not in bare


def first(acts: Acts, fault: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first finding of the act with this fault in mode log, and what was touched; every incident was told."""
    [act] = [act for act in acts if (act["fault"], act["mode"], act["misreading"]) == (fault, "log", "")]
    assert all(report["untold_incidents"] == 0 for report in act["reports"].values())
    return act["findings"][0], act["touched"]
