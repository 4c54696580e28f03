"""README and docs read well: short sentences, common words."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcanary_tools.pages import prose


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: page.name)
def test_a_page_has_no_findings(page: Path) -> None:
    """Every sentence of every page keeps the rules."""
    assert prose.findings(page) == []


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        (" ".join(["word"] * 31) + ".", "31 words"),
        ("Canary on over off is 1.04.", "overhead"),
        ("No token of that step leaves.", "is returned"),
        ("It was written, was seen and was checked.", "3 passives"),
    ],
)
def test_a_bad_sentence_is_found(sentence: str, fault: str) -> None:
    """Each rule has a sentence that breaks it."""
    assert fault in " ".join(prose.faults(sentence))


def test_a_cell_has_at_most_five_numbers(tmp_path: Path) -> None:
    """Code, links and names with digits do not count."""
    page = tmp_path / "page.md"
    page.write_text(
        "| a | b |\n|---|---|\n| 1, 2.5, 3,000, +4 %, 5 to 6 | R9, H100, `7 8`, [9](1.md), 1, 2, 3, 4, 5 |\n"
    )
    assert prose.findings(page) == [("6 numbers in a cell, at most 5", "1, 2.5, 3,000, +4 %, 5 to 6")]


def test_only_running_text_is_read() -> None:
    """Code, tables, headings and what programs write are left out; links keep their words."""
    text = "# On over off\n\nOne [two](x.md) `a b`. Three.\n\n| on over off |\n\n```\non over off\n```\n\n- Four.\n"
    assert list(prose.sentences(text)) == ["One two `code`.", "Three.", "Four."]


def test_the_command_ends_in_one_where_a_page_has_findings(tmp_path: Path) -> None:
    """It prints the fault and the sentence; a page that is not there is a wrong argument."""
    (tmp_path / "new.md").write_text("Canary on over off is 1.04.\n")
    result = CliRunner().invoke(prose.main, [str(tmp_path / "new.md")])
    assert result.exit_code == 1
    assert "new.md: 'on over off': better overhead, as +0.4 %\n  Canary on over off" in result.output
    assert CliRunner().invoke(prose.main, [str(tmp_path / "old.md")]).exit_code == 2
