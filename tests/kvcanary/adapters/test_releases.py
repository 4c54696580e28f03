"""The canary inside releases of transformers other than the one that is installed: a known fault of theirs is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcanary.adapters.transformers import TESTED

HERE = Path(__file__).parent / "releases"
ROOT = HERE.parents[3]


@pytest.fixture(scope="module")
def damaged_ring() -> dict[str, Any]:
    """What damaged_ring.py says, run once inside 5.14.1."""
    folder = ROOT / "build" / "transformers-5.14.1"
    if not (folder / "pins.txt").is_file():
        pytest.skip("needs transformers 5.14.1 in build/, and `make releases` has not put it there")
    paths = [str(folder), str(ROOT), str(ROOT / "kernels"), str(ROOT / "tools")]
    child = subprocess.run(
        [sys.executable, str(HERE / "damaged_ring.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    result: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    assert result["version"] == "5.14.1"
    return result


def test_a_window_that_is_read_off_by_one_is_found_at_its_first_read(damaged_ring) -> None:
    """5.14.1 reads the ring of a sliding window (8, blocks of 4) one place off: R4, with index, block and window."""
    first = damaged_ring["raise"]["error"]["first"]
    assert (first["code"], first["step"], first["site"][0]) == ("R4", 2, "decode")
    assert first["found"]["position"] != first["position"] == first["expected"]["position"]
    index, block, window = first["slot"], first["slot"] // 4, damaged_ring["window"]
    assert (first["page"], first["offset"]) == (block, index % 4)
    place = f"index {index} is offset {index % 4} of block {block} in group 0: layers 0, 1, 2 with a window of {window}"
    assert place in first["evidence"]
    assert place in damaged_ring["raise"]["error"]["text"]
    assert first["causes"][0]["family"] == "addressing"
    assert (first["writer"], first["write_step"], first["write_site"]) == (first["reader"], 1, ["prefill", 0])


def test_no_token_of_the_damaged_step_leaves(damaged_ring) -> None:
    """As many tokens were given out when generate_batch raised as when the forward of the finding began."""
    began, ended = damaged_ring["raise"]["error"]["tokens"]
    assert began == ended > 0
    assert damaged_ring["raise"]["forwards"] == 2


def test_the_damaged_window_is_one_incident_in_mode_log(damaged_ring) -> None:
    """All requests, both groups of layers and every later step read the same ring: one fault."""
    assert damaged_ring["log"]["incidents"] == 1
    assert damaged_ring["log"]["fired"].keys() == {"R4"}
    assert damaged_ring["log"]["fired"]["R4"] > 50


def test_full_attention_of_that_release_is_clean(damaged_ring) -> None:
    """The twin: without a window nothing is found in the same release, shared prefixes included."""
    assert damaged_ring["full"] == {
        "error": None,
        "incidents": 0,
        "fired": {},
        "forwards": damaged_ring["full"]["forwards"],
    }
    assert damaged_ring["full"]["forwards"] > 8


def test_what_is_installed_by_make_is_the_newest_tested() -> None:
    """constraints.txt installs the last release of TESTED, so that `make test` runs inside it."""
    [pinned] = [
        line.partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line.startswith("transformers==")
    ]
    assert ".".join(pinned.split(".")[:2]) == TESTED[-1]
