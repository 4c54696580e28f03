"""Hardware: which machine and GPU a finding was made on, what NVML said at that moment, and the address of the slot."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY

from fake_engine import FakeEngine
from kvcanary import Finding, KVCorruptionError, PoolView
from kvcanary.adapters.hosted import metrics
from kvcanary.hardware import nvml
from kvcanary.hardware.identity import address_of, hardware_of, labels_of
from kvcanary.pools.launch_site import site_name
from kvcanary.provenance.changed_word import ChangedWord
from kvcanary.report.finding import FindingLog
from kvcanary.report.render import Report

UUID = "6f1c2d3e-0000-1111-2222-333344445555"
DEVICE = torch.device("cuda", 0)


class FakeError(Exception):
    """What the fake NVML raises, as NVMLError."""


class FakeNvml:
    """NVML's answers of one GPU; `silent`: what this GPU does not say. It counts what is asked by name."""

    NVMLError = FakeError
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, silent: frozenset[str] = frozenset()) -> None:
        self.silent, self.xids, self.ecc = silent, deque[int](), {0: 3, 1: 1}
        self.registered = False

    def nvmlInit(self) -> None:
        self._say("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._say("handle")
        if uuid != f"GPU-{UUID}":
            raise FakeError(uuid)
        return "handle"

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return 5

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        self._say("ecc")
        return self.ecc[kind]

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        self._say("rows")
        return 2, 1, 1, 0

    def nvmlEventSetCreate(self) -> str:
        self._say("events")
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: str, kind: int, events: str) -> None:
        self.registered = True

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0, "nobody waits for a driver"
        if not self.xids:
            raise FakeError("timeout")
        return SimpleNamespace(eventData=self.xids.popleft())

    def _say(self, what: str) -> None:
        if what in self.silent:
            raise FakeError(what)


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A GPU and its driver, on a machine that has none."""
    fake = FakeNvml(getattr(request, "param", frozenset()))
    properties = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for cached in (nvml.library, nvml.gpu):
        cached.cache_clear()
    yield fake
    for cached in (nvml.library, nvml.gpu):
        cached.cache_clear()


def test_a_gpu_says_all_of_this_moment(driver: FakeNvml) -> None:
    """Counters are asked anew each time, and Xids heard since the first question."""
    first = hardware_of(DEVICE)
    assert first == {
        "hostname": platform.node(), "pid": os.getpid(), "gpu_uuid": f"GPU-{UUID}", "pci_bus_id": "00000000:1B:00.0",
        "driver": "580.95.05", "gpu": 5, "ecc_corrected": 3, "ecc_uncorrected": 1, "remapped_rows": 3,
        "remap_pending": True, "last_xid": None,
    }  # fmt: skip
    driver.ecc[1], driver.xids = 4, deque([63, 94])
    second = hardware_of(DEVICE)
    assert (second["ecc_uncorrected"], second["last_xid"]) == (4, 94)
    assert hardware_of(DEVICE)["last_xid"] == 94  # until another comes


@pytest.mark.parametrize(
    ("driver", "missing"),
    [
        (frozenset({"ecc"}), {"ecc_corrected", "ecc_uncorrected"}),
        (frozenset({"rows"}), {"remapped_rows", "remap_pending"}),
        (frozenset({"events"}), set()),
        (frozenset({"handle"}), set(nvml.Gpu.SAID)),
        (frozenset({"init"}), set(nvml.Gpu.SAID)),
    ],
    indirect=["driver"],
)
def test_what_a_gpu_does_not_say_is_absent(driver: FakeNvml, missing: set[str]) -> None:
    """Nothing is invented, and a driver that refuses costs no finding."""
    told = hardware_of(DEVICE)
    assert set(nvml.Gpu.SAID) - told.keys() == missing
    assert told["gpu_uuid"] == f"GPU-{UUID}"


def test_without_nvml_the_device_is_still_named(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch knows UUID and bus id; the extra is not needed for these."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert hardware_of(DEVICE).keys() == {"hostname", "pid", "gpu_uuid", "pci_bus_id"}


def test_a_cpu_is_a_machine_and_a_process(driver: FakeNvml) -> None:
    """NVML is not asked for a pool that lies on the host."""
    assert hardware_of(torch.device("cpu")) == {"hostname": platform.node(), "pid": os.getpid()}
    assert not driver.registered


def test_labels_are_spelled_as_dcgm_does(driver: FakeNvml) -> None:
    """A join on UUID needs no relabelling."""
    assert labels_of(hardware_of(DEVICE)) == {
        "hostname": platform.node(), "gpu": "5", "UUID": f"GPU-{UUID}", "pci_bus_id": "00000000:1B:00.0",
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_address_leads_to_the_word(layout: str, dtype: torch.dtype) -> None:
    """Of every element of K and V, paged or not: what lies at the address is that element's word."""
    shape = (6, 4, 2, 8) if layout == "NHD" else (6, 2, 4, 8)
    memory = torch.arange(2 * 6 * 4 * 2 * 8).to(torch.int16).reshape(2, *shape)
    k, v = (memory.to(torch.float32).to(dtype)[n] for n in (0, 1))
    view = PoolView("target", [k], [v], 4, layout=layout)
    for part, tensor in (("K", k), ("V", v)):
        for slot, head, dim in ((0, 0, 0), (5, 1, 7), (22, 1, 2)):
            element = tensor[(slot // 4, slot % 4, head) if layout == "NHD" else (slot // 4, head, slot % 4)][dim]
            word = ChangedWord(0, part, head, dim, 0, 0, 0, 0, 0.0, 0.0, dtype.itemsize)
            told = address_of(view, slot, 0, word)
            address = element.data_ptr() // 4 * 4
            assert int(told["address"], 16) == address
            assert told["offset"] == address - tensor.untyped_storage().data_ptr()
            assert told["word"] == (part == "V") * 16 * dtype.itemsize // 4 + (head * 8 + dim) * dtype.itemsize // 4


def test_memory_that_is_gone_has_no_address() -> None:
    """A pool that was put to sleep lies nowhere."""
    piece = SimpleNamespace(page_size=1, page_stride=4, slot_stride=4, run=4, run_stride=4, first=0)
    view = SimpleNamespace(rows=SimpleNamespace(pieces=[piece], parts=[[torch.zeros(8, 1, 4, device="meta")]]))
    assert address_of(view, 3, 0) == {}


def test_a_finding_says_where_and_what_the_driver_said(
    make_engine, driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its data and its text, and in the certificate; the address leads to the flipped bit itself."""
    seen = hardware_of(DEVICE)
    for module in ("describe", "certificate"):
        monkeypatch.setattr(f"kvcanary.report.{module}.hardware_of", lambda device: dict(seen))
    finding, engine = _flipped_bit(make_engine)
    told = finding.hardware
    assert {name: told[name] for name in seen} == seen
    assert ctypes.c_uint32.from_address(int(told["address"], 16)).value == int(finding.found["bits"], 16)
    text = Report((finding,), "logged", {}).text()
    assert f"GPU-{UUID} (00000000:1B:00.0) of {platform.node()}, pid {os.getpid()}; driver 580.95.05" in text
    assert "ECC corrected 3; ECC uncorrected 1; remapped rows 3; a row waits to be remapped" in text
    assert f"address {told['address']}, word {told['word']} of the row" in text
    assert "Xid" not in text
    assert "bank" not in text
    certificate = engine.canary.certificate()
    assert certificate["hardware"] == seen
    assert (certificate["bit_errors"], certificate["families"]) == (1, {"bits": 1})


def test_a_text_on_a_cpu_does_not_name_the_machine(make_engine) -> None:
    """Whoever reads it sits before it; the data has it."""
    finding, _ = _flipped_bit(make_engine)
    assert finding.hardware["hostname"] == platform.node()
    assert platform.node() not in Report((finding,), "logged", {}).text()


def test_an_incident_is_counted_once_and_a_copied_word_is_no_bit_error(make_engine) -> None:
    """`bit_errors` means memory: a word that somebody is known to have written is none."""
    finding, _ = _flipped_bit(make_engine)
    log = FindingLog()
    for own in (finding, replace(finding, site=("release", 0)), replace(finding, incident=7, part=None)):
        log.add(own)
    log.add(replace(finding, incident=8, undeclared=False, causes=()))
    assert (log.bit_errors, log.incidents) == (1, {"bits": 2, "unknown": 1})


def test_metrics_of_a_host_engine_carry_the_target_labels(make_engine) -> None:
    """Findings, incidents and bit errors; what is not known is an empty label, which Prometheus drops."""
    hardware = {"hostname": "node17", "gpu_uuid": "GPU-a", "gpu": 5, "pci_bus_id": "00000000:1B:00.0"}
    finding = replace(_flipped_bit(make_engine)[0], hardware=hardware)
    target = {"rank": "3", "hostname": "node17", "gpu": "5", "UUID": "GPU-a", "pci_bus_id": "00000000:1B:00.0"}
    metrics.found(finding, 3)
    metrics.ran(torch.device("cpu"), 3)
    value = REGISTRY.get_sample_value
    assert value("kvcanary_findings_total", {"code": "R9", "site": site_name(*finding.site), **target}) == 1
    assert value("kvcanary_incidents_total", {"family": finding.causes[0].family, **target}) == 1
    assert value("kvcanary_bit_errors_total", target) == 1
    here = {"rank": "3", "hostname": platform.node(), "gpu": "", "UUID": "", "pci_bus_id": ""}
    assert value("kvcanary_forwards_total", here) == metrics.COUNTED_STEPS


def _flipped_bit(make_engine) -> tuple[Finding, FakeEngine]:
    """The finding of one bit that nobody declared, and the engine that it was found in."""
    engine = make_engine(content="full")
    engine.start("first", 13)
    engine.step()
    engine.pools["target"].bits(1, engine.slot("first", 5), "V")[3] ^= 1 << 9
    with pytest.raises(KVCorruptionError) as caught:
        engine.step()
    return caught.value.findings[0], engine
