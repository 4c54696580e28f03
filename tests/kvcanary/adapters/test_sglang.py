"""How the plug-in comes into SGLang: what it registers, and that it never leaves a server unwatched in silence."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from kvcanary import CanaryConfig
from kvcanary.adapters.observed.canary import PagedCanary
from kvcanary.adapters.observed.inputs import NOTHING, UNKNOWN
from kvcanary.adapters.sglang.compatibility import NEEDED, NOT_FOLLOWED, unfollowed
from kvcanary.adapters.sglang.draft import WatchedDraft
from kvcanary.adapters.sglang.fed import FedForward, are_named, identity_of, tokens_of
from kvcanary.adapters.sglang.runner import WatchedRunner
from kvcanary.adapters.sglang.scheduler import MOVE, PREFILL, Handle, attach

ROOT = Path(__file__).parents[3]
REGISTRY = """
from enum import Enum
HookType = Enum("HookType", ["BEFORE", "AFTER", "AROUND", "REPLACE"])
class HookRegistry:
    told = []
    @classmethod
    def register(cls, target, hook, kind):
        cls.told.append((target, kind.name))
"""
FILES = {
    "sglang/__init__.py": "__version__ = '0.5.23'",
    "sglang/srt/__init__.py": "",
    "sglang/srt/plugins/__init__.py": "",
    "sglang/srt/plugins/hook_registry.py": REGISTRY,
    "sglang/srt/managers/__init__.py": "",
    "sglang/srt/managers/scheduler.py": "class Scheduler:\n    def __init__(self): pass",
}
SCHEDULER = "sglang.srt.managers.scheduler"
REGISTER = "import sys; from kvcanary.adapters.sglang import register; "
TOLD = "; from sglang.srt.plugins.hook_registry import HookRegistry; print(HookRegistry.told)"


@pytest.fixture
def child(tmp_path: Path):
    """Runs a program in a process of its own whose SGLang is a few lines long; `files` replaces some of them."""

    def run(
        program: str, mode: str = "raise", variable: str = "MODE", **files: str | None
    ) -> subprocess.CompletedProcess[str]:
        for name, text in {**FILES, **{name.replace("__", "/") + ".py": text for name, text in files.items()}}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
        ours = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "kernels")))
        environment = {**os.environ, "PYTHONPATH": ours, f"KVCANARY_{variable}": mode}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    return run


def test_nothing_is_imported_where_the_mode_is_off(child) -> None:
    """Neither torch, nor the rest of kvcanary, nor anything of SGLang."""
    program = "register(); print(sorted({'torch', 'sglang', 'kvcanary.config', 'structlog'} & set(sys.modules)))"
    for mode in ("off", " Off ", ""):
        assert child(REGISTER + program, mode).stdout == "[]\n"


def test_the_scheduler_is_hooked_once(child) -> None:
    """The hook runs after its constructor; to register twice is harmless."""
    done = child(f"import {SCHEDULER}; {REGISTER}register(); register(){TOLD}")
    assert done.stdout == f"[('{SCHEDULER}.Scheduler.__init__', 'AROUND')]\n", done.stderr


def test_a_process_without_a_scheduler_imports_none(child) -> None:
    """A detokenizer would spend ten seconds on it."""
    assert child(f"{REGISTER}register(); print('{SCHEDULER}' in sys.modules){TOLD}").stdout == "False\n[]\n"


@pytest.mark.parametrize(
    ("mode", "files", "sentence"),
    [
        ("abort", {}, "mode must be 'log' or 'raise' here, got 'abort'"),
        ("heal", {}, "mode must be 'log' or 'raise' here, got 'heal'"),
        ("rasie", {}, "mode must be one of"),
        ("raise", {"sglang__srt__managers__scheduler": None}, f"{SCHEDULER} is gone"),
        ("raise", {"sglang__srt__managers__scheduler": "class Other: pass"}, "has no attribute 'Scheduler'"),
        ("raise", {"sglang__srt__plugins__hook_registry": None}, "nothing can be hooked into SGLang: No module named"),
        ("raise", {"sglang__srt__plugins__hook_registry": "class HookRegistry: pass"}, "has no attribute 'HookType'"),
    ],
)
def test_a_start_that_cannot_be_watched_ends_with_a_sentence(child, mode: str, files: dict, sentence: str) -> None:
    """SGLang logs what a plug-in raises and serves on, unless it is SystemExit; so it is, with the remedy."""
    loaded = f"import {SCHEDULER}; " if files.get("sglang__srt__managers__scheduler", "") is not None else ""
    program = f"{loaded}{REGISTER}\ntry: register()\nexcept Exception: print('SGLang serves on')"
    done = child(program, mode, **files)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvcanary: ")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    if mode == "raise":
        assert "unset KVCANARY_MODE" in done.stderr


def test_a_variable_that_sets_nothing_ends_the_start(child) -> None:
    """Who asks for a canary by a name of before would serve without one."""
    done = child(f"{REGISTER}register()", "log", "KV_CANARY")
    assert (done.returncode, done.stderr) == (1, "kvcanary: KVCANARY_KV_CANARY sets nothing: it is KVCANARY_MODE now\n")


def test_settings_that_are_not_followed_are_refused() -> None:
    """Entries that come from elsewhere, or forwards that run otherwise: each is named; what a server lacks is off."""
    assert unfollowed(SimpleNamespace(disaggregation_mode="null", enable_lmcache=False, pp_size=1)) == []
    refused = unfollowed(SimpleNamespace(disaggregation_mode="decode", enable_lmcache=True, pp_size=2))
    assert [sentence.split()[0] for sentence in refused] == [
        "disaggregation_mode",
        "enable_lmcache",
        "pp_size",
    ]
    assert refused[0].startswith("disaggregation_mode must be 'null' here, got 'decode'")


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_each_setting_that_is_not_followed_is_refused_by_its_name(name: str) -> None:
    """Whatever it is set to; the sentence says what it must be."""
    off = NOT_FOLLOWED[name]
    [sentence] = unfollowed(SimpleNamespace(**{name: 2 if isinstance(off, int) and off > 0 else "set"}))
    assert sentence.startswith(f"{name} must be {off!r} here")


def test_the_entry_point_names_this_function() -> None:
    """What SGLang loads by the name of its group is `register`."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    assert points == {"kvcanary": "kvcanary.adapters.sglang:register"}


