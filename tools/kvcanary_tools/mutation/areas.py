"""Areas: what is mutated. Files are named as the tree of a run has them, all packages side by side."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

AREAS: dict[str, tuple[str, ...]] = {
    "findings": ("kvcanary/findings.py",),
    "ledger": tuple(
        f"kvcanary/{name}.py"
        for name in ("ledger", "rows", "pages", "requests", "quarantine", "uids", "history")
    ),
    "record": ("kvcanary_kernels/record.py",),
    "diagnosis": tuple(
        f"kvcanary/{name}.py" for name in ("diagnosis", "facts", "rules_bytes", "rules_rows", "rules_writes")
    ),
    "references": tuple(
        f"kvcanary_kernels/{name}.py"
        for name in (
            "admit", "advance", "attention/merging", "attention/paged", "attest", "begin", "candidates", "chain",
            "content", "count", "fetch", "fingerprint", "finish", "finite", "index", "layers", "likeliest", "move",
            "plan", "poison", "post", "product", "put", "reads", "relay", "reread", "scatter", "seal", "settle",
            "store", "verify", "walk",
        )
    ),
}  # fmt: skip
REFERENCE = "_torch"


def area_of(mutant: str) -> str:
    """The area of a mutant by its dotted name."""
    module = mutant.rpartition(".")[0].replace(".", "/") + ".py"
    return next(area for area, files in AREAS.items() if module in files)


def digest(tree: Path) -> str:
    """A name for the text of all files that are mutated."""
    texts = ((tree / file).read_bytes() for files in AREAS.values() for file in files)
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def sample(tree: Path, seed: int, size: int) -> tuple[list[str], dict[str, int]]:
    """Names of `size` mutants, drawn evenly from all of them, and how many each area has. The cwd is `tree`."""
    names = {area: [name for file in files for name in mutants_of(tree, area, file)] for area, files in AREAS.items()}
    everything = sorted(name for some in names.values() for name in some)
    drawn = random.Random(seed).sample(everything, min(size, len(everything)))
    return sorted(drawn), {area: len(some) for area, some in names.items()}


def mutants_of(tree: Path, area: str, file: str) -> Iterator[str]:
    """The names of a file's mutants; where kernels and references share it, those of the references."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    source = (tree / file).read_text(encoding="utf-8")
    wanted = references(source) if area == "references" else None
    for name in mutate_file_contents(file, source).mutant_names:
        if wanted is None or name.partition("__mutmut_")[0].removeprefix("x_") in wanted:
            yield get_mutant_name(Path(file), name)


def references(source: str) -> set[str]:
    """The functions of a module that are torch references, and those of the module that they use."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    found: set[str] = set()
    waiting = [name for name in functions if name.endswith(REFERENCE)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [node.id for node in ast.walk(functions[name]) if getattr(node, "id", None) in functions]
    return found
