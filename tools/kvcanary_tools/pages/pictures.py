"""Pictures of the pages: ``python -m kvcanary_tools.pages.pictures`` writes docs/pictures/*.png anew.

A server of the embedded model, a fault that is armed from outside, and a Chromium that looks at what came of it: the
debug page while requests run, and the report of the dump that was left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

from kvcanary_tools.pages.browser import SCHEMES, SIZES, browser, opened, save
from kvcanary_tools.pages.walkthrough import KEY, environment, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"
SERVE = (
    "kvcanary serve --kv-canary log --kv-canary-content full --kv-canary-dump dumps --kv-canary-dump-content "
    "--allow-faults --debug"
)
PROMPTS = ("def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import os\n")
MOST_TOKENS = 240
STRIKE_SECONDS = 0.5  # after which the fault is armed, so that there is a history


def main(folder: Path = FOLDER) -> None:
    """Write every picture into this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with pages() as (work, url), browser() as started:
        for size in SIZES:
            for scheme in SCHEMES:
                _shoot_debug(started, url, size, scheme, folder)
                _shoot_report(started, report_of(work, "R9"), size, scheme, folder)
        _fault(url, "draft.position_off_by_one")
        _ask(url, PROMPTS[0])
        _shoot_tree(started, report_of(work, "W5"), folder)


@contextmanager
def pages() -> Iterator[tuple[Path, str]]:
    """A folder with dumps, and the URL of a running server in which one bit was flipped."""
    with TemporaryDirectory() as folder, running(folder, SERVE) as (_, url, _child):
        asking = Thread(target=_ask, args=(url, PROMPTS[0]))
        asking.start()
        time.sleep(STRIKE_SECONDS)
        _fault(url, "bits.flip")
        asking.join()
        yield Path(folder), url


def report_of(folder: Path, code: str) -> str:
    """The URL of the report of the first dump of this code."""
    dump = min((folder / "dumps").glob(f"*-{code}-*.kvdump"), key=lambda path: path.stat().st_mtime)
    return reported(folder, dump.relative_to(folder))


def reported(folder: Path, dump: Path) -> str:
    """The URL of the report of a dump, written into this folder."""
    page = folder / f"{dump.stem}.html"
    words = [sys.executable, "-m", "kvcanary_tools", "report", str(dump), "-o", page.name]
    subprocess.run(words, cwd=folder, env=environment(), check=True, capture_output=True)
    return page.as_uri()


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Three requests run at any time, however fast the machine is."""
    is_over = Event()

    def ask(prompt: str) -> None:
        while not is_over.is_set():
            _ask(url, prompt)

    asking = [Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in asking:
            thread.join()


def _shoot_debug(started: Browser, url: str, size: str, scheme: str, folder: Path) -> None:
    with busy(url), opened(started, f"{url}/debug/kvcanary", size, scheme, KEY) as page:
        save(page.screenshot(), folder / f"debug-{size}-{scheme}.png")


def _shoot_report(started: Browser, url: str, size: str, scheme: str, folder: Path) -> None:
    with opened(started, url, size, scheme) as page:
        save(page.screenshot(), folder / f"report-{size}-{scheme}.png")


def _shoot_tree(started: Browser, url: str, folder: Path) -> None:
    with opened(started, url, "wide", "light") as page:
        tree = page.locator("section.card", has=page.locator("svg.tree"))
        save(tree.screenshot(), folder / "report-tree.png")


def _fault(url: str, name: str) -> None:
    _post(f"{url}/debug/kvcanary/faults", {"name": name})


def _ask(url: str, prompt: str) -> None:
    settings = {"model": "embedded", "max_tokens": MOST_TOKENS, "temperature": 0, "ignore_eos": True}
    _post(f"{url}/v1/completions", settings | {"prompt": prompt})


def _post(url: str, body: dict[str, object]) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
        answer.read()


if __name__ == "__main__":
    main()