@pytest.mark.parametrize(
    ("start", "end", "tokens"),
    [(0, None, [1, 2, 3, 4, 5]), (1, 3, [2, 3]), (2, 4, [3, 4]), (3, 5, [4, 5]), (4, 9, [5]), (5, 6, [])],
)
def test_tokens_of_a_request_are_those_of_prompt_and_answer(start: int, end: int | None, tokens: list[int]) -> None:
    """Any span of both, as far as the host has it; nobody knows those of embeddings."""
    request = SimpleNamespace(input_embeds=None, origin_input_ids=[1, 2, 3], output_ids=[4, 5])
    assert tokens_of(request, start, end) == tokens
    request.input_embeds = [[0.5]]
    assert tokens_of(request, start, end) is None


def test_graphs_of_sglangs_draft_are_followed() -> None:
    """That of draft steps is told which graph it is; an extend in one is followed as any other. Where the number of
    steps is adapted, so are those of the others, each once, and what switches between them.
    """
    made = lambda: SimpleNamespace(cuda_graph_runner=Graph(), cuda_graph_runner_for_draft_extend=Graph())  # noqa: E731
    draft = SimpleNamespace(guard=object(), replayed=lambda graph, method, batch: graph)
    now, other = made(), made()
    worker = Worker(draft_worker=now, adaptive_controller=SimpleNamespace(_states={3: now, 1: other}))
    own: Any = SimpleNamespace(_forward=lambda own, method, batch: own, _adapted=None, target=SimpleNamespace(guard=0))
    hooked: list[tuple[Any, str, Any]] = []
    Handle._follow_graphs(own, worker, draft, lambda owner, name, hook, guard: hooked.append((owner, name, hook)))
    hooks = {id(owner): (name, hook) for owner, name, hook in hooked}
    assert len(hooks) == len(hooked) == 5
    for state in now, other:
        name, hook = hooks[id(state.cuda_graph_runner)]
        assert (name, hook(None, "batch")) == ("execute", state.cuda_graph_runner)
        name, hook = hooks[id(state.cuda_graph_runner_for_draft_extend)]
        assert (name, hook(None, "batch")) == ("execute", draft)
    assert hooks[id(worker)][0] == "apply_runtime_state"


