"""The corpus is deterministic, split by hash, and checked against a committed manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcanary_tools.train.corpus import (
    KEPT,
    MANIFEST,
    CorpusError,
    is_held_out,
    read_archive,
    read_folder,
    verify_manifest,
    write_archive,
    write_manifest,
)
from spec_engine.models.embedded import load_excerpts


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Three sources of a library, and four files that do not belong to it."""
    folder = tmp_path / "lib"
    for path in ("b.py", "pkg/a.py", "pkg/z.py", "site-packages/x.py", "pkg/__pycache__/y.py", "_sysconfigdata_q.py"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"name = {path!r}\n")
    (folder / "notes.txt").write_text("no source\n")
    return folder


def test_read_folder_takes_the_library_alone(library: Path) -> None:
    """Installed packages, caches and build records are left out; the rest is sorted by path."""
    assert [file.path for file in read_folder(library)] == ["b.py", "pkg/a.py", "pkg/z.py"]


def test_the_archive_depends_on_the_files_alone(library: Path, tmp_path: Path) -> None:
    """Two archives of the same files are equal byte for byte, whatever their order and times, and read back whole."""
    files = read_folder(library)
    first = write_archive(files, tmp_path / "one.tar.gz")
    (library / "b.py").touch()
    second = write_archive(read_folder(library)[::-1], tmp_path / "two.tar.gz")
    assert first == second
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    assert list(read_archive(tmp_path / "one.tar.gz")) == files


def test_another_library_is_refused_by_name(library: Path, tmp_path: Path) -> None:
    """Missing, surplus and changed files are each named in the error."""
    write_manifest(read_folder(library), tmp_path / "manifest.txt", version="3.11.7")
    verify_manifest(read_folder(library), tmp_path / "manifest.txt")
    (library / "b.py").write_text("changed\n")
    (library / "pkg/a.py").rename(library / "pkg/new.py")
    words = r"CPython 3.11.7 .*1 missing \(pkg/a.py\), 1 surplus \(pkg/new.py\), 1 changed \(b.py\).*--stdlib"
    with pytest.raises(CorpusError, match=words):
        verify_manifest(read_folder(library), tmp_path / "manifest.txt")


def test_an_empty_folder_is_no_corpus(tmp_path: Path) -> None:
    """A folder without sources is refused."""
    with pytest.raises(CorpusError, match=r"must hold \.py files"):
        read_folder(tmp_path)


def test_the_committed_manifest() -> None:
    """It names its CPython release, and about one file in sixteen is held out."""
    header, *lines = MANIFEST.read_text().splitlines()
    assert "CPython 3.11.7" in header
    shas = [line.rsplit(" ", 1)[1] for line in lines]
    assert all(len(sha) == KEPT for sha in shas)
    assert sorted(line.rsplit(" ", 2)[0] for line in lines) == [line.rsplit(" ", 2)[0] for line in lines]
    assert 0.04 < sum(map(is_held_out, shas)) / len(shas) < 0.09


def test_every_excerpt_is_of_a_held_out_file_of_the_manifest() -> None:
    """The excerpts that ship come from files of the manifest whose sha256 starts with 0."""
    shas = dict(line.rsplit(" ", 2)[::2] for line in MANIFEST.read_text().splitlines()[1:])
    for excerpt in load_excerpts():
        assert shas[excerpt.file] == excerpt.sha256[:KEPT]
        assert excerpt.sha256.startswith("0")
