"""README and docs read well: short sentences, common words."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcanary_tools.pages import prose


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: page.name)
def test_a_page_keeps_its_budget(page: Path) -> None:
    """No page has more findings than before; a new one has none."""
    found = prose.findings(page)
    lines = "\n".join(f"{fault}: {sentence}" for fault, sentence in found)
    assert len(found) <= prose.budgets().get(page.name, 0), lines


def test_the_readme_has_no_budget() -> None:
    """What everybody reads first is written by the rules; a budget is for a page that exists."""
    assert "README.md" not in prose.budgets()
    assert set(prose.budgets()) <= {page.name for page in prose.pages()}


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


def test_only_running_text_is_read() -> None:
    """Code, tables, headings and what programs write are left out; links keep their words."""
    text = "# On over off\n\nOne [two](x.md) `a b`. Three.\n\n| on over off |\n\n```\non over off\n```\n\n- Four.\n"
    assert list(prose.sentences(text)) == ["One two `code`.", "Three.", "Four."]


def test_the_command_ends_in_one_where_a_page_has_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the fault and the sentence."""
    (tmp_path / "new.md").write_text("Canary on over off is 1.04.\n")
    assert prose.main([str(tmp_path / "new.md")]) == 1
    assert "new.md: 'on over off': better overhead, as +0.4 %\n  Canary on over off" in capsys.readouterr().out
