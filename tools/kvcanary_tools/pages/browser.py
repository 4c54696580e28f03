"""A Chromium without a window, for pictures of pages and for axe-core; `why_not` says what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZES = {"wide": (1280, 1600), "phone": (390, 1500)}  # pixels
SCHEMES = ("light", "dark")
SETTLE_MS = 1500  # for a page that asks its server first


def chromium() -> str | None:
    """The first Chromium on the PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def why_not() -> str:
    """What is missing for a browser here, as a sentence; "" where there is one."""
    if chromium() is None:
        return "needs chromium on the PATH, and none is present"
    missing = [name for name in ("playwright", "axe_playwright_python", "PIL") if find_spec(name) is None]
    return f"needs the packages of kvcanary[browser], {', '.join(missing)} not installed" if missing else ""


@contextmanager
def browser() -> Iterator[Browser]:
    """The first Chromium on the PATH. RuntimeError where `why_not` says why there is none."""
    if why_not():
        raise RuntimeError(why_not())
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(started: Browser, url: str, size: str, scheme: str, key: str = "") -> Iterator[Page]:
    """A page in a window of `SIZES`, light or dark; key: the password that the server of a debug page asks for."""
    width, height = SIZES[size]
    settings: dict[str, Any] = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    if key:
        settings["http_credentials"] = {"username": "any", "password": key}
    context = started.new_context(**settings, reduced_motion="reduce", bypass_csp=True)  # axe-core is put in
    try:
        page = context.new_page()
        page.goto(url)
        page.wait_for_timeout(SETTLE_MS if key else 0)
        yield page
    finally:
        context.close()


def save(picture: bytes, path: Path) -> None:
    """A screenshot as a small PNG: flat pages need no more than 48 colours, of which the rare ones count."""
    from PIL import Image

    flat = Image.open(BytesIO(picture)).convert("RGB")
    flat.quantize(48, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def faults_of(page: Page) -> list[str]:
    """What axe-core holds against a page, a line each: the rule, and the element."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {place['html']}" for rule in found for place in rule["nodes"]]