class Graph:
    """One of SGLang's."""


class Worker(SimpleNamespace):
    """One that drafts."""


def test_places_of_a_content_must_hold_its_names() -> None:
    """One name for all places, or several in turn; another content's, or the bare placeholder, is none of them."""
    item = SimpleNamespace(offsets=[(1, 3)], padding_values=lambda: (1 << 40, 1 << 41))
    request = SimpleNamespace(multimodal_inputs=SimpleNamespace(mm_items=[item]))
    for prompt, is_named in (
        ([5, 1 << 40, 1 << 41, 1 << 40, 6], True),
        ([5, 1 << 40, 1 << 40, 1 << 40, 6], True),
        ([5, 1 << 40, 9, 1 << 40, 6], False),
        ([5, 9, 9, 9, 6], False),
    ):
        request.origin_input_ids = prompt
        assert are_named(request) is is_named
    assert are_named(SimpleNamespace(multimodal_inputs=None))
    assert are_named(SimpleNamespace())


def test_a_row_that_nobody_admitted_hides_no_grant_of_the_others() -> None:
    """Of the rows of one allocation those that are followed get their slots; of the others nothing is told."""
    told: list[tuple[list[int], list[int]]] = []
    granted = lambda slots, uids: told.append((slots.tolist(), uids.tolist()))  # noqa: E731
    own = SimpleNamespace(
        _uids={2: 7}, length=10, canary=SimpleNamespace(memory=SimpleNamespace(upload=lambda values: values)),
        owners=SimpleNamespace(granted=granted), rows=SimpleNamespace(req_to_token=torch.arange(40).view(4, 10)),
    )  # fmt: skip
    rows = [SimpleNamespace(kv=SimpleNamespace(req_pool_idx=number)) for number in (1, 2, 2)]
    WatchedRunner.granted(own, rows, [0, 3, 5], [4, 5, 5])
    assert told == [([23, 24], [7, 7])]
    WatchedRunner.granted(own, rows[:1], [0], [4])
    assert len(told) == 1


def test_a_row_that_outgrows_its_line_names_the_slot_behind_it() -> None:
    """Which request, how long, and what lies at the beginning of the next row now; none behind the last row."""
    own = SimpleNamespace(rows=SimpleNamespace(req_to_token=torch.arange(40).view(4, 10)), length=10)
    rows = [SimpleNamespace(rid=f"r{n}", kv=SimpleNamespace(req_pool_idx=n)) for n in range(4)]
    assert list(WatchedRunner._outgrown(own, rows, [11, 10, 9, 12])) == [("r0", 11, 10), ("r3", 12, -1)]


