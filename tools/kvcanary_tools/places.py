"""Where each check is judged: places in the source, `module:qualified name`, as file and line.

Lines are read from the text, so that nothing is imported.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Who judges what: a function, a method or a class, as module:qualified name, and the kinds that it finds.

#: On the host: eager forwards, and what it learns of captured ones.
HOST = {
    "kvcanary.manager.contradictions:Contradictions._report_contradiction": "L1",
    "kvcanary.ledger.page_states:Pages._refused": "L1",
    "kvcanary.checks.admission:refuse": "W1 W2 W3 W7 W8 R1",
    "kvcanary.ledger.page_states:Pages._write_code": "W2 W3 W7 W8",
    "kvcanary.checks.writes:judge_slots": "W1 W4 R1",
    "kvcanary.checks.writes:judge_layer": "W4",
    "kvcanary.checks.writes:judge_layers": "R12",
    "kvcanary.checks.seals:_misplaced": "W5",
    "kvcanary.checks.lineage:judge_lineage": "R5",
    "kvcanary.checks.tokens:judge_tokens": "W6",
    "kvcanary.checks.lengths:judge_lengths": "R10 H1",
    "kvcanary.checks.lengths:judge_starts": "R10",
    "kvcanary.checks.lengths:judge_mask": "R13",
    "kvcanary.checks.lengths:judge_commit": "H1",
    "kvcanary.checks.lengths:judge_collected": "H1",
    "kvcanary.checks.rows:Reader": "R2 R3 R4 R5 R7 R8 R11 R12",
    "kvcanary.checks.rows:Reader._judge_own": "R5",
    "kvcanary.checks.rows:Reader._judge_truth": "R6",
    "kvcanary.checks.rows:_null_writes": "R2",
    "kvcanary.checks.rows:_shared_slots": "R8",
    "kvcanary_kernels.judge.verify:verify_torch": "R2 R3 R4 R5 R7 R8 R11 R12",
    "kvcanary.checks.grants:grant_codes": "R7 R8",
    "kvcanary.checks.content:find_changed": "R3 R9",
    "kvcanary.scrub.unwritten_tails:UnwrittenTails._fired": "U1",
    "kvcanary.scrub.poison:Poisoner.granted": "P1",
    "kvcanary.transfers.moves:Mover.apply": "T1 R9",
    "kvcanary.transfers.moves:Mover.arrived": "T1",
    "kvcanary.transfers.snapshots:PageSnapshots._judge": "A1",
    "kvcanary.transfers.async_ops:AsyncOps.use": "O1",
    "kvcanary.transfers.async_ops:AsyncOps.complete": "O1",
    "kvcanary.transfers.async_ops:AsyncOps.free": "O1",
    "kvcanary.captured.registry:SubstepRegistry._take": "H1",
    "kvcanary.manager.expected_forwards:ExpectedForwards.missing": "H1",
    "kvcanary.manager.expected_forwards:ExpectedForwards.left_out": "H1",
    "kvcanary.manager.manager:CanaryManager.arm": "H2",
    "kvcanary.manager.substep:SubstepCanary.open": "H2",
    "kvcanary.captured.substep:CapturedSubstep.open": "H2",
    "kvcanary.pools.attachment:Attachment.__init__": "H2",
}

#: On the device: captured forwards, and bytes that lie there. The torch reference stands beside each in its file.
DEVICE = {
    "kvcanary_kernels.judge.plan:plan": "W1 W4 W5 W9 R2 R10",
    "kvcanary_kernels.judge.admit:page_code": "W2 W3 W7 W8",
    "kvcanary_kernels.judge.verify:verify": "R1 R2 R3 R4 R5 R7 R8 R11 R12",
    "kvcanary_kernels.judge.settle:settle": "W4 R5 R6 R12",
    "kvcanary_kernels.content.check:check_content": "T1 R9",
    "kvcanary_kernels.content.reads:judge_reads": "R9",
    "kvcanary_kernels.content.finite:finite_check": "U1",
    "kvcanary_kernels.content.poison:poison_check": "P1",
}

#: In caches that are only watched, those of vLLM and transformers.
OBSERVED = {
    "kvcanary_kernels.watch.advance:advance": "W1 W5 W6",
    "kvcanary_kernels.watch.walk:walk": "R1 R2 R3 R4 R5 R6 R10 R12",
    "kvcanary_kernels.watch.reread:take": "W4",
    "kvcanary_kernels.watch.reread:reread": "R9",
    "kvcanary.adapters.observed.canary:PagedCanary.written_twice": "W4",
    "kvcanary.adapters.observed.moves:copied": "T1",
    "kvcanary.adapters.observed.moves:zeroed": "T1",
    "kvcanary.adapters.observed.moves:loaded": "A1",
    "kvcanary.adapters.transformers.judging:judge_fed": "R12",
    "kvcanary.adapters.transformers.judging:judge_reread": "T1 R4 R6 R9 R12",
    "kvcanary.adapters.transformers.judging:judge_tokens": "R6 R10",
    "kvcanary.adapters.transformers.judging:wrong_length": "R10",
    "kvcanary.adapters.transformers.paged_cache:BatchedCache._fed": "W5 R10",
    "kvcanary.adapters.transformers.paged_cache:BatchedCache._judge": "R4 R6 R12",
    "kvcanary.adapters.transformers.paged_cache:BatchedCache._reread": "R9 R12",
    "kvcanary.adapters.transformers.paged_cache:BatchedCache.copied": "T1",
}

#: By how it is called; the torch reference of what the device judges stands beside it in its file.
SIDES = {"host": HOST, "device": DEVICE, "observed": OBSERVED}


class Place(NamedTuple):
    """A function, a method or a class.

    path: of its file, from where its package lies;  line: of its `def` or `class`;  name: as `Class.method`
    """

    path: str
    line: int
    name: str


def judges(side: str, kind: str) -> tuple[str, ...]:
    """Who judges a kind of check on the `host`, the `device`, or in caches that are only watched (`observed`)."""
    return tuple(place for place, kinds in SIDES[side].items() if kind in kinds.split())


def find_place(dotted: str) -> Place:
    """LookupError where there is no such module, or nothing of this name in it."""
    module, _, name = dotted.partition(":")
    root, path = _file_of(module)
    body: list[ast.stmt] = _parsed(root / path).body
    line = 0
    for part in name.split("."):
        found = [one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == part]
        if not found:
            raise LookupError(f"{path} has no {name!r}")
        body, line = found[-1].body, found[-1].lineno
    return Place(str(path), line, name)


def _file_of(module: str) -> tuple[Path, Path]:
    """Where the package lies, and the module's file from there."""
    package, *inner = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no package {package!r}")
    root, own = Path(spec.origin).parent.parent, Path(package, *inner)
    for path in (own.with_suffix(".py"), own / "__init__.py"):
        if (root / path).is_file():
            return root, path
    raise LookupError(f"there is no module {module!r}")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
