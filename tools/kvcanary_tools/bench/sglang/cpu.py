"""``python -m kvcanary_tools.bench.sglang.cpu --keep``: scenes in a real SGLang on a CPU, each in a process of its own.

SGLang lies in a folder that comes first on the child's path; torch, Triton and transformers are our own. `--keep`
writes what came out among the results that docs/sglang.md quotes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from kvcanary_tools.bench.sglang.misreading import AS_IT_IS, MISREADINGS, OF_GRAPHS
from kvcanary_tools.files import lines_of

ROOT = Path(__file__).parents[4]
PINS = ROOT / "tests" / "kvcanary" / "adapters" / "real_sglang" / "sglang.txt"
RESULTS = Path(__file__).parents[1] / "results" / "sglang_cpu.json"
OURS = ("torch", "triton", "transformers")
Json = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """What a scheduler is built with, what its process is told, and what happens to it.

    is_plugged: the canary of the first act comes in by the entry point
    """

    acts: tuple[Json, ...]
    settings: Json = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    is_plugged: bool = False


LIFE = {"later": 6, "new": 20, "at": 9, "abort": "x1"}
#: Of requests so long, and so many, that a million entries are judged.
LONG = {"later": 48, "new": 20, "prompt": 260, "answer": 100}
#: Drafts in slots that others had: eviction in every step.
REUSE = {"new": 8, "later": 6, "answer": 16}
RETRACT = {"SGLANG_TEST_RETRACT": "1"}  # every few steps
OFF: Json = {"mode": "off"}
#: Faults that strike in another turn than others, or whose tokens are compared.
AT: dict[str, Json] = {"chunk_rotated": {"at": 0}, "draft_unstored": REUSE, "draft_hook_error": {"new": 12}}


def trees(topk: int, page: int, *faults: str) -> Scene:
    """EAGLE: sound, without a canary, and each fault in turn."""
    acts = ({"new": 12}, {**OFF, "new": 12}, *({"fault": fault, **AT.get(fault, {})} for fault in faults))
    nodes = 4 if topk == 1 else 6
    return Scene(acts, {"eagle": True, "topk": topk, "nodes": nodes, "page_size": page})


def misread(scene: Scene, misreading: str) -> Scene:
    """And attention that reads otherwise while it is asked."""
    return Scene((*scene.acts, {"misreading": misreading, "new": 2}), scene.settings)


def graphed(scene: Scene) -> Scene:
    """The same where a draft's extends run from a graph of SGLang's own, or what stands for it here."""
    return Scene(scene.acts, {**scene.settings, "graphs": True})


def slots(topk: int, page: int, *faults: str) -> Scene:
    """The same with faults of slots and of what a draft is fed, in short answers; `freed` ends SGLang's own books."""
    scene = trees(topk, page, *faults)
    return Scene(tuple({**act, "new": 6} for act in scene.acts[2:]), scene.settings)


def standalone(page: int, *faults: str) -> Scene:
    """A draft model of its own, with two branches."""
    scene = trees(2, page, *faults)
    acts = ({**act, "new": 24} for act in scene.acts[:2])  # most of what it drafts is accepted
    return Scene((*acts, *scene.acts[2:]), {**scene.settings, "algorithm": "STANDALONE"})


def reverted(number: int, scene: Scene) -> Scene:
    """EAGLE without one of SGLang's own mends; its control is the sound act of the scene of the same settings."""
    return Scene(scene.acts[:1], scene.settings, {"SGLANG_DEBUG_REVERT_PR": str(number)})


def beside(topk: int, *faults: str) -> Scene:
    """EAGLE with both canaries: sound, the bits, and these faults."""
    acts = ({"new": 6}, *({"fault": fault, "new": 6} for fault in (*BITS, *faults)))
    nodes = 4 if topk == 1 else 6
    return Scene(acts, {"eagle": True, "topk": topk, "nodes": nodes, "page_size": 1, "peer": True})


#: Requests that end at the context's limit, where what SGLang reserves ahead leaves no room in a row that has not been
#: widened for it. With several branches an assertion of SGLang's own stops that; with one, nothing does.
AT_THE_END = Scene(
    ({"new": 24}, {**OFF, "new": 24}),
    {"eagle": True, "topk": 1, "nodes": 4, "page_size": 16, "context_length": 64},
)


