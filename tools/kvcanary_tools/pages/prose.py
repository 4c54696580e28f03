"""A prose linter: ``python -m kvcanary_tools.pages.prose [PAGE ...]`` reads README.md and docs/.

A sentence has at most 30 words and two passives, and none of the words that only our code uses. Pages that were written
before this rule have a budget of findings in `prose_budgets.json`: it may shrink, never grow (``--write`` lowers it).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUDGETS = Path(__file__).with_name("prose_budgets.json")
MOST_WORDS, MOST_PASSIVES = 30, 2
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
    """README and docs, but for pages that a program writes as a whole."""
    written = {"api.md", "walkthrough.md", "breaks.md", "faults.md", "events.md", "performance.md"}
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
    shown = sentences(page.read_text(encoding="utf-8"))
    return [(fault, sentence) for sentence in shown for fault in faults(sentence)]


def budgets() -> dict[str, int]:
    """Findings that a page may still have; one that is not here has none."""
    return json.loads(BUDGETS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def percentile(chosen: Sequence[Path]) -> int:
    """Words of the sentence that 95 % are not longer than."""
    lengths = sorted(length(one) for page in chosen for one in sentences(page.read_text(encoding="utf-8")))
    return lengths[int(0.95 * (len(lengths) - 1))] if lengths else 0


def main(arguments: Sequence[str]) -> int:
    """Print the findings of the pages, all without arguments; 1 where one has more than its budget."""
    chosen = [Path(name).resolve() for name in arguments if name != "--write"] or pages()
    counts = {page.name: len(findings(page)) for page in chosen}
    if "--write" in arguments:
        kept = {name: count for name, count in sorted(counts.items()) if count}
        BUDGETS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    over = [page for page in chosen if counts[page.name] > budgets().get(page.name, 0)]
    for page in over if arguments in ([], ["--write"]) else chosen:
        for fault, sentence in findings(page):
            print(f"{page.name}: {fault}\n  {sentence}")
    total = f"{len(chosen)} pages, {sum(counts.values())} findings"
    print(f"prose: {total}, 95 % of sentences within {percentile(chosen)} words")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
