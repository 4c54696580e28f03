"""Probes of what attention of a real vLLM reads, before it serves: ``python -m kvcanary_tools.bench.vllm.reader``.

    python -m kvcanary_tools.bench.vllm.reader --out FILE [--kind fp8] [--backend TRITON_ATTN]

Needs a GPU and vllm with the plug-in. The plug-in asks at the start, and then once for each harm below, of which those
of graphs are right wherever attention runs as it is. At the end it asks once more, without any.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from kvcanary.adapters.hosted.probing import IN_A_GRAPH
from kvcanary.calls.violation import Violation
from kvcanary_tools.bench.vllm.engine import Bench
from kvcanary_tools.bench.vllm.model import KINDS
from kvcanary_tools.bench.vllm.plugin import machine
from kvcanary_tools.files import lines_of


def keeps(name: str) -> Callable[[Any], None]:
    """Metadata get a copy of this tensor, so that a graph goes on reading the batch that it was captured over."""

    def harm(metadata: Any) -> None:
        setattr(metadata, name, getattr(metadata, name).clone())

    return harm


def sorts(metadata: Any) -> None:
    metadata.block_table = metadata.block_table.sort(1)[0]


#: What is done to the metadata that vLLM's builder makes of a batch, and whether only graphs are wrong then.
HARMS: dict[str, tuple[Callable[[Any], None], bool]] = {
    "the block table is copied": (keeps("block_table"), True),
    "lengths are copied": (keeps("seq_lens"), True),
    "block tables are sorted": (sorts, False),
}


@contextmanager
def harmed(worker: Any, harm: Callable[[Any], None]) -> Iterator[None]:
    """Every builder of this worker's metadata is."""
    groups = [group for groups in worker.model_runner.attn_groups for group in groups]
    builders = {id(builder): builder for group in groups for builder in [group.get_metadata_builder()]}
    inner = {key: builder.build for key, builder in builders.items()}

    def harming(build: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            metadata = build(*args, **kwargs)
            harm(metadata)
            return metadata

        return made

    for key, builder in builders.items():
        builder.build = harming(inner[key])
    try:
        yield
    finally:
        for builder in builders.values():
            del builder.build


def asked(handle: Any) -> dict[str, Any]:
    """One more probe of everything: seconds, and what is found, where the log would tell of an incident once."""
    found: list[Violation] = []
    start = time.perf_counter()
    with patch.object(handle.canary.response, "answer", lambda violations, *_: found.extend(violations)):
        handle.probe_reader()
    return {"seconds": round(time.perf_counter() - start, 3), "findings": [*map(told_of, found)]}


def told_of(violation: Violation) -> dict[str, Any]:
    _, text, evidence = violation.misread
    is_captured = IN_A_GRAPH in evidence
    return {"code": violation.code, "phase": violation.site[0], "cause": text, "in_a_graph_alone": is_captured}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON, to which this is added.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("/dev/shm/kvcanary-vllm"), help="Checkpoints go here."
)
@click.option("--kind", type=click.Choice(list(KINDS)), default="dense", help="Of cache.")
@click.option("--backend", default=None, help="Of attention, by vLLM's name; default: vLLM's choice.")
@click.option("--deadline", type=float, default=240.0, help="Seconds after which no new harm is tried.")
def command(out: Path, work: Path, kind: str, backend: str | None, deadline: float) -> None:
    os.environ["KVCANARY_MODE"] = "log"
    bench = Bench(work, "1b", None, deadline, kind, **({} if backend is None else {"attention_backend": backend}))
    handle = bench.worker.kvcanary
    told = handle.report()
    result: dict[str, Any] = {
        "kind": kind,
        "graphs": str(bench.runner.compilation_config.cudagraph_mode),
        **machine(),
        "attention": bench.attention,
        "probes_at_start": told["reader_probes"],
        "not_probed": handle.canary.coverage.not_probed,
        "findings_at_start": len(told["findings"]),
        "harms": {},
    }
    for name, (harm, is_of_graphs) in HARMS.items():
        if bench.is_late:
            break
        with harmed(bench.worker, harm):
            result["harms"][name] = {"of_graphs": is_of_graphs, **asked(handle)}
    result["without"] = asked(handle)
    known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    out.write_text(lines_of([*known, result]) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    command()
