"""Hardware errors of devices, as a stand-in for NVML reports them."""

from __future__ import annotations

import queue
import sys
import types
from typing import Any

import pytest

from rtx_distributed.elastic.devices import DeviceReports

XID, ECC = 8, 2


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml(types.ModuleType):
    """Two devices; ``report`` is what the driver would say next."""

    NVMLError = NVMLError
    NVML_ERROR_TIMEOUT = 10
    nvmlEventTypeXidCriticalError = XID
    nvmlEventTypeDoubleBitEccError = ECC

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.reports: queue.Queue[Any] = queue.Queue()
        self.registered: list[tuple[str, int]] = []

    def report(self, device: str, kind: int, data: int) -> None:
        self.reports.put(types.SimpleNamespace(device=device, eventType=kind, eventData=data))

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle-{index}"

    def nvmlDeviceGetSupportedEventTypes(self, handle: str) -> int:
        return XID if handle == "handle-1" else XID | ECC

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        self.registered.append((handle, kinds))

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return f"GPU-00000000-000{handle[-1]}".encode()

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        try:
            return self.reports.get(timeout=0.02)
        except queue.Empty:
            raise NVMLError(self.NVML_ERROR_TIMEOUT) from None


def test_hardware_errors_name_the_place_and_an_applications_own_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    heard: queue.Queue[tuple[int, str]] = queue.Queue()
    places = [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "GPU-00000000-0000"}]
    reports = DeviceReports(places, on_error=lambda place, what: heard.put((place, what)))
    assert reports.start() is None
    assert nvml.registered == [("handle-0", XID | ECC), ("handle-1", XID)]
    nvml.report("handle-0", XID, 13)  # an application's illegal access
    nvml.report("handle-1", XID, 79)
    nvml.report("handle-0", ECC, 0)
    assert heard.get(timeout=10) == (0, "Xid 79: the device has fallen off the bus")
    assert heard.get(timeout=10) == (1, "double-bit ECC error")
    reports.close()
    assert heard.empty()


def test_without_nvml_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    told = DeviceReports([], on_error=lambda place, what: None).start()
    assert told == "nvidia-ml-py is not installed (package extra `gpu`)"