#: Faults in pools, and in what is fed to them.
OF_POOLS = (
    "bit", "swapped", "foreign", "off_by_one", "unstored", "whole_hit", "chunk_ends_prompt", "token_lost", "not_finite",
)  # fmt: skip
#: What `make test` runs: a quarter of a minute.
QUICK = {
    "dense": Scene(
        (LIFE, {**OFF, **LIFE}),
        {"max_total_tokens": 320, "ahead": True},
        {**RETRACT, "KVCANARY_MODE": "log"},
        is_plugged=True,
    ),
    "dense faults": Scene(
        (
            *({"fault": fault} for fault in OF_POOLS),
            {"fault": "hook_error"},
            OFF,
            *({"misreading": harm, "new": 2} for harm in MISREADINGS),
            {"mode": "raise", "fault": "bit"},
        )
    ),
    "ahead": Scene(({"mode": "raise", "new": 12, "fault": "tokens_exchanged"},), {"ahead": True}),
}
PLAIN: Json = {"new": 8}
WAVES: Json = {"prefix": 66, "between": ["reload"]}
WIDE: Json = {"context_length": 256, "max_total_tokens": 1280, "chunked_prefill_size": 64}
EMBEDDED: Json = {"new": 8, "embeddings": True}
EVENTFUL: Json = {"between": ["flush", "sleep", "reload", "reload_and_flush"]}


#: Rows of a batch decide how many steps there are, and what was accepted last: none too, which is no draft at all.
BY_ROWS: Json = {
    "1": {"candidate_steps": [1, 3], "update_interval": 1, "warmup_batches": 1},
    "2": {"candidate_steps": [2]},
    "4": {"candidate_steps": [0, 3], "update_interval": 1, "warmup_batches": 2},
}


def adapted(page: int, *faults: str) -> Scene:
    """Draft steps that change between rounds: sound, without a canary, and each fault in turn."""
    settings = {"eagle": True, "topk": 1, "nodes": 4, "steps": 3, "page_size": page, "adaptive": BY_ROWS}
    return Scene(({"new": 24}, {**OFF, "new": 24}, *({"fault": fault, "new": 24} for fault in faults)), settings)


def ranks(settings: Json, *acts: Json) -> Scene:
    """Two processes share a model: sound, without a canary, and these acts, whose faults strike in the second."""
    return Scene(
        ({"new": 12}, {**OFF, "new": 12}, *({**act, "of_rank": 1} for act in acts)), {**settings, "tp_size": 2}
    )


def pool(settings: Json, *faults: str, act: Json = PLAIN) -> Scene:
    """Some class of pools: sound, without a canary, and each fault in turn."""
    return Scene((act, {**OFF, **act}, *({"fault": fault} for fault in faults)), settings)


