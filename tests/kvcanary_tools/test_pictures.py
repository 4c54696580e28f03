"""The pages in a real Chromium: axe-core has nothing against them, and the committed pictures are those of today."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvcanary_tools.pages import pictures
from kvcanary_tools.pages.browser import SCHEMES, SIZES, browser, faults_of, opened, why_not

if TYPE_CHECKING:
    from playwright.sync_api import Page

WATCHED = Path(__file__).parents[1] / "data" / "watched" / "step10-R9.kvdump"  # with a row to scroll
pytestmark = [pytest.mark.browser]
in_a_browser = pytest.mark.skipif(bool(why_not()), reason=why_not())
MOST_BYTES, MOST_BYTES_IN_ALL = 120_000, 1_200_000
NAMES = {f"{page}-{size}-{scheme}.png" for page in ("debug", "report") for size in SIZES for scheme in SCHEMES}
NAMES |= {"report-tree.png"}


def dimensions(path: Path) -> tuple[int, int]:
    """Width and height, as a PNG's first block has them."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Path, str]]:
    with pictures.pages() as pages:
        yield pages


def test_every_picture_is_there_and_small() -> None:
    """As many as the script makes; a clone does not grow by more than a megabyte."""
    found = {path.name: path.stat().st_size for path in pictures.FOLDER.glob("*.png")}
    assert set(found) == NAMES
    assert max(found.values()) <= MOST_BYTES
    assert sum(found.values()) <= MOST_BYTES_IN_ALL


@in_a_browser
def test_axe_finds_nothing(served: tuple[Path, str]) -> None:
    """Debug page while requests run, and reports, wide and on a phone, light and dark; none is wider than it may."""
    work, url = served
    reports = [pictures.report_of(work, "R9"), pictures.reported(work, WATCHED)]
    with browser() as started:
        for size, scheme in (("wide", "light"), ("phone", "dark")):
            with pictures.busy(url), opened(started, f"{url}/debug/kvcanary", size, scheme, pictures.KEY) as page:
                page.locator("#requests button").first.wait_for()
                expect_no_fault(page)
            for address in reports:
                with opened(started, address, size, scheme) as page:
                    expect_no_fault(page)


def expect_no_fault(page: Page) -> None:
    page.locator("article h2").wait_for()
    assert faults_of(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@in_a_browser
def test_a_command_is_copied_without_a_network(served: tuple[Path, str]) -> None:
    """The button of a command says so, and the clipboard has it; Tab leads there."""
    work, _ = served
    with browser() as started, opened(started, pictures.report_of(work, "R9"), "wide", "light") as page:
        page.context.set_offline(True)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy: kvcanary replay").press("Enter")
        page.get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()").startswith("kvcanary replay dumps/")


@in_a_browser
@pytest.mark.slow
def test_the_pictures_are_those_of_today(tmp_path: Path) -> None:
    """Made anew they have the same dimensions, and as many bytes but for a third."""
    pictures.main(tmp_path)
    for name in NAMES - {"report-tree.png"}:
        old, new = pictures.FOLDER / name, tmp_path / name
        assert dimensions(old) == dimensions(new), name
        assert 0.66 < new.stat().st_size / old.stat().st_size < 1.5, name
    assert dimensions(tmp_path / "report-tree.png")[0] == dimensions(pictures.FOLDER / "report-tree.png")[0]
