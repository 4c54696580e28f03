"""Releases of transformers: ``python -m kvcanary_tools.bench.transformers_releases`` adds the installed one.

Every run generates without a canary and with it (`full`, mode ``log``): findings, entries judged, equal tokens. Then
one bit of a cache is flipped in mode ``raise``, which must be found where it is. For another release put its folder
first on PYTHONPATH (`make test-transformers TRANSFORMERS=...` makes one). ``--page`` writes docs/transformers.md from
the record.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvcanary import CanaryConfig, KVCorruptionError
from kvcanary.adapters.transformers import attach
from kvcanary.adapters.transformers.paged_layout import memory_of
from kvcanary.adapters.transformers.unwatched import cache_given
from kvcanary_tools.bench.common import RESULTS, events_to_stderr, machine, progress, save
from kvcanary_tools.bench.transformers_clean import BATCHED_FAMILIES, generate, generate_batch, make_model
from kvcanary_tools.pages.marks import put_between

NAME = "cpu_transformers_releases"
PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"
BEGIN, END = "<!-- transformers releases: begin -->", "<!-- transformers releases: end -->"
LAYER, HEAD, DIM, BIT = 2, 1, 3, 5  # of V, where the bit is flipped
#: By name, the family and the way of generate().
DENSE = {
    "greedy": ("Llama", "greedy"),
    "beams": ("Llama", "beams"),
    "prompt lookup": ("Llama", "lookup"),
    "sliding window": ("Gemma2", "greedy"),
    "static cache": ("Llama", "static"),
}
#: By name, the family, children of each prompt, and the tokens that all prompts share.
BATCHED = {
    "batch, full attention": ("Llama", 1, 0),
    "batch, sliding window": ("Mistral", 1, 20),
    "batch, both": ("Qwen3", 1, 20),
    "batch, shared prefixes": ("Llama", 1, 20),
    "batch, forks": ("Llama", 3, 20),
}
Output = Callable[[Any], Any]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="what the canary does inside the installed release of transformers")
    parser.add_argument("--page", action="store_true", help="only write the table from the record")
    options = parser.parse_args(arguments)
    if not options.page:
        torch.set_num_threads(1)
        record = read() if (RESULTS / f"{NAME}.json").exists() else {"releases": {}}
        record["releases"][transformers.__version__] = {"machine": machine(), "runs": measure()}
        ordered = sorted(record["releases"].items(), key=lambda own: [int(part) for part in own[0].split(".")[:3]])
        save(NAME, {"what": "runs of the canary inside releases of transformers", "releases": dict(ordered)})
    put_between(PAGE, BEGIN, END, lines())


def read() -> dict[str, Any]:
    """The record of all releases that were run."""
    return json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def measure() -> dict[str, dict[str, Any]]:
    """Every run of the installed release, by name."""
    runs = {}
    for name, (family, way) in DENSE.items():
        run = functools.partial(generate, way=way)
        runs[name] = _run(make_model(family), lambda model, run=run: run(model).tolist(), _flip_dense)
    for name, (family, children, shared) in BATCHED.items():
        model = make_model(family, own=BATCHED_FAMILIES[family])
        run = functools.partial(generate_batch, children=children, num_shared=shared)
        runs[name] = _run(model, run, _flip_paged)
    return runs


def lines() -> Iterator[str]:
    """The table, as Markdown: findings of entries that were judged, tokens, and the code of the planted fault."""
    releases = read()["releases"]
    yield f"| run | {' | '.join(releases)} |"
    yield f"|---|{'---|' * len(releases)}"
    for name in (*DENSE, *BATCHED):
        yield f"| {name} | {' | '.join(_cell(own['runs'][name]) for own in releases.values())} |"


def _cell(run: dict[str, Any]) -> str:
    tokens = "equal" if run["equal"] else "not equal"
    own = "comes first" if run["codes"] else "elsewhere"
    found = f"{run['fault']}{'' if run['in_place'] else f' {own}'}" if run["fault"] else "not found"
    codes = f" ({', '.join(run['codes'])})" if run["codes"] else ""
    return f"{run['findings']}{codes} of {run['entries']:,}; {tokens}; {found}"


def _run(model: Any, output: Output, flip: Callable[[Any, dict[str, Any]], tuple[int, int | None] | None]) -> Any:
    """Without, with, and with a flipped bit."""
    expected = output(model)
    with attach(model, CanaryConfig(mode="log", content="full", seed=7)) as handle:
        with _counting_prefixes() as shared:
            equal = output(model) == expected
        certificate = handle.certificate()
    place: list[Any] = []

    def harm(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not place and (struck := flip(model, kwargs)) is not None:
            place.append(struck)

    found = None
    with attach(model, CanaryConfig(content="full", seed=7)):
        hook = model.register_forward_pre_hook(harm, with_kwargs=True, prepend=True)
        try:
            output(model)
        except KVCorruptionError as error:
            found = error.findings[0]
        hook.remove()
    progress(f"{transformers.__version__}: {len(certificate['findings'])} findings, {found and found.code} found")
    return {
        "findings": len({own["incident"] for own in certificate["findings"]}),
        "codes": sorted(certificate["fired"]),
        "entries": certificate["slots_checked"],
        "equal": equal,
        "prefix_tokens": sum(shared),
        "fault": found and found.code,
        "in_place": bool(found and place and (found.part, found.head, found.dim, found.bit) == ("V", HEAD, DIM, BIT))
        and (found.layer, found.slot) == place[0],
    }


def _flip_dense(model: Any, kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Layer and position of the fourth entry that a layer holds, once rows have ten; a window has dropped some."""
    layers = getattr(cache_given(kwargs), "layers", [])
    if len(layers) <= LAYER or not layers[LAYER].is_initialized or int(layers[LAYER].get_seq_length()) < 10:
        return None
    values = layers[LAYER].values
    values.view(torch.int32)[0, HEAD, 3, DIM] ^= 1 << BIT
    return LAYER, 3 + max(0, int(layers[LAYER].get_seq_length()) - values.shape[2])


def _flip_paged(model: Any, kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Layer and index of the third entry of a batch that reads enough."""
    cache = next((value for value in kwargs.values() if isinstance(value, PagedAttentionCache)), None)
    read = [] if cache is None else kwargs["read_index"][0]
    if len(read) < 10:
        return None
    layer = LAYER if len(kwargs["read_index"]) == 1 else 0
    memory_of(cache, layer)[1].view(torch.int32)[int(read[2]), HEAD, DIM] ^= 1 << BIT
    return layer, int(read[2])


class _counting_prefixes:
    """Tokens of prefixes that were found in the cache."""

    def __enter__(self) -> list[int]:
        self._own, found = PagedAttentionCache.search_prefix_match, []

        @functools.wraps(self._own)
        def search(*args: Any, **kwargs: Any) -> int:
            found.append(self._own(*args, **kwargs))
            return found[-1]

        PagedAttentionCache.search_prefix_match = search
        return found

    def __exit__(self, *error: object) -> None:
        PagedAttentionCache.search_prefix_match = self._own


if __name__ == "__main__":
    events_to_stderr()
    main()