TWO_POOLS: Json = {"kind": "windows", "swa_full_tokens_ratio": 1.0}
#: Layers with windows, and the same as SGLang reads them (`misreading.read_by_map`).
QUICK["windows"] = misread(misread(pool(TWO_POOLS, "bit", "window_bit"), AS_IT_IS), "window_forgotten")
STATES: Json = {"kind": "states", "page_size": 1, "is_interpreted": True, "max_mamba_cache_size": 32}
#: Pools of other classes, other pages and types, and what ends the life of entries.
POOLS = {
    "windows, page 1": pool({**TWO_POOLS, "page_size": 1}, "window_bit", act={"new": 24}),
    "latent": pool({"kind": "latent"}, "bit"),
    "states": pool(STATES, "bit", act={"new": 8, "between": ["reload"]}),
    "fp8": pool({"kv_cache_dtype": "fp8_e4m3"}, "bit"),
    "page 16, bfloat16": pool({"page_size": 16, "dtype": "bfloat16", **WIDE}, "bit", act=WAVES),
    "page 64, float16": pool({"page_size": 64, "dtype": "float16", **WIDE}, act=WAVES),
    "lifetimes": pool({}, act=EVENTFUL),
}
EMBEDDINGS = Scene((EMBEDDED, {**OFF, **EMBEDDED}, {**EMBEDDED, "at": 0, "fault": "embeddings_shared"}))
#: Recurrent states: `state_freed` ends SGLang's own books.
STATE_FAULTS = Scene(
    tuple({"fault": fault, **own} for fault, own in {
        "state_bit": {}, "state_swapped": {}, "no_state_copy": {"at": 0, "between": ["reload"]}, "state_freed": {},
    }.items()),
    STATES,
)  # fmt: skip
#: Gated delta nets and Mamba 2, which Triton's interpreter runs, one to four minutes a scene. With `extra_buffer` they
#: keep states for the prefix cache as they go on.
DELTAS: Json = {
    "kind": "deltas", "page_size": 1, "dtype": "float16", "attention_backend": "triton", "max_mamba_cache_size": 32,
    "disable_overlap_schedule": True, "mamba_radix_cache_strategy": "no_buffer",
}  # fmt: skip
KEPT: Json = {**DELTAS, **WIDE, "mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": 64}
NGRAM: Json = {"eagle": True, "algorithm": "NGRAM", "nodes": 4}
LATER: Json = {"new": 12, "at": 4}
GOES_ON: Json = {"new": 12, "prefix": 54, "between": ["reload"]}
STATES_OF_DRAFTS = {
    "deltas, n-gram": Scene(
        ({"new": 12}, {**OFF, "new": 12}, {**LATER, "mode": "raise", "fault": "state_uncommitted"}), {**DELTAS, **NGRAM}
    ),
    "deltas": Scene(({"new": 12}, {**OFF, "new": 12}), DELTAS),
    "deltas, topk 2": Scene(
        (
            {"new": 12},
            {**OFF, "new": 12},
            *({**LATER, "fault": fault} for fault in ("state_bit", "state_swapped", "state_commit", "state_scatter")),
        ),
        {**DELTAS, "eagle": True, "topk": 2, "nodes": 6},
    ),
    "deltas, kept": Scene((GOES_ON, {**OFF, **GOES_ON}, {"at": 0, "fault": "state_untracked"}), KEPT),
    "deltas, kept, NEXTN": Scene(
        (GOES_ON, {**OFF, **GOES_ON}, {**LATER, "fault": "draft_bit"}),
        {**KEPT, "eagle": True, "algorithm": "NEXTN", "topk": 1, "nodes": 4},
    ),
    "deltas, kept, n-gram": Scene(
        (GOES_ON, {**OFF, **GOES_ON}, {"at": 0, "fault": "state_untracked"}), {**KEPT, **NGRAM}
    ),
    "mamba2, kept, n-gram": Scene(
        (GOES_ON, {**OFF, **GOES_ON}, {**LATER, "fault": "state_swapped"}), {**KEPT, **NGRAM, "kind": "mamba2"}
    ),
}
COMES_BACK: Json = {"between": ["many", "many"]}
#: A tier in host memory, on stand-ins for what pins it and copies.
TIER = Scene(
    (
        COMES_BACK,
        {**OFF, **COMES_BACK},
        *({**COMES_BACK, "fault": fault, "at": 0} for fault in ("tier_bit", "no_wait")),
    ),
    {"tier": True, "max_total_tokens": 160, "max_running_requests": 2},
)
#: Drafting: Triton's interpreter runs SGLang's own kernels of trees, half a minute a scene.
TREES = {
    "dense, page 1": Scene(
        (LIFE, {**OFF, **LIFE}, {**LIFE, "abort": "", "fault": "late_write"}, {"fault": "written_when_free"}),
        {"max_total_tokens": 320, "page_size": 1},
        RETRACT,
    ),
    "dense, long": Scene(
        (LONG, {**OFF, **LONG}),
        {"context_length": 512, "max_total_tokens": 5120, "max_running_requests": 16, "chunked_prefill_size": 256},
    ),
    "topk 1, page 1": misread(
        trees(1, 1, "one_too_long", "draft_bit", "draft_unstored", "draft_hook_error"), "draft_scaled_twice"
    ),
    "topk 1, page 4": trees(1, 4, "one_too_long", "off_by_one"),
    "topk 1, graphs": graphed(trees(1, 4, "draft_bit")),
    "topk 2, page 1": trees(2, 1, "one_too_long", "short_move", "tokens_exchanged"),
    "topk 2, page 4": trees(2, 4, "one_too_long", "short_move", "no_tail_copy"),
    "topk 2, page 4, life": Scene(
        (REUSE, {**OFF, **REUSE}), {"eagle": True, "topk": 2, "nodes": 6, "page_size": 4, "max_total_tokens": 320}
    ),
    "topk 2, page 4, slots": slots(2, 4, "draft_scatter", "verify_scatter", "chunk_rotated", "freed"),
    "topk 4, page 1": trees(4, 1, "one_too_long", "short_move"),
    "topk 4, page 4": trees(4, 4, "one_too_long", "short_move", "no_tail_copy"),
    "standalone, page 1": standalone(1),
    "standalone, page 4": standalone(4, "draft_bit", "one_too_long", "chunk_rotated"),
    "n-gram, page 1": Scene(
        (
            {"new": 24},
            {**OFF, "new": 24},
            *({"fault": fault} for fault in ("one_too_long", "off_by_one", "verify_scatter")),
        ),
        {"eagle": True, "algorithm": "NGRAM", "nodes": 6, "page_size": 1},
    ),
    "adaptive, page 1": adapted(1, "draft_bit"),
    "adaptive, page 4": adapted(4),
    "at the context's end": AT_THE_END,
    "without 25015": reverted(25015, trees(1, 4)),
    "without 26329": reverted(26329, trees(1, 4)),
    "without 26972": Scene(({"mode": "raise", "new": 24},), AT_THE_END.settings, {"SGLANG_DEBUG_REVERT_PR": "26972"}),
}
#: One of two ranks does otherwise. Where it has other rows, a forward would wait for ever.
RANKS = {
    "two ranks": ranks(
        {}, *({"fault": fault} for fault in ("another_token", "fewer_slots", "bit")),
        {"mode": "raise", "fault": "forgotten_prefixes", "at": 0, "prefix": 16, "between": ["nothing"]},
    ),
    "two ranks, topk 2": ranks(
        {"eagle": True, "topk": 2, "nodes": 6, "page_size": 4}, {"mode": "raise", "fault": "one_too_long"}
    ),
    "two ranks, latent": ranks({"kind": "latent"}, {"fault": "other_weight"}),
}  # fmt: skip
#: SGLang's own canary beside ours, in one scheduler: bits of the first and the last layer, and slots that are wrong.
BITS = ("first_k", "first_v", "bit", "last_v")
BESIDE = {
    "beside, 18 layers": Scene(
        ({}, *({"fault": fault} for fault in (*BITS, "off_by_one", "swapped", "foreign"))),
        {"layers": 18, "peer": True, "page_size": 1},
    ),
    "beside, topk 1": beside(1, "one_too_long"),
}
ALONE = {
    "graphs": Scene(
        tuple({"misreading": name, "new": 2} for name in OF_GRAPHS), {"attention_backend": "triton", "dtype": "float16"}
    ),
    "windows, triton": Scene(
        ({"misreading": AS_IT_IS, "new": 6},), {**TWO_POOLS, "attention_backend": "triton", "dtype": "float16"}
    ),
    "embeddings": EMBEDDINGS,
    "states, faults": STATE_FAULTS,
    "host tier": TIER,
}
SCENES = QUICK | POOLS | ALONE | STATES_OF_DRAFTS | TREES | RANKS | BESIDE


