"""A prose linter: ``python -m kvcanary_tools.pages.prose [PAGE ...]`` reads README.md and docs/.

A sentence has at most 30 words and two passives, and none of the words that only our code uses. A cell of a table has
at most five numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).parents[3]
MOST_WORDS, MOST_PASSIVES, MOST_NUMBERS = 30, 2, 5
WORDS = {
    r"on over off": "overhead, as +0.4 %",
    r"tokens? (?:that )?(?:leaves?|left)\b|tokens? of (?:that|this) step leaves?": "is returned",
    r"blast": "impact, affected requests",
    r"(?:quiet|clean) twins?": "control run",
    r"mended": "fixed",
    r"bytes a second": "bandwidth",
    r"another \w+ than": "a different one from",
    r"vouch(?:es)?": "guarantees",
    r"pressed workload": "under memory pressure",
    r"between two looks": "between two checks",
    r"taken as (?:they|it) lay": "assumed valid",
    r"nobody knows": "unknown",
    r"brings? about": "causes, reproduces",
    r"unheeded": "without the canary",
    r"on (?:its|their) way": "in flight",
    r"the books": "host-side state",
    r"lies? there|lie, with": "is stored",
    r"not fed": "unsupported by this engine",
    r"in the air": "in flight",
    r"(?:are|is) told of once": "is reported once",
}
PASSIVE = re.compile(r"\b(?:is|are|was|were|be|been|being) (?:\w+ly )?\w+(?:ed|en|wn|de|ld|ne|nt|pt|lt|ought)\b")


def pages() -> list[Path]:
    """README and docs, but for pages that programs write from other words."""
    written = {"api.md", "walkthrough.md"}
    return [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in written)]


def sentences(text: str) -> Iterator[str]:
    """The sentences of running text: no code, no tables, no headings."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- ([\w' ]+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(?:#|\||<!--|    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "`code`", text)
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        yield from filter(None, re.split(r"(?<=[.!?])[*)]*\s+", " ".join(block.split())))


def cells(text: str) -> Iterator[str]:
    """The cells of all tables, also of those that programs write, without code and links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    for row in re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE):
        yield from re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "", row).split("|")


def length(sentence: str) -> int:
    """In words."""
    return len(re.findall(r"[\w'`+%.-]*\w[\w'`+%.-]*", sentence))


def faults(sentence: str) -> Iterator[str]:
    """What is wrong with it, in words."""
    if length(sentence) > MOST_WORDS:
        yield f"{length(sentence)} words, at most {MOST_WORDS}"
    passives = PASSIVE.findall(sentence)
    if len(passives) > MOST_PASSIVES:
        yield f"{len(passives)} passives, at most {MOST_PASSIVES}: {', '.join(passives)}"
    for word, better in WORDS.items():
        if found := re.search(rf"\b(?:{word})\b", sentence, re.IGNORECASE):
            yield f"'{found[0]}': better {better}"


def findings(page: Path) -> list[tuple[str, str]]:
    """Every fault of a page with its sentence."""
    text = page.read_text(encoding="utf-8")
    found = [(fault, sentence) for sentence in sentences(text) for fault in faults(sentence)]
    for cell in cells(text):
        numbers = re.findall(r"(?<![\w.])\d[\d,.]*(?!\w)", cell)
        if len(numbers) > MOST_NUMBERS:
            found.append((f"{len(numbers)} numbers in a cell, at most {MOST_NUMBERS}", cell.strip()))
    return found


def percentile(chosen: Sequence[Path]) -> int:
    """Words of the sentence that 95 % are not longer than."""
    lengths = sorted(length(one) for page in chosen for one in sentences(page.read_text(encoding="utf-8")))
    return lengths[int(0.95 * (len(lengths) - 1))] if lengths else 0


@click.command()
@click.argument("chosen", metavar="[PAGE]...", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(chosen: Sequence[Path]) -> None:
    """Print the findings of the pages, of all without arguments; exit code 1 where there are any."""
    chosen = chosen or pages()
    found = [(page.name, *finding) for page in chosen for finding in findings(page)]
    for name, fault, sentence in found:
        click.echo(f"{name}: {fault}\n  {sentence}")
    total = f"prose: {len(chosen)} pages, {len(found)} findings"
    click.echo(f"{total}, 95 % of sentences within {percentile(chosen)} words")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
