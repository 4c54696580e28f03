"""The repository stays small: its tracked tree, its weights, and how often weights entered the history."""

from __future__ import annotations

import subprocess
from pathlib import Path

MIB = 2**20
MB = 10**6


def test_tracked_tree_is_below_30_mib(tracked_files: list[Path]) -> None:
    """A clone is a matter of seconds."""
    total = sum(path.stat().st_size for path in tracked_files)
    assert total < 30 * MIB, f"{total / MIB:.1f} MiB tracked"


def test_weights_obey_their_limits(root: Path, tracked_files: list[Path]) -> None:
    """All weights together take at most 22 MB, one shard at most 15 MB, and they lie in one folder."""
    shards = [path for path in tracked_files if path.suffix in {".safetensors", ".bin", ".pt", ".pth", ".npz"}]
    assert shards, "the embedded model is missing"
    assert {path.suffix for path in shards} == {".safetensors"}
    assert all(path.is_relative_to(root / "spec_engine" / "models" / "embedded_model") for path in shards)
    assert max(path.stat().st_size for path in shards) <= 15 * MB
    assert sum(path.stat().st_size for path in shards) <= 22 * MB


def test_weights_entered_the_history_at_most_twice(root: Path, tracked_files: list[Path]) -> None:
    """Each retraining that is committed stays in every clone for ever."""
    for shard in [path for path in tracked_files if path.suffix == ".safetensors"]:
        name = str(shard.relative_to(root))
        log = subprocess.run(["git", "log", "--format=%h", "--", name], cwd=root, capture_output=True, text=True)
        assert len(log.stdout.split()) <= 2, f"{name} was committed in {log.stdout.split()}"
