"""What NVML says of a GPU at this moment: through `nvidia-ml-py` (extra `gpu`), where that and a driver are there.

Counters are those since the driver was loaded ("volatile"). Xids are heard from the first question on: NVML tells of
none before. A physical address, a channel or a bank cannot be had from user space, so none is named.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

NO_WAIT_MS = 0


@cache
def library() -> Any:
    """The module `pynvml`, initialised; None where it, or a driver that answers it, is missing."""
    try:
        module: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        module.nvmlInit()
    except module.NVMLError:
        return None
    return module


class Gpu:
    """One GPU as NVML knows it; what this GPU or driver does not say is absent from its answers."""

    SAID = ("driver", "gpu", "ecc_corrected", "ecc_uncorrected", "remapped_rows", "remap_pending", "last_xid")

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._last_xid: int | None = None
        self._events: Any = None
        with suppress(nvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def now(self) -> dict[str, Any]:
        """What it says of `SAID` at this moment."""
        nvml, handle = self._nvml, self._handle
        asked: tuple[Callable[[], Any], ...] = (
            nvml.nvmlSystemGetDriverVersion,
            lambda: nvml.nvmlDeviceGetIndex(handle),
            lambda: self._errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            lambda: self._errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            lambda: sum(nvml.nvmlDeviceGetRemappedRows(handle)[:2]),
            lambda: bool(nvml.nvmlDeviceGetRemappedRows(handle)[2]),
            self._heard_xid,
        )
        told: dict[str, Any] = {}
        for name, ask in zip(self.SAID, asked, strict=True):
            with suppress(nvml.NVMLError):
                told[name] = ask()
        return told

    def _errors(self, kind: int) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEccErrors(self._handle, kind, self._nvml.NVML_VOLATILE_ECC))

    def _heard_xid(self) -> int | None:
        """The newest Xid since this GPU was first asked about; None: there was none."""
        with suppress(self._nvml.NVMLError):  # a timeout: nothing more waits
            while self._events is not None:
                heard = self._nvml.nvmlEventSetWait_v2(self._events, NO_WAIT_MS)
                self._last_xid = int(heard.eventData)
        return self._last_xid


@cache
def gpu(uuid: str) -> Gpu | None:
    """The GPU of this UUID (`GPU-...`); None where nobody can be asked about it."""
    nvml = library()
    if nvml is None:
        return None
    try:
        return Gpu(nvml, uuid)
    except nvml.NVMLError:
        return None
