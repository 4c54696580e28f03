"""The live page in a real browser: `-m browser`, Debian's Chromium without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import KEY
from .test_corruption import Client, strike

CHROMIUM = shutil.which("chromium")

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
    running = Client(server, [7] * 30, max_tokens=450)
    elements, picture = browse(server.url, tmp_path)
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
    assert running.is_alive()
    assert "req-3" in elements.partition('id="requests"')[2].partition("</table>")[0]
    assert picture.stat().st_size > 10_000
