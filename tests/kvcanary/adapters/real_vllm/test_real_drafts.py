"""Drafts of a real vLLM for CPUs: their layers of attention are asked what they read, as the target's are."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_for_cpus import NEEDS_VLLM, run_code

#: An engine with drafts of two tokens, and what its probes tell with faults in attention itself.
CHILD = """
import json, os, sys
from pathlib import Path

from kvcanary_tools.bench.vllm.cpu import ENVIRONMENT, CpuBench, probes
from kvcanary_tools.bench.vllm.model import SHAPES, write_model

os.environ.update(ENVIRONMENT)
out = Path(sys.argv[1])
draft = write_model(out.parent / "draft", SHAPES["tiny"] | {"num_hidden_layers": 1}, is_draft={is_draft})
drafts = {"method": "{method}", "model": str(draft), "num_speculative_tokens": 2}
bench = CpuBench(out.parent, speculative_config=drafts)
served = bench.worker.kvcanary.report()["reader_probes"]
bench.worker.kvcanary.detach()
out.write_text(json.dumps({"served": served, "probe": probes(bench)}))
"""


@NEEDS_VLLM
@pytest.mark.slow
@pytest.mark.parametrize(("method", "is_draft"), [("eagle", True), ("draft_model", False)])
def test_layers_of_a_draft_are_asked_what_they_read(tmp_path: Path, method: str, is_draft: bool) -> None:
    """Two pools, silent as they are; where attention of both ignores the table that is one incident."""
    code = CHILD.replace("{is_draft}", str(is_draft)).replace("{method}", method)
    told = run_code(code, tmp_path / "told.json")
    assert told["served"] == told["probe"]["as_it_is"]["probes"] == 2
    assert told["probe"]["as_it_is"]["found"] == []
    [found] = told["probe"]["sorts_table"]["found"]
    assert found["code"] == "R8"
    assert found["cause"].startswith("attention ignores the row's table")
