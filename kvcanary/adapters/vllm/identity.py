"""Identities: under which weights and which adapter the rows of a vLLM worker are computed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvcanary.adapters.vllm.block_pool import SALTS
from kvcanary_kernels.record.layout import Identity

WEIGHT_FILES = (".safetensors", ".bin", ".pt")
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file, and its beginning


class Identities:
    """Of requests that come now. vLLM keys blocks by the name of an adapter, whatever number it has.

    Rows in flight go on under new weights, as vLLM lets them; what the ones before have cached is no hit any more.
    """

    def __init__(self) -> None:
        self._weights = 0  # changes so far
        self._versions: dict[tuple[str, int, str], str] = {}
        self._salts: dict[str, str] = {}  # digests, by request

    def told(self, output: Any) -> None:
        """What the scheduler says of salts with a step."""
        for name in output.finished_req_ids:
            self._salts.pop(name, None)
        self._salts |= getattr(output, SALTS, {})

    def of(self, request: Any, name: str) -> Identity:
        """request: anything with a `lora_request`; name: its id"""
        weights, lora = str(self._weights) if self._weights else "", request.lora_request
        salt = self._salts.get(name, "")
        if lora is None:
            return Identity(salt, weights=weights)
        lora_name, number, path = (getattr(lora, own, "") for own in ("lora_name", "lora_int_id", "lora_path"))
        key = str(lora_name or lora), int(number or 0), str(path)
        if key not in self._versions:
            self._versions[key] = version_of(key[2])
        return Identity(salt, key[0], self._versions[key], weights)

    def changed(self) -> None:
        """Other weights were loaded."""
        self._weights += 1

    def loaded(self, name: str) -> None:
        """An adapter was loaded, or loaded again in its place: what its files hold is looked at again."""
        self._versions = {key: version for key, version in self._versions.items() if key[0] != name}


def version_of(path: str) -> str:
    """Of the adapter's files, by their sizes and parts of them; the path itself where that is no folder here.

    Copies of the same files are one version; a training step writes all over them.
    """
    files = sorted(own for own in Path(path).rglob("*") if own.suffix in WEIGHT_FILES) if path else []
    if not files:
        return path
    seen = hashlib.blake2b(digest_size=8)
    for own in files:
        size = own.stat().st_size
        seen.update(f"{own.name} {size} ".encode())
        with own.open("rb") as opened:
            for sample in range(SAMPLES + 1):
                opened.seek(sample * max(size - SAMPLE_BYTES, 0) // SAMPLES)
                seen.update(opened.read(SAMPLE_BYTES))
    return seen.hexdigest()
