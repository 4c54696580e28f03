"""Container: the zip of a dump, and how one is opened that nobody trusts."""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kvcanary.errors import DumpError

FORMAT = "kvcanary-dump"
VERSION = 8  # since 7 the manifest may have a kind
MIB = 1 << 20
MOST_NAME = 4096  # letters
MOST_FILE_BYTES = 256 * MIB
#: What a dump may hold, and how large each member may be when it is unpacked.
MEMBERS = {
    "manifest.json": 4 * MIB,
    "findings.jsonl": 16 * MIB,
    "events.jsonl": 128 * MIB,
    "requests.jsonl": 64 * MIB,
    "history.jsonl": 64 * MIB,
    "arrays.safetensors": 512 * MIB,
    "content.safetensors": 256 * MIB,
}
OPTIONAL = frozenset({"content.safetensors"})
LEVEL = 1  # of compression: an engine may be waiting
_END = struct.Struct("<4s4H2LH")  # signature, disks and entries, size and offset of the directory, comment length
_LOCATOR_BYTES = 20
MOST_DIRECTORY_BYTES = 4096


class Packed:
    """Integers of many lengths in one tensor; lines of JSON say where."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int64]] = []
        self._length = 0

    def ints(self, values: Any) -> tuple[int, int]:
        """Where they lie in the tensor `ints`: start and length."""
        part = np.asarray(values, np.int64).ravel()
        self._parts.append(part)
        self._length += len(part)
        return self._length - len(part), len(part)

    def tensors(self, arrays: Mapping[str, NDArray[Any]]) -> bytes:
        """These arrays and all that was packed, as safetensors."""
        ints = np.concatenate(self._parts) if self._parts else np.empty(0, np.int64)
        return save({"ints": ints, **{name: np.ascontiguousarray(values) for name, values in arrays.items()}})


def json_lines(values: Iterable[Any]) -> bytes:
    """One value a line."""
    return b"".join(json.dumps(value, separators=(",", ":")).encode() + b"\n" for value in values)


def write_members(path: Path, members: Mapping[str, bytes]) -> None:
    """One file, there whole or not at all, and readable by its owner alone."""
    part = path.with_name(f"{path.name}.part")
    try:
        with (
            open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive,
        ):
            for name, data in members.items():
                archive.writestr(name, data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_members(path: Path) -> dict[str, bytes]:
    """The members of a dump, none larger than it may be; DumpError for anything else."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise DumpError(f"{path} is no file: name a dump")
        if size > MOST_FILE_BYTES:
            raise DumpError(f"{path} has {size} bytes, a dump has at most {MOST_FILE_BYTES}: this is none")
        with open(path, "rb") as file:
            _check_directory(path, file, size)
            with zipfile.ZipFile(file) as archive:
                return _unpacked(path, archive)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, struct.error, ValueError) as e:
        if isinstance(e, DumpError):
            raise
        raise DumpError(f"{path} is damaged or no dump of kvcanary: {_short(e)}") from e


def read_arrays(path: Path, data: bytes) -> dict[str, NDArray[Any]]:
    """The tensors of a member; DumpError where it is not what safetensors write."""
    try:
        return dict(load(data))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DumpError(f"{path} is damaged: its tensors cannot be read, {_short(error)}") from error


def _check_directory(path: Path, file: Any, size: int) -> None:
    """A directory of few entries, before anybody reads it: it could name millions."""
    if size < _END.size:
        raise DumpError(f"{path} is damaged or no dump of kvcanary: {size} bytes are too few")
    file.seek(max(0, size - _END.size - _LOCATOR_BYTES))
    tail = file.read()
    signature, _, _, _, entries, length, _, comment = _END.unpack(tail[-_END.size :])
    is_large = tail[: -_END.size].startswith(b"PK\x06\x07")
    if signature != b"PK\x05\x06" or comment or is_large:
        raise DumpError(f"{path} is damaged or no dump of kvcanary: it does not end as one")
    if entries > len(MEMBERS) or length > MOST_DIRECTORY_BYTES:
        raise DumpError(f"{path} is no dump of kvcanary: it has {entries} members, a dump has at most {len(MEMBERS)}")
    file.seek(0)


def _unpacked(path: Path, archive: zipfile.ZipFile) -> dict[str, bytes]:
    names = archive.namelist()
    _check_version(path, archive)
    _check_names(path, names)
    members = {}
    for info in archive.infolist():
        most = MEMBERS[info.filename]
        if info.file_size > most:
            raise DumpError(f"{path}: {info.filename} has {info.file_size} bytes unpacked, it may have {most}")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DumpError(f"{path}: {info.filename} is packed in a way that no dump is")
        members[info.filename] = _unpack(path, archive, info)
    return members


def _unpack(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as member:
        data = member.read(info.file_size + 1)
    if len(data) != info.file_size:
        raise DumpError(f"{path}: {info.filename} is not as long as it says")
    return data


def _check_version(path: Path, archive: zipfile.ZipFile) -> None:
    """Before anything else: what a newer version holds, nobody knows yet."""
    info = next((info for info in archive.infolist() if info.filename == "manifest.json"), None)
    if info is None or info.file_size > MEMBERS[info.filename]:
        return
    manifest = parse_json(path, info.filename, _unpack(path, archive, info))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DumpError(f"{path} is no dump of kvcanary: its manifest says {manifest!r:.80}")
    version = manifest.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise DumpError(f"{path} is damaged: its version is {version!r:.80}")
    if version > VERSION:
        raise DumpError(
            f"{path} has version {version}, this kvcanary reads up to {VERSION}: read it with the one that wrote it"
        )


def parse_json(path: Path, name: str, data: bytes) -> Any:
    """One JSON text; DumpError where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path} is damaged: {name} is no JSON, {_short(error)}") from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    strange = [name for name in names if name not in MEMBERS]
    if strange:
        raise DumpError(f"{path} is no dump of kvcanary: it holds {strange[0][:80]!r}")
    missing = [name for name in MEMBERS if name not in OPTIONAL and name not in names]
    if missing or len(set(names)) != len(names):
        what = f"{missing[0]} is missing" if missing else "a member is there twice"
        raise DumpError(f"{path} is damaged or no dump of kvcanary: {what}")


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


def told(error: Exception) -> str:
    """What was wrong, for the end of a sentence."""
    return f"{type(error).__name__} {error}".splitlines()[0][:120]


@contextmanager
def expect_whole(path: Path) -> Iterator[None]:
    """Within, whatever a reader stumbles over is a DumpError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"{path} is damaged: its parts do not fit together, {told(error)}") from error


class MemberReader:
    """What readers of every kind of dump share: members of a file that may be anything. DumpError names the file."""

    def __init__(self, path: Path, members: Mapping[str, bytes]) -> None:
        self._path, self._members = path, members

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        for line in self._members[name].splitlines():
            value = parse_json(self._path, name, line)
            self._expect(isinstance(value, dict), f"a line of {name} is no object")
            yield value

    def _name(self, value: Any) -> str:
        self._expect(isinstance(value, str) and len(value) <= MOST_NAME, "a name is no text, or too long")
        return str(value)

    def _expect(self, is_so: bool, what: str) -> None:
        if not is_so:
            raise DumpError(f"{self._path} is damaged: {what}")
