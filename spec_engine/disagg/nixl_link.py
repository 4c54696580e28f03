"""NixlLink: the three verbs over NIXL (UCX): one-sided reads between processes and machines, of host or GPU memory."""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spec_engine.disagg.errors import FAILED, TransferError
from spec_engine.disagg.link import Piece

Base = tuple[int, int, int]  # address, bytes, number of the device


class NixlLink:
    """One agent, whose ``agent`` name is unique among all that talk to each other."""

    name = "nixl"

    def __init__(self, agent: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(agent, nixl_agent_config(True, True, 0, backends=["UCX"]))
        self._tensors: list[Tensor] = []  # nobody else may own what is registered
        self._parts: list[Base] = []
        self._kind = "DRAM"
        self._registered: Any = None
        self._peers: dict[str, tuple[str, list[Base]]] = {}  # kind of memory and parts

    def expose(self, parts: Sequence[Tensor]) -> bytes:
        """Contiguous tensors, all on one device."""
        self._tensors = list(parts)
        self._parts = [(part.data_ptr(), part.nbytes, max(part.get_device(), 0)) for part in parts]
        self._kind = "VRAM" if parts[0].is_cuda else "DRAM"
        self._registered = self._agent.register_memory(self._tensors)
        metadata = b64encode(self._agent.get_agent_metadata()).decode()
        return json.dumps([metadata, self._kind, self._parts]).encode()

    def connect(self, address: bytes) -> str:
        metadata, kind, parts = json.loads(address)
        try:
            name = self._agent.add_remote_agent(b64decode(metadata))
        except Exception as error:  # NIXL's own types, one for each status
            raise TransferError(FAILED, f"NIXL does not reach this peer: {error}") from error
        peer = name.decode() if isinstance(name, bytes) else str(name)
        self._peers[peer] = kind, parts
        return peer

    def fetch(self, peer: str, there: Sequence[Piece], here: Sequence[Piece]) -> _Read:
        kind, parts = self._peers[peer]
        remote, own = self._descriptors(parts, kind, there), self._descriptors(self._parts, self._kind, here)
        return _Read(self._agent, own, remote, peer)

    def notify(self, peer: str, message: bytes) -> None:
        try:
            self._agent.send_notif(peer, message)
        except Exception as error:
            raise TransferError(FAILED, f"NIXL does not reach {peer}: {error}") from error

    def heard(self) -> list[bytes]:
        return [message for messages in self._agent.get_new_notifs().values() for message in messages]

    def close(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None

    def _descriptors(self, parts: Sequence[Base], kind: str, pieces: Sequence[Piece]) -> Any:
        spans = []
        for piece in pieces:
            if not (0 <= piece.part < len(parts) and 0 <= piece.first <= parts[piece.part][1] - piece.count):
                raise TransferError(FAILED, f"{piece} is no piece of what is exposed")
            base, _, device = parts[piece.part]
            spans.append((base + piece.first, piece.count, device))
        return self._agent.get_xfer_descs(spans, mem_type=kind)


class _Read:
    """A `Transfer` that NIXL makes by itself; asking drives it on."""

    def __init__(self, agent: Any, own: Any, remote: Any, peer: str) -> None:
        self._agent, self._state, self._why, self._handle = agent, "PROC", "", None
        try:
            self._handle = agent.initialize_xfer("READ", own, remote, peer)
            self._state = agent.transfer(self._handle)
        except Exception as error:
            self._fail(error)

    @property
    def is_over(self) -> bool:
        if self._state not in ("DONE", "ERR"):
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:
                self._fail(error)
        if self._state in ("DONE", "ERR") and self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None
        return self._state in ("DONE", "ERR")

    @property
    def error(self) -> str:
        return "" if self._state == "DONE" else self._why or f"NIXL says {self._state}"

    def _fail(self, error: Exception) -> None:
        self._state, self._why = "ERR", f"{type(error).__name__}: {error}"
