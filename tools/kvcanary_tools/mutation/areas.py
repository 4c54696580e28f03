"""Areas: what is mutated. Files are named as the tree of a run has them, all packages side by side."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

AREAS: dict[str, tuple[str, ...]] = {
    "findings": ("kvcanary/report/finding.py",),
    "ledger": tuple(
        f"kvcanary/ledger/{name}.py"
        for name in ("ledger", "rows", "page_states", "requests", "quarantine", "request_ids", "page_history")
    ),
    "record": ("kvcanary_kernels/record/layout.py",),
    "diagnosis": tuple(
        f"kvcanary/report/{name}.py"
        for name in ("causes/ranking", "evidence", "causes/bytes", "causes/rows", "causes/writes")
    ),
    "references": tuple(
        f"kvcanary_kernels/{name}.py"
        for name in (
            "judge/admit", "judge/advance", "engine/attention/merging", "engine/attention/paged", "content/attest",
            "watch/begin", "engine/candidates", "record/chain", "content/check", "judge/count", "watch/fetch",
            "engine/copies", "engine/delta", "content/fingerprint", "content/finite", "watch/grant", "engine/index",
            "engine/layers",
            "engine/likeliest", "judge/move", "judge/plan", "content/poison", "judge/post", "engine/product",
            "content/put", "content/reads", "engine/relay", "watch/reread", "engine/scatter", "record/seal",
            "judge/settle", "content/store", "judge/verify", "watch/advance", "watch/drafted_states",
            "watch/state_rows", "watch/states", "watch/walk",
        )
    ),
}  # fmt: skip
REFERENCE = "_torch"


def area_of(mutant: str) -> str:
    """The area of a mutant by its dotted name."""
    return next(area for area, files in AREAS.items() if file_of(mutant) in files)


def file_of(mutant: str) -> str:
    """The file of a mutant by its dotted name."""
    return mutant.rpartition(".")[0].replace(".", "/") + ".py"


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
    """The names of a file's mutants; where kernels and references share it, those of operations and their helpers."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    source = (tree / file).read_text(encoding="utf-8")
    wanted = references(source) if area == "references" else None
    for name in mutate_file_contents(file, source).mutant_names:
        if wanted is None or name.partition("__mutmut_")[0].removeprefix("x_") in wanted:
            yield get_mutant_name(Path(file), name)


def references(source: str) -> set[str]:
    """The functions of a module that have a torch reference, and those of the module that they use; no kernels."""
    body = ast.parse(source).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef) and not node.decorator_list}
    found: set[str] = set()
    waiting = [name for name in functions if f"\n{name}{REFERENCE} = " in source]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [node.id for node in ast.walk(functions[name]) if getattr(node, "id", None) in functions]
    return found
