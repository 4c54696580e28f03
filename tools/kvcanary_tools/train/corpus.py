"""The training text: the .py files of CPython's standard library as one archive, checked against a manifest.

The manifest is committed, the archive is not. A file belongs to the held-out part when its sha256 starts
with 0 (one file in sixteen), so the split needs no list and cannot drift.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import platform
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEPT = 16  # digits of a sha256 that the manifest keeps
MANIFEST = Path(__file__).with_name("corpus_manifest.txt")

# What a build or an installation adds to the library: not part of its source.
_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "config-")
_SKIPPED_FILES = ("_sysconfigdata",)


class CorpusError(ValueError):
    """The folder or archive is not the corpus that the manifest names."""


@dataclass(frozen=True)
class SourceFile:
    path: str
    data: bytes
    sha256: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.sha256)

    @property
    def text(self) -> str | None:
        """The file as text, None where it is not UTF-8 (such files are neither trained nor tested on)."""
        try:
            return self.data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            return None


def is_held_out(sha256: str) -> bool:
    return sha256.startswith("0")


def read_folder(folder: Path | None = None) -> list[SourceFile]:
    """The .py files under `folder` (this interpreter's standard library), sorted by path."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = [path for path in folder.rglob("*.py") if path.is_file() and _belongs(path.relative_to(folder))]
    files = [_source_file(path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths]
    if not files:
        raise CorpusError(f"the corpus folder must hold .py files, {folder} holds none")
    return sorted(files, key=lambda file: file.path)


def write_archive(files: list[SourceFile], archive: Path) -> str:
    """Writes a tar.gz whose bytes depend on the files alone and returns its sha256."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for file in sorted(files, key=lambda file: file.path):
            info = tarfile.TarInfo(file.path)
            info.size = len(file.data)
            tar.addfile(info, io.BytesIO(file.data))
    packed = gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(packed)
    return hashlib.sha256(packed).hexdigest()


def read_archive(archive: Path) -> Iterator[SourceFile]:
    with tarfile.open(archive) as tar:
        for member in tar:
            data = tar.extractfile(member)
            if data is not None:
                yield _source_file(member.name, data.read())


def write_manifest(files: list[SourceFile], manifest: Path = MANIFEST, version: str | None = None) -> None:
    version = platform.python_version() if version is None else version
    header = f"# CPython {version} standard library: path size sha256[:{KEPT}]; held out where that starts with 0"
    lines = [f"{header}\n"]
    lines += [f"{file.path} {len(file.data)} {file.sha256[:KEPT]}\n" for file in files]
    manifest.write_text("".join(lines), encoding="utf-8")


def verify_manifest(files: list[SourceFile], manifest: Path = MANIFEST) -> None:
    """Raises a CorpusError that names the first differences between the files and the manifest."""
    header, *lines = manifest.read_text(encoding="utf-8").splitlines()
    expected = {path: sha256 for path, _, sha256 in (line.rsplit(" ", 2) for line in lines)}
    found = {file.path: file.sha256[:KEPT] for file in files}
    missing = sorted(expected.keys() - found.keys())
    surplus = sorted(found.keys() - expected.keys())
    changed = sorted(path for path in expected.keys() & found.keys() if expected[path] != found[path])
    if missing or surplus or changed:
        raise CorpusError(
            f"the corpus must be the one of the manifest ({header.lstrip('# ').split(':')[0]}): "
            f"{_few('missing', missing)}, {_few('surplus', surplus)}, {_few('changed', changed)}; "
            "give the library folder of that very release with --stdlib"
        )


def _belongs(path: Path) -> bool:
    in_skipped = any(part.startswith(_SKIPPED_FOLDERS) for part in path.parts[:-1])
    return not in_skipped and not path.name.startswith(_SKIPPED_FILES)


def _source_file(path: str, data: bytes) -> SourceFile:
    return SourceFile(path, data, hashlib.sha256(data).hexdigest())


def _few(what: str, paths: list[str]) -> str:
    return f"{len(paths)} {what}" + (f" ({', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''})" if paths else "")