def pinned() -> str:
    """The release that tests run."""
    return re.findall(r"^sglang==([\d.]+)", PINS.read_text(encoding="utf-8"), re.M)[0]


def folder_of(release: str) -> Path:
    """Where it is installed, by `make real-sglang`."""
    return ROOT / "build" / f"sglang-{release}"


def played(scene: Scene, installed: Path, place: Path) -> list[Json]:
    """What each act of a scene gave, of every rank. RuntimeError, with what a child said last, where one ended early.

    installed: the folder that holds SGLang; place: for models and what lies on the child's path
    """
    ranks = scene.settings.get("tp_size", 1)
    told, environ = {**scene.settings, "acts": scene.acts}, {**_unbound(ranks), **scene.environ}
    if ranks > 1:
        told["nccl_port"] = _free_port()

    def said_by(rank: int) -> list[str]:
        own = (place / f"rank {rank}", {**told, "rank": rank}) if ranks > 1 else (place, told)
        return _said("scene", installed, own[0], environ, json.dumps(own[1]), is_plugged=scene.is_plugged)

    with ThreadPoolExecutor(ranks) as children:
        return [act for lines in children.map(said_by, range(ranks)) for act in _told(lines)["acts"]]


def _unbound(ranks: int) -> dict[str, str]:
    """More ranks than a machine has sockets: SGLang wants to be told of a core for each, and a CPU here binds none."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * ranks)} if ranks > 1 else {}


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def _told(lines: list[str]) -> Json:
    return json.loads(next(line for line in lines if line.startswith("{")))  # type: ignore[no-any-return]


def served(installed: Path, place: Path, mode: str = "log", ranks: int = 1) -> Json:
    """What a whole engine gave whose schedulers are processes of their own, and the `lines` that all of them wrote."""
    environ = {"KVCANARY_MODE": mode, **_unbound(ranks)}
    lines = _said("engine", installed, place, environ, str(ranks), is_plugged=True)
    return {**_told(lines), "lines": lines}


def _said(
    module: str, installed: Path, place: Path, environ: dict[str, str], *told: str, is_plugged: bool
) -> list[str]:
    """What a child has written; with `is_plugged` it finds this tree's entry points."""
    path = [str(installed), *(str(ROOT / name) for name in (".", "kernels", "tools"))]
    if is_plugged:
        path.insert(0, str(_plugged(place)))
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY_", "SGLANG_"))}
    own |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, "-m", f"kvcanary_tools.bench.sglang.{module}", str(place), *told]
    place.mkdir(exist_ok=True)
    child = subprocess.run(command, env=own, cwd=place, capture_output=True, text=True, timeout=900, check=False)
    lines = child.stdout.splitlines()
    if child.returncode or not any(line.startswith("{") for line in lines):
        raise RuntimeError(f"it ended with {child.returncode}: {child.stdout[-1000:]}{child.stderr[-3000:]}")
    return lines


