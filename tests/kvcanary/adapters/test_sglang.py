"""How the plug-in comes into SGLang: what it registers, and that it never leaves a server unwatched in silence."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcanary.adapters.sglang.compatibility import unfollowed

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

    def run(program: str, mode: str = "raise", **files: str | None) -> subprocess.CompletedProcess[str]:
        for name, text in {**FILES, **{name.replace("__", "/") + ".py": text for name, text in files.items()}}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
        ours = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "kernels")))
        environment = {**os.environ, "PYTHONPATH": ours, "KVCANARY_MODE": mode}
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
    assert done.stdout == f"[('{SCHEDULER}.Scheduler.__init__', 'AFTER')]\n", done.stderr


def test_a_process_without_a_scheduler_imports_none(child) -> None:
    """A detokenizer would spend ten seconds on it."""
    assert child(f"{REGISTER}register(); print('{SCHEDULER}' in sys.modules){TOLD}").stdout == "False\n[]\n"


@pytest.mark.parametrize(
    ("mode", "files", "sentence"),
    [
        ("abort", {}, "mode must be 'log' or 'raise' here, got 'abort'"),
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


def test_settings_that_are_not_followed_are_refused() -> None:
    """Entries that come from elsewhere, or forwards that run otherwise: each is named; what a server lacks is off."""
    assert unfollowed(SimpleNamespace(disaggregation_mode="null", enable_hierarchical_cache=False, pp_size=1)) == []
    refused = unfollowed(SimpleNamespace(disaggregation_mode="decode", enable_hierarchical_cache=True, pp_size=2))
    assert [sentence.split()[0] for sentence in refused] == [
        "disaggregation_mode",
        "enable_hierarchical_cache",
        "pp_size",
    ]
    assert refused[0].startswith("disaggregation_mode must be 'null' here, got 'decode'")


def test_the_entry_point_names_this_function() -> None:
    """What SGLang loads by the name of its group is `register`."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    assert points == {"kvcanary": "kvcanary.adapters.sglang:register"}
