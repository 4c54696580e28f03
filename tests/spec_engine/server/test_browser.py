"""The live page in a real browser: `-m browser`, Debian's Chromium without a window."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvcanary_tools.pages.browser import chromium
from spec_engine.core import Batch, ForwardBatch
from spec_engine.drafting.tree import Tree
from spec_engine.engine import Engine

from .conftest import KEY, wait_for
from .test_corruption import Client, strike

CHROMIUM = chromium()

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH, and none is present"),
]


def browse(url: str, folder: Path) -> tuple[str, Path]:
    """The page's elements after two seconds of its script, and a picture of it."""
    page, picture = url.replace("http://", f"http://any:{KEY}@") + "/debug/kvcanary", folder / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1440,1250", f"--user-data-dir={folder}"]
    command = [CHROMIUM, *options, "--virtual-time-budget=2000", f"--screenshot={picture}", "--dump-dom", page]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    return child.stdout, picture


def test_the_page_draws_itself(start, tmp_path: Path) -> None:
    """Figures, the request that runs, its tree, the certificate and the finding are there; a picture is taken."""
    server = start("abort", debug=True, grace_seconds=0.0)
    _, name = strike(server)
    with server.held(steps=3):
        running = Client(server, [7] * 30, max_tokens=450)
        elements, picture = browse(server.url, tmp_path)
        assert running.is_alive()
    elements = elements.partition("<script")[0]
    assert "live, with findings" in elements
    assert "the server does not answer" not in elements
    assert f"Ended {name}; the others go on" in elements
    assert "forwards watched" in elements
    assert "<circle" in elements.partition('id="tree"')[2].partition("</svg>")[0]
    assert "on the path taken" in elements
    assert 'class="mark found"' in elements  # the lane of its page
    assert "kvcanary explain http://" in elements
    assert '<section class="card" id="timebox" aria-labelledby="timehead" hidden' in elements  # of one incident
    assert "req-3" in elements.partition('id="requests"')[2].partition("</table>")[0]
    assert picture.stat().st_size > 10_000


def test_the_tree_marks_the_node_that_a_finding_names(start, tmp_path: Path) -> None:
    """Of several nodes at its position the one whose slot it has; its request has ended by then."""
    server = start("abort", debug=True, topk=2, num_steps=3, num_draft_tokens=8)
    with server.held(steps=0):
        running = Client(server, [7] * 30, max_tokens=450)
        wait_for(lambda: server.between_steps(see_a_sibling))
    running.join(60)
    assert running.reason == "kv_corruption"
    finding = server.get("/debug/kvcanary/state").json()["findings"][-1]
    nodes = server.get(f"/debug/kvcanary/requests/{finding['readers'][0]}/tree").json()
    alike = [one["slot"] for one in nodes["nodes"] if one["depth"] == finding["position"] - nodes["committed_len"]]
    assert finding["code"] == "R13"
    assert finding["slot"] in alike
    assert len(alike) > 1
    elements, _ = browse(server.url, tmp_path)
    assert elements.partition('id="tree"')[2].partition("</svg>")[0].count('class="ring"') == 1


def see_a_sibling(engine: Engine) -> bool:
    """From now on a node sees one of its siblings too, in verify's forward alone and not in the tree."""
    if not engine.running:
        return False
    made = engine.runner.verify_forward

    def struck(batch: Batch, tree: Tree) -> ForwardBatch:
        forward, parents = made(batch, tree), tree.parents[0].tolist()
        pairs = [(a, b) for a in range(1, len(parents)) for b in range(1, a) if parents[a] == parents[b]]
        mask = forward.tree_mask.clone()
        for node, sibling in pairs[:1]:
            mask[0, node, sibling] = True
        return replace(forward, tree_mask=mask)

    engine.runner.verify_forward = struck
    return True