def _plugged(place: Path) -> Path:
    """A folder that tells of this tree's entry points, whatever was installed before they were written."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    folder = place / "plugged" / "kvcanary-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcanary\nVersion: 0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in own.items()) for group, own in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder.parent


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1)
@click.option("--keep", is_flag=True, help="Write it among the results that docs/sglang.md quotes.")
def main(names: tuple[str, ...], keep: bool) -> None:
    """Play the scenes of these NAMES, or all, and show what the canary said."""
    record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() and names else {"scenes": {}}
    record["machine"] = {"sglang": pinned(), **{name: version(name) for name in OURS}, "device": "cpu"}
    record["machine"]["platform"] = platform.platform()
    with tempfile.TemporaryDirectory() as place:
        for name in names or SCENES:
            started = time.perf_counter()
            acts = played(SCENES[name], folder_of(pinned()), Path(place))
            own = {"settings": SCENES[name].settings, "environ": SCENES[name].environ, "acts": list(summed(acts))}
            record["scenes"][name] = {**own, "seconds": round(time.perf_counter() - started, 1)}
            click.echo(f"{name}: {json.dumps(record['scenes'][name])}")
            if keep:
                RESULTS.write_text(lines_of(record) + "\n", encoding="utf-8")


def summed(acts: list[Json]) -> Iterator[Json]:
    """Of each act what is kept: by pool how much was judged and what fired, first findings, whether tokens are equal.

    Tokens of a sound act are compared with those of the act that has no canary.
    """
    bare = next((act["outputs"] for act in acts if act["mode"] == "off"), None)
    for act in acts:
        if act["mode"] == "off":
            continue
        kept = ("rank", "mode", "fault", "misreading", "touched", "plugged_in", "counts", "raised", "left")
        own = {name: act[name] for name in kept if act.get(name) not in (None, "")}
        names = ("forwards", "slots_checked", "bytes_checked", "fired", "untold_incidents")
        own["pools"] = {role: {name: told[name] for name in names} for role, told in act["reports"].items()}
        for role, told in act["reports"].items():
            if told["states_checked"]:
                own["pools"][role]["states_checked"] = told["states_checked"]
        if act["peer"]:
            own["peer"] = [line.splitlines()[0] for line in act["peer"]][:4]
        own["findings"] = [shown(finding) for finding in act["findings"]]
        if not act["fault"] and not act["misreading"] and bare is not None:
            own["equal_tokens"] = act["outputs"] == bare
        yield own


def shown(finding: Json) -> Json:
    """What a finding says in short."""
    names = ("code", "pool", "reader", "writer", "position", "slot", "layer", "site", "step", "expected", "found")
    cause = finding["causes"][0] if finding["causes"] else None
    return {**{name: finding[name] for name in names}, "cause": cause and cause["text"]}


if __name__ == "__main__":
    main()
