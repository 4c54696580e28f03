"""Which machine, process and GPU something was found on, and where in the memory of that GPU."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

import torch

from kvcanary.hardware.nvml import gpu
from kvcanary_kernels.record.rows import WORD_BYTES

if TYPE_CHECKING:
    from kvcanary.pools.views import PoolView
    from kvcanary.provenance.changed_word import ChangedWord

#: Of what `hardware_of` says, what names the machine and the device: by DCGM exporter's labels in metrics.
LABELS = {"hostname": "hostname", "gpu": "gpu", "gpu_uuid": "UUID", "pci_bus_id": "pci_bus_id"}


def hardware_of(device: torch.device | None = None) -> dict[str, Any]:
    """hostname and pid; on a GPU gpu_uuid, pci_bus_id, gpu, and what NVML says of it now (`nvml.Gpu.now`).

    device: None where it is not known: the current GPU of a process that uses one
    """
    here: dict[str, Any] = {"hostname": platform.node(), "pid": os.getpid()}
    if device is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    if device is None or device.type != "cuda":
        return here
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    here |= {"gpu_uuid": uuid, "pci_bus_id": _pci_bus_id(properties)}
    asked = gpu(uuid)
    return here if asked is None else here | asked.now()


def labels_of(hardware: dict[str, Any]) -> dict[str, str]:
    """What is known of these as Prometheus labels, spelled as the DCGM exporter does: its samples join on `UUID`."""
    return {label: str(hardware[name]) for name, label in LABELS.items() if name in hardware}


def address_of(view: PoolView, slot: int, layer: int, word: ChangedWord | None = None) -> dict[str, Any]:
    """Where a slot's row of one layer lies, or its changed word: address in hex, offset in its allocation, word.

    `word` counts 32-bit words over the row (K, V, extras in logical order). It is a virtual address: which bank stands
    behind it, nobody outside the driver can say. Empty where the memory is gone.
    """
    piece, number = 0, 0
    if word is not None:
        piece = next(n for n, part in enumerate(view.parts) if part.name == word.part)
        part = view.parts[piece]
        number = ((word.head * part.dim + word.dim) * word.size + word.byte) // WORD_BYTES
    strides, words = view.rows.pieces[piece], view.rows.parts[piece][layer]
    page, offset = divmod(slot, strides.page_size)
    run, within = divmod(number, strides.run)
    place = page * strides.page_stride + offset * strides.slot_stride + run * strides.run_stride + within
    if words.device.type == "meta":
        return {}
    address = words.data_ptr() + WORD_BYTES * place
    base = words.untyped_storage().data_ptr()
    return {"address": f"0x{address:016x}", "offset": address - base, "word": strides.first + number}


def _pci_bus_id(properties: Any) -> str:
    """As NVML and the DCGM exporter write it: `00000000:1B:00.0`."""
    return f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