def test_where_the_device_alone_knows_lengths_the_host_has_bounds() -> None:
    """Rows end at most where they ended and what is written goes; one never measured, at most at the table's end."""
    canary = SimpleNamespace(_ends=np.array([5, 0, 30]), _grown=2, memory=SimpleNamespace(upload=lambda given: given))
    canary.ends_at_most = functools.partial(PagedCanary.ends_at_most, canary)
    made: list[torch.Tensor] = []
    own = SimpleNamespace(
        canary=canary, length=32, tier=None, states=None, _numbers={"a": 0, "b": 1, "c": 2}, _read=lambda forward: None,
        _samples=None, _given=SimpleNamespace(fill=lambda *given: None, mapped=()),
        _made=lambda names, numbers, site, ends, total: made.append(ends),
    )  # fmt: skip
    lengths = torch.empty(3, device="meta")  # nothing may be read of it
    fed = FedForward(SimpleNamespace(rows=range(12)), np.full(3, 4), torch.empty(12), lengths, None)
    WatchedRunner.read(own, fed, SimpleNamespace(rids=["a", "b", "c"]), ("verify", 0))
    assert made[0].tolist() == [11, 32, 32]


def test_what_replaces_a_method_has_its_parameters_names() -> None:
    """SGLang may call by name: what a wrapper names itself is called as in SGLang, and all else is passed on."""
    hooks = {"move_kv_cache": WatchedRunner.moved, PREFILL: WatchedDraft.prefill} | {
        name: getattr(Handle, f"_{own}")
        for name, own in {
            "run_batch": "run_batch", "process_batch_result": "process_batch_result", "free": "free",
            "release_kv_cache": "release", "alloc_for_extend": "alloc_for_extend", "checkpoint": "checkpoint",
            "alloc_for_decode": "alloc_for_decode", "alloc_for_spec_decode": "alloc_for_spec_decode",
            "forward_batch_generation": "generated", MOVE: "accept_tokens",
        }.items()
    }  # fmt: skip
    needed = {need.name.rpartition(".")[2].rpartition(":")[2]: need.parameters for need in NEEDED}
    for name, hook in hooks.items():
        taken = [own for own in inspect.signature(hook).parameters.values() if own.name not in ("self", "method")]
        named = [own.name for own in taken if own.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        theirs = [parameter for parameter in needed[name] if parameter != "self"]
        assert named == theirs[: len(named)], name


def test_a_scheduler_without_a_turn_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a share of all workers one may not be chosen this week: nothing is replaced, and the log says so."""
    module = "kvcanary.adapters.sglang.scheduler"
    monkeypatch.setattr(f"{module}.check", lambda drafts: [])
    monkeypatch.setattr(f"{module}.unfollowed", lambda arguments: [])
    monkeypatch.setattr(f"{module}.host_tier.unfollowed", lambda scheduler: [])
    runner = SimpleNamespace(device="cpu", tp_rank=3)
    scheduler = SimpleNamespace(draft_worker=None, server_args=None, tp_worker=SimpleNamespace(model_runner=runner))
    before = dict(vars(scheduler))
    with capture_logs() as events:
        assert attach(scheduler, CanaryConfig("log", share=1e-9)) is None
    assert vars(scheduler) == before
    assert [(own["event"], own["watched"], own["rank"]) for own in events] == [("kvcanary.turn", False, 3)]


def test_a_request_with_embeddings_of_its_own_shares_with_nobody() -> None:
    """Not even with one of the same embeddings, as SGLang has it; the next turn of a session goes on from it."""
    plain = SimpleNamespace(rid="a", lora_id=None, extra_key="key", positional_embed_overrides=None, session=None)
    names = [
        identity_of(SimpleNamespace(**vars(plain) | changed))
        for changed in (
            {},
            {"rid": "b"},
            {"positional_embed_overrides": object()},
            {"positional_embed_overrides": object(), "rid": "b"},
            {"positional_embed_overrides": object(), "session": object()},
        )
    ]
    assert names[0] == names[1] == names[4] == ("key", "", "", "")
    assert len(set(names)) == 3


class Prefill(SimpleNamespace):
    """A runner of the target in front of prefills, and what it says of their rows."""

    def __init__(self) -> None:
        own = {"origin_input_ids": [1] * 6, "input_embeds": None}
        requests = {name: SimpleNamespace(**own, output_ids=[2] * 2) for name in "abc"}
        memory = SimpleNamespace(total=0, upload=lambda values: values)
        canary = SimpleNamespace(memory=memory, events=[], groups=[None])
        super().__init__(
            requests=requests, canary=canary, token_offset=0, _ends={}, _generations={}, _are_kept=None, on_their_way=0
        )

    def begins(self, **rows: tuple[int, int]) -> list[bool]:
        """By name, entries that are there, and new ones: of whom what is sampled counts."""
        begins, new = zip(*rows.values(), strict=True)
        batch = SimpleNamespace(rids=[*rows], extend_prefix_lens_cpu=begins, extend_seq_lens_cpu=new)
        WatchedRunner._begin_prompts(self, batch, self.requests)
        return self._are_kept.tolist()

    def wanted(self, name: str, begin: int, new: int) -> list[int]:
        """Tokens that one row should be fed."""
        entries = SimpleNamespace(rows=[0] * new, requests=[name])
        fed = FedForward(entries, np.array([new]), torch.empty(new), torch.empty(1), torch.tensor([begin + new]))
        return WatchedRunner._known(self, fed, self.requests).tolist()


def test_what_is_sampled_counts_where_a_prompt_ends() -> None:
    """Behind all that the host has of a request, or more, which it is yet to hear of; nothing of one nobody knows."""
    assert Prefill().begins(a=(4, 3), b=(4, 4), c=(8, 1), d=(0, 90)) == [False, True, True, False]


def test_nothing_is_behind_a_prompt_that_a_prefill_did_not_end() -> None:
    """What the request has one more in the next forward was sampled within its prompt, until a prefill ends it."""
    runner = Prefill()
    runner.begins(a=(4, 3), b=(4, 4), d=(0, 90))
    for name in "ab":
        runner.requests[name].output_ids.append(5)
    assert runner.wanted("a", 6, 3) == [2, 2, NOTHING]
    assert runner.wanted("a", 8, 1) == [NOTHING]
    assert runner.wanted("b", 6, 3) == [2, 2, 5]
    assert runner.wanted("d", 90, 1) == [UNKNOWN]
    runner.begins(b=(8, 1))  # another prefill between them
    assert runner.wanted("a", 7, 2) == [2, NOTHING]
    runner.begins(a=(7, 2))
    assert runner.wanted("a", 8, 1) == [5]
    runner.begins(a=(4, 3))
    left = SimpleNamespace(rid="a", kv=SimpleNamespace(req_pool_idx=0))
    assert runner.wanted("a", 9, 1) == [NOTHING]
    WatchedRunner.leave(runner, left)
    assert runner.wanted("a", 9, 1) == [UNKNOWN]


def test_a_request_that_has_not_got_a_token_is_told() -> None:
    """Of a decode: where a step is looked at when the next runs, one token is on its way; embeddings have no tokens."""
    runner = Prefill()
    runner.requests["c"].input_embeds = [[0.5]]
    fed = SimpleNamespace(entries=SimpleNamespace(requests=[*"abcd"]), ends=torch.tensor([8, 9, 11, 11]))
    lost = [list(WatchedRunner._lost(runner, fed, runner.requests))]
    runner.on_their_way = 1
    lost += [list(WatchedRunner._lost(runner, fed, runner.requests))]
    fed.ends[0] = 10
    lost += [list(WatchedRunner._lost(runner, fed, runner.requests))]
    fed.ends = None
    lost += [list(WatchedRunner._lost(runner, fed, runner.requests))]
    assert lost == [[("b", 8, 9)], [], [("a", 8, 9)], []]


def test_a_row_of_a_prefill_that_computes_nothing_is_told() -> None:
    runner = Prefill()
    runner.begins(a=(4, 3), b=(8, 1))
    assert (runner.canary.memory.total, runner.canary.events) == (0, [])
    runner.begins(a=(7, 1), b=(8, 0), c=(6, 0))
    [event] = runner.canary.events
    assert runner.canary.memory.total == 2
    assert [row[:2] for row in event.rows] == [("b", 8), ("c", 6)]
